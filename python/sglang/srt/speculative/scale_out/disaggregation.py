"""Prefill/decode disaggregation: requests whose prompt another server has computed.

SGLang moves the draft's KV with the target's, slot by slot, as both pools have the same slots. Other state of
a request comes from a prefill, which does not happen here. So a request is noted when SGLang admits it, and
the worker takes it in before its first cycle."""

from typing import Any

import torch
from sglang.srt.managers.overlap_utils import RelayPayload

from sglang_dflash.srt.speculative.cycle.prompts import table_rows
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput, PrefilledRequests


class Arrivals:
    """Requests noted on the scheduler's stream, and taken on the forward's.

    Until a running forward is over, a row of the request table may still belong to its former owner.
    """

    def __init__(self) -> None:
        self._noted: list[PrefilledRequests] = []

    def note(self, requests: PrefilledRequests) -> None:
        """Append requests that were admitted together."""
        self._noted.append(requests)

    def take(self) -> list[PrefilledRequests]:
        """Remove and return all."""
        noted, self._noted = self._noted, []
        return noted


# A process has one worker.
arrivals = Arrivals()


def build_disagg_draft_input(
    batch: Any, last_tokens_tensor: torch.Tensor, future_map: Any
) -> DFlashDraftInput:
    """Carry the requests of a "prebuilt" batch into their first cycle."""
    arrivals.note(
        PrefilledRequests(
            reqs=list(batch.reqs),
            req_pool_indices=batch.req_pool_indices,
            table_rows=table_rows(batch),
            lengths=batch.seq_lens_cpu.tolist(),
            bonus_tokens=last_tokens_tensor,
            output_ids=[list(req.output_ids) for req in batch.reqs],
        )
    )
    draft_input = DFlashDraftInput(last_tokens_tensor, batch.seq_lens, known_lens=batch.seq_lens_cpu.tolist())
    if batch.enable_overlap:
        draft_input.future_indices = batch.req_pool_indices
        future_map.publish(batch.req_pool_indices, batch.seq_lens)
        future_map.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=last_tokens_tensor))
    return draft_input
