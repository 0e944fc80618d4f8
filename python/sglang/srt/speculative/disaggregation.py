"""Requests that another server has prefilled.

SGLang moves the draft's KV with the target's, slot by slot, as both pools have the same slots. Other state of
a request comes from a prefill, which does not happen here. So a request is noted in the draft's input when
SGLang admits it, and the worker takes it in before its first cycle.
"""

from typing import Any

import torch
from sglang.srt.managers.overlap_utils import RelayPayload

from sglang_dflash.srt.speculative.cycle.host import table_rows
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput


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
