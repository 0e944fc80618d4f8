"""The target's backend and CUDA graphs per width, in SGLang's adaptive machinery.

Backends and graphs are planned for one width. SGLang's `AdaptiveController` builds a set of them per
candidate and swaps it whole. Its "steps" are drafted tokens, so width - 1. The draft's never change: it
always fills its block. On a CPU there are no graphs and our backend takes any width: candidates share it.
"""

import logging
from typing import Any

from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController, SpecRuntimeState

logger = logging.getLogger(__name__)


def captured_sizes(runner: Any) -> list[int]:
    """Return the batch sizes of the runner's CUDA graphs, ascending, if any."""
    return sorted(getattr(runner.decode_cuda_graph_runner, "capture_bs", None) or [])


def _state(steps: int, backend: Any, graphs: Any) -> SpecRuntimeState:
    return SpecRuntimeState(
        speculative_num_steps=steps,
        speculative_num_draft_tokens=steps + 1,
        draft_attn_backend=None,
        cuda_graph_runner=None,
        target_attn_backend=backend,
        target_graph_runner=graphs,
        draft_extend_attn_backend=None,
        cuda_graph_runner_for_draft_extend=None,
    )


class WidthStates:
    """Both sides of SGLang's `AdaptiveController`: its worker and its policy.

    widths: [W], ascending; the widest is what the runner was made with, if it is the whole block.
    """

    def __init__(self, runner: Any, widths: tuple[int, ...], block_size: int):
        self._runner, self._widths = runner, widths
        self._wanted = self.speculative_num_steps = block_size - 1
        self._controller = AdaptiveController(self, self)

    def begin(self) -> None:
        """Build all states, once the runner has the whole block's backend and graphs."""
        runner = self._runner
        self._controller.register(_state(self._wanted, runner.attn_backend, runner.decode_cuda_graph_runner))
        self._controller.init_states()

    def apply(self, width: int, num_requests: int) -> None:
        """Have the target verify blocks of this width from now on."""
        self._wanted = width - 1
        self._controller.activate_step_by_batch(num_requests)

    # -- SGLang's policy, which returns what `apply` set

    @property
    def candidate_steps(self) -> list[int]:
        return [width - 1 for width in self._widths]

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        pass  # every width is captured for the batch sizes of the whole block

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        return None

    def get_steps_for_batch(self, batch_size: int) -> int:
        return self._wanted

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> int | None:
        return None

    # -- SGLang's worker

    def build_adaptive_runtime_state(
        self,
        speculative_num_steps: int,
        speculative_num_draft_tokens: int,
        cuda_graph_bs: list[int] | None = None,
    ) -> SpecRuntimeState:
        runner = self._runner
        backend, graphs = runner.attn_backend, None
        if runner.req_to_token_pool.req_to_token.is_cuda:
            with get_spec().override(speculative_num_draft_tokens=speculative_num_draft_tokens):
                workspace = runner.init_new_workspace
                try:
                    backend = runner._get_attention_backend(init_new_workspace=True)
                finally:
                    runner.init_new_workspace = workspace
                if captured_sizes(runner):  # the whole block's
                    graphs = runner._decode_cuda_graph_runner_cls()(
                        runner,
                        attn_backend=backend,
                        speculative_num_draft_tokens=speculative_num_draft_tokens,
                    )
            logger.info("DFLASH: made backend and graphs for blocks of %d.", speculative_num_draft_tokens)
        return _state(speculative_num_steps, backend, graphs)

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        self.speculative_num_steps = state.speculative_num_steps
        self._runner.attn_backend = state.target_attn_backend
        self._runner.decode_cuda_graph_runner = state.target_graph_runner
