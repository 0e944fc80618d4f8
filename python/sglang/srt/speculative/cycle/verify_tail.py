"""The end of a verify graph: what a commit does whatever is accepted."""

import logging
import weakref
from typing import Any

import torch
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind

logger = logging.getLogger(__name__)


class VerifyTail:
    """Has a drafter absorb the target's states inside the target's CUDA graphs (SGLang's
    `capture_tail_hooks`): no launches of their own after verify. Where a forward replays no such graph,
    `commit` absorbs them.

    To be made before the target captures its graphs, when both runners have their pools.
    """

    def __init__(self, drafter, target_runner, draft_runner):
        self._drafter = drafter
        self._runner = target_runner
        # Those whose graphs end so. By adaptive width a target has several, and swaps them.
        self._graph_runners: weakref.WeakSet = weakref.WeakSet()
        spaces = [
            runner.kv_index_translator.space(IdSpaceKind.FULL) for runner in (target_runner, draft_runner)
        ]
        # A graph holds the slots as the target's pool names them.
        if all(space.write is None for space in spaces):
            target_runner.capture_tail_hooks.append(self._capture)
        else:
            logger.info(
                "DFLASH: the draft's context is not written in the verify graphs, as the pools name slots in two ways."
            )

    def _capture(self, graph_runner, out, forward_batch, num_tokens: int) -> None:
        """Called by SGLang at the end of each warm-up and capture of a forward."""
        self._drafter.absorb(
            out.hidden_states[:num_tokens], forward_batch.positions, forward_batch.out_cache_loc
        )
        self._graph_runners.add(graph_runner)

    def left_to_commit(self, target_out: Any) -> torch.Tensor | None:
        """The aux hidden states of a verify forward; None where its graph had them absorbed."""
        is_done = (
            target_out.can_run_cuda_graph and self._runner.decode_cuda_graph_runner in self._graph_runners
        )
        return None if is_done else target_out.logits_output.hidden_states
