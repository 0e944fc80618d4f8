"""The target's attention backend and CUDA graphs per verify width, swapped together.

Backends and graphs are planned for one width. The draft's never change: it always fills its block. On a CPU
there are no graphs and our backend takes any width, so all widths share it.
"""

import logging
from typing import Any

from sglang.srt.runtime_context import get_spec

logger = logging.getLogger(__name__)


def captured_sizes(runner: Any) -> list[int]:
    """Return the batch sizes of the runner's CUDA graphs, ascending, if any."""
    return sorted(getattr(runner.decode_cuda_graph_runner, "capture_bs", None) or [])


class TargetBackends:
    """Builds a backend and graphs per width, for a runner that has those of the whole block."""

    def __init__(self, runner: Any, widths: tuple[int, ...], block_size: int):
        self._runner = runner
        self._width: int | None = None
        self._per_width = {block_size: (runner.attn_backend, runner.decode_cuda_graph_runner)}
        for width in widths:
            if width != block_size:
                self._per_width[width] = self._build(width)
        self.apply(block_size)

    def apply(self, width: int) -> None:
        """Have the target verify blocks of this width from now on.

        If the width stays, so does the runner's backend: SGLang may have captured new graphs for it.
        """
        if width != self._width:
            self._width = width
            self._runner.attn_backend, self._runner.decode_cuda_graph_runner = self._per_width[width]

    def _build(self, width: int) -> tuple[Any, Any]:
        runner = self._runner
        if not runner.req_to_token_pool.req_to_token.is_cuda:
            return runner.attn_backend, None
        graphs = None
        with get_spec().override(speculative_num_draft_tokens=width):
            workspace = runner.init_new_workspace
            try:
                backend = runner._get_attention_backend(init_new_workspace=True)
            finally:
                runner.init_new_workspace = workspace
            if captured_sizes(runner):  # every width for the batch sizes of the whole block
                make_graphs = runner._decode_cuda_graph_runner_cls()
                graphs = make_graphs(runner, attn_backend=backend, speculative_num_draft_tokens=width)
        logger.info("DFLASH: made backend and graphs for blocks of %d.", width)
        return backend, graphs
