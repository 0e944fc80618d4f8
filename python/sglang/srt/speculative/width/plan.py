"""Plans of cycles: what is drafted and verified."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sglang_dflash.srt.speculative.cycle.verify_rows import VerifyRows
from sglang_dflash.srt.speculative.dflash_info import PrefilledRequests, Prompts
from sglang_dflash.srt.speculative.drafters.copy_stats import Proposals
from sglang_dflash.srt.speculative.width.backends import AnyRows
from sglang_dflash.srt.speculative.width.costs import Work
from sglang_dflash.srt.speculative.width.row_graphs import RowBackends

Backends = AnyRows | RowBackends


class Requests(NamedTuple):
    """The requests of a cycle, which hardly ever change from one cycle to the next."""

    # Without a prefill, equal rows hold equal requests.
    key: tuple[list[int], bool, int]  # rows, whether drafts are drawn, number of prefills so far
    rows: np.ndarray  # of the request table. [n]
    generations: np.ndarray  # which request each row held. [n]
    modes: np.ndarray  # of `MODES`. [n]


class PlannedCycle(NamedTuple):
    """Drafts and verified slots of a cycle, passed to `on_launched` and `on_accept_lens`."""

    width: int  # most slots that a request verifies, the anchor included
    lengths: np.ndarray | None = None  # drafted tokens that each request verifies. None: width - 1. [n]
    copies: np.ndarray | None = None  # with `lengths`: which requests verify a copy instead. [n] bool
    rows: VerifyRows | None = None  # with `lengths`: of the verify forward
    caps: np.ndarray | None = None  # most drafted tokens to accept per request. None: no limits. [n]
    matches: np.ndarray | None = None  # lengths that the choice knew of, 0 without a match. [n]
    batch: Requests | None = None  # None: nothing is learned
    work: Work | None = None  # None: its time is not learned from

    def verified_drafts(self, num_requests: int) -> np.ndarray:
        """Return how many drafted tokens could be accepted of each request. [n]"""
        depth = np.full(num_requests, self.width - 1) if self.lengths is None else self.lengths
        return depth if self.caps is None else np.minimum(self.caps, depth)

    def exceeds(self, caps: np.ndarray) -> bool:
        """Tell whether a request verifies more than its cap."""
        return bool((caps < (self.width - 1 if self.lengths is None else self.lengths)).any())


def planned(
    backends: Backends,
    lengths: np.ndarray,
    copies: np.ndarray,
    needs_rectangle: bool = False,
) -> PlannedCycle:
    """Have the backends verify `lengths`, and plan the cycle that does.

    With `needs_rectangle`, all requests must verify equally many tokens.
    """
    width, rows = backends.follow(lengths, needs_rectangle)
    if rows is None:
        return PlannedCycle(width)
    lengths = np.full_like(lengths, width - 1) if rows.lengths is None else rows.lengths
    return PlannedCycle(width, lengths, copies & (lengths > 0), rows)


class FixedWidth:
    """Verifies the whole block in every cycle."""

    def __init__(self, width: int):
        self._plan = PlannedCycle(width)

    def begin_prefill(self, prompts: Prompts) -> None:
        """Do nothing: a fixed width learns nothing."""

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """Do nothing."""

    def choose(
        self,
        batch: Any,
        draws_drafts: bool,
        matches: np.ndarray | None = None,
        caps: np.ndarray | None = None,
    ) -> PlannedCycle:
        """Plan whole blocks."""
        return self._plan if caps is None else self._plan._replace(caps=caps)

    def on_launched(self, cycle: PlannedCycle) -> None:
        """Do nothing."""

    def on_accept_lens(
        self, cycle: PlannedCycle, accept_lens: Sequence[int], proposals: Proposals | None = None
    ) -> None:
        """Do nothing."""

    def report(self) -> dict:
        """Return nothing for /server_info."""
        return {}
