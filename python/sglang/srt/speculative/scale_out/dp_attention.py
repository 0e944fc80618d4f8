"""DP attention: each rank of a model has its own requests, and all run its MLPs together.

The target's layers exchange rows between all ranks. So every rank takes part in every forward of the target,
with no rows if it has no requests. The draft is on the ranks that share requests (one, unless attention is
tensor parallel too). It exchanges nothing with others, and a rank without requests does not run it.

SGLang gives all ranks the same kind of step: while one prefills, ranks with nothing to prefill are idle."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.speculative.spec_utils import draft_pp_context

from sglang_dflash.srt.compat import resolve_draft_layout, run_as_draft
from sglang_dflash.srt.speculative.cycle.verify_rows import VerifyRows
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput, DFlashVerifyInput
from sglang_dflash.srt.speculative.dflash_utils import has_room_for_draft_graphs
from sglang_dflash.srt.speculative.drafters.base import Drafter


class DraftRanks:
    """Ranks of the draft: the target's, or with DP attention those sharing requests."""

    def __init__(self) -> None:
        self.layout = resolve_draft_layout()

    @contextlib.contextmanager
    def as_draft(self) -> Iterator[None]:
        """Build and run the draft as if its ranks were all there are."""
        with draft_pp_context(), run_as_draft(self.layout):
            yield

    def may_capture(self, tp_sync: Any, device: str, gpu_id: int) -> bool:
        """Tell whether the draft may have CUDA graphs.

        Not with DP attention: SGLang's graph runner asks every batch for the other ranks' rows, and the draft
        runs without those ranks."""
        return not self.layout.local_dp and has_room_for_draft_graphs(tp_sync, device, gpu_id)

    def check_target(self, target_model: Any) -> None:
        """Raise ValueError if layers that the draft borrows from the target are on other ranks."""
        if not self.layout.local_dp:
            return
        borrowed = {"embedding": target_model.get_input_embeddings(), "LM head": target_model.lm_head}
        for name, layer in borrowed.items():
            # A plain embedding is whole on every rank.
            ranks = getattr(unwrap_lora_layer(layer), "tp_size", self.layout.attn_tp_size)
            if ranks != self.layout.attn_tp_size:
                raise ValueError(
                    f"DFLASH with DP attention does not support {type(target_model).__name__}: its {name} is "
                    "split over all ranks, and the draft that borrows it is on the ranks that share requests."
                )


class SubgroupDrafter:
    """A drafter on fewer ranks than the target, which to its layers are all ranks.

    The part inside the target's graphs (`absorb`) exchanges nothing, and needs no context.
    """

    def __init__(self, drafter: Drafter, layout: Any):
        self._drafter, self._layout = drafter, layout
        self.mask_token_id, self.num_draft_rows = drafter.mask_token_id, drafter.num_draft_rows
        self.has_own_table, self.writes_context_apart = drafter.has_own_table, drafter.writes_context_apart
        self.defers_plain_cycles = drafter.defers_plain_cycles
        self.attach_pools, self.absorb, self.draw = drafter.attach_pools, drafter.absorb, drafter.draw
        self.to_draft = drafter.to_draft
        self.begin_prefill = self._on_own_ranks(drafter.begin_prefill)
        self.prefill = self._on_own_ranks(drafter.prefill)
        self.admit_prefilled = self._on_own_ranks(drafter.admit_prefilled)
        self.propose = self._on_own_ranks(drafter.propose)
        self.commit = self._on_own_ranks(drafter.commit)

    def _on_own_ranks(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with run_as_draft(self._layout):
                return method(*args, **kwargs)

        return run


def disable_graphs_if_any_rank_idle(forward_batch: ForwardBatch) -> None:
    """Keep all ranks from replaying a CUDA graph of the target if one of them is idle.

    A graph's rows are padded and an idle rank's are not, so each would look for the other's rows elsewhere.
    """
    requests = forward_batch.original_global_num_tokens_cpu
    if requests is not None and 0 in requests:
        forward_batch.can_run_decode_cuda_graph = False


def run_idle(batch: Any, target_worker: Any, block_size: int) -> GenerationBatchResult:
    """Take part in the target's forward, prefill or verify, on a rank without requests."""
    nothing = torch.empty((0,), dtype=torch.int64, device=target_worker.device)
    if not batch.is_extend_in_batch:
        # SGLang reads from it how many rows each request of the other ranks has.
        batch.spec_info = DFlashVerifyInput.for_target(VerifyRows(0, block_size), nothing, nothing)
    forward_batch = ForwardBatch.init_new(
        batch,
        target_worker.model_runner,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        return_hidden_states_before_norm=False,
    )
    disable_graphs_if_any_rank_idle(forward_batch)
    target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
    return GenerationBatchResult(
        next_token_ids=nothing,
        accept_lens=nothing.int(),
        next_draft_input=DFlashDraftInput.empty(target_worker.device),
        new_seq_lens=nothing,
        can_run_cuda_graph=False,
        speculative_num_draft_tokens=block_size,
    )
