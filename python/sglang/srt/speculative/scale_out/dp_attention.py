"""DP attention: the ranks of one model have requests of their own, and run its MLPs together.

The target's layers exchange rows between all ranks, so each of them takes part in every forward of the
target, with no rows where it has no requests. The draft stays on the ranks that share requests (one, unless
attention is tensor parallel as well): it exchanges nothing with the others, and a rank without requests does
not run it.

SGLang has all ranks do the same kind of step: where one prefills, those with nothing to prefill are idle.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelLayout, DraftParallelSpec, DraftTPExecution
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context

from sglang_dflash.srt.speculative.acceptance.greedy import Verdict
from sglang_dflash.srt.speculative.dflash_info import Cycle, DFlashDraftInput, DFlashVerifyInput, Prompts
from sglang_dflash.srt.speculative.dflash_utils import has_room_for_draft_graphs
from sglang_dflash.srt.speculative.drafters.base import DraftBlock, Drafter
from sglang_dflash.srt.speculative.scale_out.disaggregation import Arrival


class DraftRanks:
    """The ranks that the draft is on: those of the target, or with DP attention the ones that share
    requests."""

    def __init__(self):
        self.layout = resolve_draft_parallel_layout(
            DraftParallelSpec(tp_execution=DraftTPExecution.SINGLE_GROUP)
        )

    @contextlib.contextmanager
    def as_draft(self) -> Iterator[None]:
        """What the draft is built and started in: its ranks are all there are."""
        with draft_pp_context(), draft_tp_context(self.layout):
            yield

    def may_capture(self, tp_sync: Any, device: str, gpu_id: int) -> bool:
        """Whether the draft may have CUDA graphs. Not with DP attention: SGLang's graph runner asks every
        batch how many rows the other ranks have, and the draft's have no say in that."""
        return not self.layout.local_dp and has_room_for_draft_graphs(tp_sync, device, gpu_id)

    def place(self, drafter: Drafter, target_model: Any) -> Drafter:
        """The drafter, running on these ranks. Raises ValueError where what it borrows from the target is on
        others."""
        if not self.layout.local_dp:
            return drafter
        borrowed = {"embedding": target_model.get_input_embeddings(), "LM head": target_model.lm_head}
        for what, layer in borrowed.items():
            # A plain embedding is whole on every rank.
            if getattr(layer, "tp_size", self.layout.attn_tp_size) != self.layout.attn_tp_size:
                raise ValueError(
                    f"DFLASH with DP attention does not support {type(target_model).__name__}: its {what} is split over all "
                    "ranks, and the draft, which borrows it, is on those that share requests."
                )
        return PlacedDrafter(drafter, self.layout)


class PlacedDrafter:
    """A drafter whose draft is on fewer ranks than the target: to its layers, those are all there are. What
    runs inside the target's graphs (`absorb`) exchanges nothing, and needs no such care."""

    def __init__(self, drafter: Drafter, layout: DraftParallelLayout):
        self._drafter, self._layout = drafter, layout

    def __getattr__(self, name: str) -> Any:
        if name == "_drafter":  # or a lookup before __init__ recurses
            raise AttributeError(name)
        return getattr(self._drafter, name)

    def begin_prefill(self, prompts: Prompts) -> None:
        with draft_tp_context(self._layout):
            self._drafter.begin_prefill(prompts)

    def prefill(
        self, prompts: Prompts, aux_hidden: torch.Tensor, cache_loc: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        with draft_tp_context(self._layout):
            self._drafter.prefill(prompts, aux_hidden, cache_loc, next_tokens)

    def join(self, arrival: Arrival) -> None:
        with draft_tp_context(self._layout):
            self._drafter.join(arrival)

    def propose(self, cycle: Cycle, sampling_info=None) -> DraftBlock:
        with draft_tp_context(self._layout):
            return self._drafter.propose(cycle, sampling_info)

    def commit(self, cycle: Cycle, aux_hidden: torch.Tensor | None, verdict: Verdict) -> None:
        with draft_tp_context(self._layout):
            self._drafter.commit(cycle, aux_hidden, verdict)


def keep_in_step(forward_batch: ForwardBatch) -> None:
    """Before a forward of the target: where a rank is idle, none replays a CUDA graph. A graph's rows are
    padded, the idle rank's are not, and they would look for each other's rows in different places."""
    requests = forward_batch.original_global_num_tokens_cpu
    if requests is not None and 0 in requests:
        forward_batch.can_run_decode_cuda_graph = False


def run_idle(batch, target_worker, verify_width: int) -> GenerationBatchResult:
    """The step of a rank that has no requests in it: its part in the target's forward, prefill or verify."""
    nothing = torch.empty((0,), dtype=torch.int64, device=target_worker.device)
    if not batch.is_extend_in_batch:
        # By its width SGLang knows how many rows the other ranks' requests have.
        batch.spec_info = DFlashVerifyInput.of_target(verify_width, tokens=nothing, positions=nothing)
    forward_batch = ForwardBatch.init_new(
        batch,
        target_worker.model_runner,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        return_hidden_states_before_norm=False,
    )
    keep_in_step(forward_batch)
    target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
    return GenerationBatchResult(
        next_token_ids=nothing,
        accept_lens=nothing.int(),
        next_draft_input=DFlashDraftInput.empty(target_worker.device),
        new_seq_lens=nothing,
        can_run_cuda_graph=False,
        speculative_num_draft_tokens=verify_width,
    )
