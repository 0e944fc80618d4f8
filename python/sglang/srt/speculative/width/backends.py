"""Attention backends of the target, and their CUDA graphs, swapped together.

Our backend on a CPU takes any rows, and there are no graphs. Others are planned for one width, except
those of `row_graphs.py`. The draft's never change: it always fills its block.
"""

import logging
from typing import Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_spec
from sglang.srt.utils.common import get_available_gpu_memory

from sglang_dflash.srt.speculative.cycle.verify_rows import VerifyRows
from sglang_dflash.srt.speculative.width.row_graphs import PreparedLayout

logger = logging.getLogger(__name__)

# Left free beside the graphs of all widths.
_SPARE_GB = 1.0


def captured_sizes(runner: Any) -> list[int]:
    """Return the batch sizes of the runner's CUDA graphs, ascending, if any."""
    return sorted(getattr(runner.decode_cuda_graph_runner, "capture_bs", None) or [])


def has_room_for_widths(runner: Any, num_further: int, tp_group: Any) -> bool:
    """Tell whether further widths fit into GPU memory, alike on all ranks.

    The backend and graphs of a narrower width take no more than those of the whole block, which SGLang has
    measured.
    """
    if runner.device != "cuda":
        return True
    each = max(runner.graph_memory_usage.get("target_verify", 0.0), 0.0)
    wanted = num_further * each + _SPARE_GB
    free = get_available_gpu_memory(runner.device, runner.gpu_id)
    left = torch.tensor(free - wanted, dtype=torch.float64)
    if tp_group.world_size > 1:
        torch.distributed.all_reduce(left, torch.distributed.ReduceOp.MIN, group=tp_group.cpu_group)
    if left < 0:
        logger.warning(
            "DFLASH verifies whole blocks: %.2f GB of GPU memory are left, and backends and graphs of %d "
            "further widths may take %.2f GB. A lower --mem-fraction-static makes room, and so do fewer "
            "candidate_steps in --speculative-adaptive-config.",
            free,
            num_further,
            wanted,
        )
    return bool(left >= 0)


class AnyRows:
    """A backend without graphs, which takes any rows of each request.

    has_layouts: whether the target's layers read SGLang's layout of the rows.
    """

    own_lengths = True

    def __init__(self, has_layouts: bool = False):
        self._has_layouts = has_layouts

    def follow(self, lengths: np.ndarray, needs_rectangle: bool = False) -> tuple[int, VerifyRows]:
        """Return the width and rows of a cycle that verifies `lengths` drafted tokens, [n].

        needs_rectangle: whether all verify as many as the one that verifies most.
        """
        width = int(lengths.max()) + 1
        if needs_rectangle:
            lengths = np.full_like(lengths, width - 1)
        layout = None
        if self._has_layouts and not (lengths == width - 1).all():
            counts = (lengths + 1).tolist()
            layout = PreparedLayout.of(counts, sum(counts), "cpu")
        return width, VerifyRows(len(lengths), width, lengths, layout=layout)


class WidthBackends:
    """Builds a backend and graphs per width, for a runner that has those of the whole block."""

    own_lengths = False

    def __init__(self, runner: Any, widths: tuple[int, ...], block_size: int):
        self._runner = runner
        self._width: int | None = None
        self._per_width = {block_size: (runner.attn_backend, runner.decode_cuda_graph_runner)}
        for width in widths:
            if width != block_size:
                self._per_width[width] = self._build(width)
        self._use(block_size)

    def follow(self, lengths: np.ndarray, needs_rectangle: bool = False) -> tuple[int, None]:
        """Have the target verify so many drafted tokens of each request, all alike, from now on."""
        width = int(lengths[0]) + 1
        self._use(width)
        return width, None

    def _use(self, width: int) -> None:
        # If the width stays, so does the runner's backend: SGLang may have captured new graphs for it.
        if width != self._width:
            self._width = width
            self._runner.attn_backend, self._runner.decode_cuda_graph_runner = self._per_width[width]

    def _build(self, width: int) -> tuple[Any, Any]:
        runner = self._runner
        if not runner.req_to_token_pool.req_to_token.is_cuda:
            return runner.attn_backend, None
        graphs = None
        with get_spec().override(speculative_num_draft_tokens=width):
            # FlashInfer's workspace holds partial results of one forward. Forwards of all widths run on one
            # stream, so they share it; each captured graph has a plan of its own.
            backend = runner._get_attention_backend(init_new_workspace=False)
            if captured_sizes(runner):  # every width for the batch sizes of the whole block
                make_graphs = runner._decode_cuda_graph_runner_cls()
                graphs = make_graphs(runner, attn_backend=backend, speculative_num_draft_tokens=width)
        logger.info("DFLASH: made backend and graphs for blocks of %d.", width)
        return backend, graphs
