"""Several ranks and servers: DP attention, and prefill on another server.

DP attention: each rank of a model has its own requests, and all run its MLPs together. The target's layers
exchange rows between all ranks. So every rank takes part in every forward of the target, with no rows if it
has no requests. The draft is on the ranks that share requests (one, unless attention is tensor parallel too).
It exchanges nothing with others, and a rank without requests does not run it. SGLang gives all ranks the same
kind of step: while one prefills, ranks with nothing to prefill are idle.

Prefill/decode disaggregation: SGLang moves the draft's KV with the target's, slot by slot, as both pools have
the same slots. Other state of a request comes from a prefill, which does not happen here. So a request is
noted in the draft's input when SGLang admits it, and the worker takes it in before its first cycle.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.managers.overlap_utils import RelayPayload
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.speculative.spec_utils import draft_pp_context

from sglang_dflash.srt.compat import run_as_draft
from sglang_dflash.srt.speculative.cycle.host import table_rows
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests
from sglang_dflash.srt.speculative.cycle.verify import disable_graphs_if_any_rank_idle
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput, DFlashVerifyInput


def build_disagg_draft_input(
    batch: Any, last_tokens_tensor: torch.Tensor, future_map: Any
) -> DFlashDraftInput:
    """Carry the requests of a "prebuilt" batch into their first cycle."""
    lengths = batch.seq_lens_cpu.tolist()
    arrival = PrefilledRequests(
        reqs=list(batch.reqs),
        req_pool_indices=batch.req_pool_indices,
        table_rows=table_rows(batch),
        lengths=lengths,
        bonus_tokens=last_tokens_tensor,
        output_ids=[list(req.output_ids) for req in batch.reqs],
    )
    draft_input = DFlashDraftInput(last_tokens_tensor, batch.seq_lens, arrivals=[arrival])
    if batch.enable_overlap:
        draft_input.future_indices = batch.req_pool_indices
        future_map.publish(batch.req_pool_indices, batch.seq_lens)
        future_map.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=last_tokens_tensor))
    return draft_input


@contextlib.contextmanager
def as_draft(layout: Any) -> Iterator[None]:
    """Build and run the draft as if the ranks of its layout were all there are."""
    with draft_pp_context(), run_as_draft(layout):
        yield


def check_borrowed_layers(layout: Any, target_model: Any) -> None:
    """Raise ValueError if a layer that the draft borrows is missing, or on other ranks.

    `layout` is that of the draft's ranks.
    """
    head = getattr(target_model, "lm_head", None)
    if head is None:
        raise ValueError(
            f"DFLASH borrows the LM head of the target, and {type(target_model).__name__} has none."
        )
    if not layout.local_dp:
        return
    for name, layer in ("embedding", target_model.get_input_embeddings()), ("LM head", head):
        # A plain embedding is whole on every rank.
        if getattr(unwrap_lora_layer(layer), "tp_size", layout.attn_tp_size) != layout.attn_tp_size:
            raise ValueError(
                f"DFLASH with DP attention does not support {type(target_model).__name__}: its {name} is "
                "split over all ranks, and the draft that borrows it is on the ranks that share requests."
            )


def run_idle(batch: Any, target_worker: Any, block_size: int) -> GenerationBatchResult:
    """Take part in the target's forward, prefill or verify, on a rank without requests."""
    nothing = torch.empty((0,), dtype=torch.int64, device=target_worker.device)
    if not batch.is_extend_in_batch:
        # SGLang reads from it how many rows each request of the other ranks has.
        batch.spec_info = DFlashVerifyInput(block_size, CaptureHiddenMode.FULL, nothing, nothing)
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
        next_draft_input=DFlashDraftInput(nothing, nothing),
        new_seq_lens=nothing,
        can_run_cuda_graph=False,
        speculative_num_draft_tokens=block_size,
    )
