"""What came of each cycle's proposals by their source, on the host: for the metrics, and to know when no
draft is needed.

Nothing here waits for the device: what a cycle proposed is copied to the host as it begins, and read when
SGLang tells what was kept of it, which is later on the same stream."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

DRAFT, COPY = "draft", "copy"
# Cycles in a row of which every request kept a whole copied block, after which the next one is not drafted
# for. Under overlap scheduling the last one or two are not known yet: a copy that ends in them costs its
# request about a cycle, and a draft forward is about a sixth of one (benchmark/ROOFLINE.md). A copy that has
# gone on for so long is likely to go on for as long again.
WHOLE_CYCLES = 8


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A cycle whose outcome is not known yet. lengths: [bs] int32 on the host, `choose_copies`', None where
    it proposed nothing; valid once `copied` is over. generation: prefills before it."""

    num_requests: int
    lengths: torch.Tensor | None
    copied: torch.cuda.Event | None
    was_drafted: bool
    generation: int


class Outcomes:
    """metrics: counted into, by source."""

    def __init__(self, metrics):
        self._metrics = metrics
        self._under_way: deque[_UnderWay] = deque()
        self._generation = 0
        self._whole = 0
        self._cycles = self._without_draft = 0
        self._blocks, self._proposed, self._accepted = Counter(), Counter(), Counter()

    @property
    def all_copy(self) -> bool:
        """Whether, as far as the host knows, every running request is in the middle of a copy."""
        return self._whole >= WHOLE_CYCLES

    def began(self) -> None:
        """New requests: what older cycles say is no longer about all of them."""
        self._generation += 1
        self._whole = 0

    def proposed(self, num_requests: int, lengths: torch.Tensor | None, was_drafted: bool) -> None:
        """A cycle begins. lengths: [bs] int32, on the device."""
        copied = None
        if lengths is not None and lengths.is_cuda:
            lengths = lengths.to("cpu", non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._under_way.append(_UnderWay(num_requests, lengths, copied, was_drafted, self._generation))

    def kept(self, accepted: Sequence[int], drafted: int) -> None:
        """The oldest cycle not told of yet kept so many of the `drafted` proposed tokens of each of its
        requests."""
        entry = self._under_way.popleft()
        assert len(accepted) == entry.num_requests, "SGLang tells of every cycle once, in order"
        self._cycles += 1
        if entry.lengths is None:
            self._whole = 0
            return
        if entry.copied is not None:
            entry.copied.synchronize()  # over: SGLang waited for what came after it
        self._without_draft += not entry.was_drafted
        is_copied = [length > 0 for length in entry.lengths.tolist()]
        by_source = {
            COPY: [kept for kept, copied in zip(accepted, is_copied, strict=True) if copied],
            # Where nothing was drafted, what stands beside copies has no source.
            DRAFT: [
                kept
                for kept, copied in zip(accepted, is_copied, strict=True)
                if not copied and entry.was_drafted
            ],
        }
        for source, kept in by_source.items():
            self._blocks[source] += len(kept)
            self._proposed[source] += drafted * len(kept)
            self._accepted[source] += sum(kept)
            self._metrics.count_source(source, len(kept), drafted * len(kept), sum(kept))
        self._metrics.count_undrafted(not entry.was_drafted)
        is_whole = all(is_copied) and drafted > 0 and min(accepted, default=0) == drafted
        self._whole = self._whole + 1 if is_whole and entry.generation == self._generation else 0

    def report(self) -> dict:
        """For /server_info: plain numbers."""
        return {
            "cycles": self._cycles,
            "cycles_without_draft": self._without_draft,
            "blocks": dict(self._blocks),
            "proposed_tokens": dict(self._proposed),
            "accepted_tokens": dict(self._accepted),
        }
