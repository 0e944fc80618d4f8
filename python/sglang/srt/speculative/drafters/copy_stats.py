"""Outcomes of proposals by their source, for metrics and to skip unneeded drafts.

Nothing here waits for the device. The lengths a cycle proposed are copied to the host as it begins. They are
read when SGLang reports its accept lengths, later on the same stream."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics

DRAFT, COPY = "draft", "copy"
# Cycles in a row in which every request accepted a whole copied block, after which the next cycle skips the
# draft. Under overlap scheduling the last one or two are not known yet: a copy that ends in them costs its
# request about a cycle, and a draft forward is about a sixth of one (benchmark/ROOFLINE.md). A copy that has
# gone on for so long is likely to go on for as long again.
WHOLE_CYCLES = 8


@dataclass(frozen=True, slots=True)
class Proposals:
    """Sources of the blocks of one cycle.

    Attributes:
        lengths: [bs] int32 on the host, lengths of the requests' matches. 0: none. Negative: passed over for
            the draft. None: no lookup.
        transferred: end of the transfer of `lengths` and `right` to the host.
        was_drafted: whether the draft ran.
        admissions: prefills and arrivals before the cycle.
        right: [bs] int64 on the host, tokens of each match's continuation that were the target's, used or
            not. None: not compared.
    """

    lengths: torch.Tensor | None
    transferred: torch.Event | None
    was_drafted: bool
    admissions: int
    right: torch.Tensor | None = None


class CopyStats:
    """Counts blocks, proposed and accepted tokens by source, here and in the metrics."""

    def __init__(self, metrics: DFlashMetrics):
        self._metrics = metrics
        self._admissions = 0
        self._whole = 0
        self._cycles = self._without_draft = 0
        self._blocks: Counter[str] = Counter()
        self._proposed: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()

    @property
    def all_copy(self) -> bool:
        """True if, as far as the host knows, every running request is inside a copy."""
        return self._whole >= WHOLE_CYCLES

    def on_admission(self) -> None:
        """Note new requests: older cycles are no longer about all of them."""
        self._admissions += 1
        self._whole = 0

    def proposals(
        self, lengths: torch.Tensor | None, was_drafted: bool, right: torch.Tensor | None = None
    ) -> Proposals:
        """Record a cycle that begins. Arguments are those of `Proposals`, on the device."""
        transferred = None
        if lengths is not None and lengths.is_cuda:
            transferred = torch.get_device_module(lengths.device).Event()
            lengths = lengths.to("cpu", non_blocking=True)
            right = None if right is None else right.to("cpu", non_blocking=True)
            transferred.record()
        return Proposals(lengths, transferred, was_drafted, self._admissions, right)

    def on_accept_lens(
        self, cycle: Proposals, accept_lens: Sequence[int], num_drafted: Sequence[int]
    ) -> None:
        """Count the accepted ones of `num_drafted` proposed tokens of each request."""
        self._cycles += 1
        if cycle.lengths is None:
            self._whole = 0
            return
        if cycle.transferred is not None:
            cycle.transferred.synchronize()  # over already: SGLang has waited for later work
        if not any(num_drafted):
            self._whole = 0
            return
        self._without_draft += not cycle.was_drafted
        is_copied = [length > 0 for length in cycle.lengths.tolist()]
        for source in (COPY, DRAFT):
            # If nothing was drafted, the tokens beside copies have no source.
            blocks = [
                (kept, drafted)
                for kept, drafted, copied in zip(accept_lens, num_drafted, is_copied, strict=True)
                if drafted and copied == (source == COPY) and (copied or cycle.was_drafted)
            ]
            accepted, proposed = (sum(block[i] for block in blocks) for i in (0, 1))
            self._blocks[source] += len(blocks)
            self._proposed[source] += proposed
            self._accepted[source] += accepted
            self._metrics.count_source(source, len(blocks), proposed, accepted)
        self._metrics.count_undrafted(not cycle.was_drafted)
        is_whole = all(is_copied) and list(accept_lens) == list(num_drafted)
        self._whole = self._whole + 1 if is_whole and cycle.admissions == self._admissions else 0

    def report(self) -> dict[str, Any]:
        """Return plain numbers for /server_info."""
        return {
            "cycles": self._cycles,
            "cycles_without_draft": self._without_draft,
            "blocks": dict(self._blocks),
            "proposed_tokens": dict(self._proposed),
            "accepted_tokens": dict(self._accepted),
        }
