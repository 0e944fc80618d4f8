"""Prefill/decode disaggregation: requests whose prompt another server has computed.

SGLang moves the draft's KV with the target's, slot by slot, as both pools have the same slots. What a worker
keeps of a request besides comes from a prefill, which here does not take place: an arriving request is noted
when SGLang admits it, and the worker takes it in before its first cycle."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import RelayPayload

from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput


@dataclass(frozen=True, slots=True)
class Arrival:
    """Requests that were admitted together: from the prefill server, or resumed after a retraction.

    reqs: SGLang's. req_pool_indices: [bs] int64. lengths: of each, tokens with KV, n. bonus_tokens: [bs]
    int64, the token at position n. said: the output ids of each, the bonus token included, as they were then.
    """

    reqs: Sequence[Any]
    req_pool_indices: torch.Tensor
    lengths: list[int]
    bonus_tokens: torch.Tensor
    said: list[list[int]]


class Arrivals:
    """Noted on the scheduler's stream, taken on the forward's: until a running forward is over, a row of the
    request table may still be its former owner's."""

    def __init__(self):
        self._noted: list[Arrival] = []

    def note(self, arrival: Arrival) -> None:
        self._noted.append(arrival)

    def take(self) -> list[Arrival]:
        noted, self._noted = self._noted, []
        return noted


# Of the one worker that a process has.
arrivals = Arrivals()


def build_disagg_draft_input(
    batch: Any, last_tokens_tensor: torch.Tensor, future_map: Any
) -> DFlashDraftInput:
    """In the place of SGLang's: what carries the requests of a "prebuilt" batch into their first cycle."""
    arrivals.note(
        Arrival(
            reqs=list(batch.reqs),
            req_pool_indices=batch.req_pool_indices,
            lengths=batch.seq_lens_cpu.tolist(),
            bonus_tokens=last_tokens_tensor,
            said=[list(req.output_ids) for req in batch.reqs],
        )
    )
    draft_input = DFlashDraftInput(bonus_tokens=last_tokens_tensor, new_seq_lens=batch.seq_lens)
    if batch.enable_overlap:
        draft_input.future_indices = batch.req_pool_indices
        future_map.publish(batch.req_pool_indices, batch.seq_lens)
        future_map.stash(batch.req_pool_indices, RelayPayload(bonus_tokens=last_tokens_tensor))
    return draft_input
