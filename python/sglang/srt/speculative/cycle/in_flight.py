"""Cycles that run while the host prepares the next ones."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dflash.srt.speculative.drafters.copy_stats import Proposals
from sglang_dflash.srt.speculative.width.adaptive import PlannedCycle


@dataclass(frozen=True, slots=True)
class CycleInFlight:
    """A launched cycle whose accept lengths the host does not know yet.

    Attributes:
        num_requests: requests of the cycle.
        plan: choice of the verify length.
        proposals: sources of the blocks, if copies are enabled.
    """

    num_requests: int
    plan: PlannedCycle
    proposals: Proposals | None

    @property
    def num_drafted(self) -> int:
        """Drafted tokens verified of each request."""
        return self.plan.width - 1


class CyclesInFlight:
    """Launched cycles, oldest first. SGLang reports the accept lengths of each once, in order."""

    def __init__(self) -> None:
        self._cycles: deque[CycleInFlight] = deque()

    def launch(self, cycle: CycleInFlight) -> None:
        """Append a cycle."""
        self._cycles.append(cycle)

    def land(self, accept_lens: Sequence[int]) -> CycleInFlight:
        """Remove and return the oldest cycle, whose accept lengths are now known."""
        cycle = self._cycles.popleft()
        assert len(accept_lens) == cycle.num_requests, "SGLang reports every cycle once, in order"
        return cycle
