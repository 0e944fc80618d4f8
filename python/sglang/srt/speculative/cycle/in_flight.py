"""Cycles that run while the host prepares the next ones."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dflash.srt.speculative.drafters.copy_stats import Proposals
from sglang_dflash.srt.speculative.width.plan import PlannedCycle


@dataclass(slots=True, eq=False)
class CycleInFlight:
    """A launched cycle. The host learns its accept lengths when it lands.

    Attributes:
        num_requests: requests of the cycle.
        plan: choice of the verify length.
        proposals: sources of the blocks, if copies are enabled.
        has_landed: whether the host knows the accept lengths.
        previous: the cycle launched before, until it lands.
    """

    num_requests: int
    plan: PlannedCycle
    proposals: Proposals | None
    has_landed: bool = False
    previous: "CycleInFlight | None" = None

    @property
    def verify_len(self) -> int:
        """Tokens that the cycle adds to a request at most. It adds one at least."""
        return self.plan.width

    @property
    def num_drafted(self) -> list[int]:
        """Drafted tokens of each request that could be accepted."""
        return self.plan.verified_drafts(self.num_requests).tolist()


class CyclesInFlight:
    """Launched cycles, oldest first. SGLang reports the accept lengths of each once, in order."""

    def __init__(self) -> None:
        self._cycles: deque[CycleInFlight] = deque()

    def launch(self, cycle: CycleInFlight) -> CycleInFlight:
        """Append a cycle, and return it."""
        cycle.previous = self._cycles[-1] if self._cycles else None
        self._cycles.append(cycle)
        return cycle

    def land(self, accept_lens: Sequence[int]) -> CycleInFlight:
        """Remove and return the oldest cycle, whose accept lengths are now known."""
        cycle = self._cycles.popleft()
        assert len(accept_lens) == cycle.num_requests, "SGLang reports every cycle once, in order"
        cycle.has_landed = True
        if self._cycles:
            self._cycles[0].previous = None
        return cycle
