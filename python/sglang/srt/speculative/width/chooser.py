"""The width policy with its memory, independent of engine and tensors."""

import itertools
from dataclasses import dataclass, replace

import numpy as np

from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import SurvivalEstimate
from sglang_dflash.srt.speculative.width.policy import (
    DEFAULTS,
    Constants,
    Exploration,
    WidthState,
    expected_tokens,
    explore,
    fastest_width,
    update_width,
)

# A decision, with what it learns first, takes the host most of a millisecond. So it holds for a quarter of
# the cycles since the width last moved, within these bounds, while at most this share of requests changed.
_HOLD_AT_LEAST, _HOLD_AT_MOST, _MAY_CHANGE = 4, 32, 1 / 4


@dataclass(frozen=True, slots=True)
class Choice:
    """A decision for some requests, with the expectations that led to it."""

    num_requests: int
    width: int  # slots to verify, the anchor included
    index: int  # of the width among the candidates
    is_probe: bool  # verified to learn, not because it is the fastest
    tokens: np.ndarray  # expected of a cycle of these requests, per candidate. [W]
    seconds: np.ndarray  # likewise. [W]
    drafts: bool = True  # whether the draft runs, if anything is verified


class WidthChooser:
    """Chooses widths from `costs`, which names the candidates, and from `estimate`."""

    def __init__(self, costs: CostTable, estimate: SurvivalEstimate, constants: Constants = DEFAULTS):
        self.costs, self._estimate, self._constants = costs, estimate, constants
        self._unlearned: list[tuple[np.ndarray, np.ndarray, int, np.ndarray]] = []
        self._state: WidthState | None = None
        self._exploration = Exploration()
        self._held: Choice | None = None
        self._hold_for = 0
        self._cycles = self._num_new = 0  # since the last decision: cycles and new requests

    @property
    def estimate(self) -> SurvivalEstimate:
        """The estimate, with all accept lengths learned.

        They are learned on demand: many cycles together cost a fraction of one at a time between two
        forwards, which evict all of it from the processor's caches.
        """
        self._learn()
        return self._estimate

    def _learn(self) -> None:
        def batch_and_width(cycle):  # as long as a batch stays the same it comes as the same arrays
            return id(cycle[0]), id(cycle[1]), cycle[2]

        for _, alike in itertools.groupby(self._unlearned, batch_and_width):
            rows, modes, drafted, _ = (cycles := list(alike))[0]
            self._estimate.learn(rows, modes, drafted, np.array([accepted for *_, accepted in cycles]))
        self._unlearned.clear()

    def choose(
        self,
        rows: np.ndarray,
        modes: np.ndarray,
        num_tokens: int | None = None,
        caps: np.ndarray | None = None,
    ) -> Choice:
        """Choose the width of the next cycle.

        Args:
            rows: of the request table. [n]
            modes: of `MODES`. [n]
            num_tokens: committed tokens of all requests; None: as many as costs were measured with.
            caps: the most drafted tokens that each request may accept. None: no limits. [n]
        """
        self._cycles += 1
        held, num_requests = self._held, len(rows)
        if held is not None and self._cycles < self._hold_for:
            num_left = abs(held.num_requests + self._num_new - num_requests)
            if max(self._num_new, num_left) <= _MAY_CHANGE * num_requests:
                return held
        choice = self._decide(rows, modes, num_tokens, caps, self._cycles)
        self._cycles = self._num_new = 0
        return choice

    def _decide(
        self,
        rows: np.ndarray,
        modes: np.ndarray,
        num_tokens: int | None,
        caps: np.ndarray | None,
        cycles: int,
    ) -> Choice:
        num_requests, widths, constants = len(rows), self.costs.widths, self._constants
        estimate = self.estimate
        accept_probs = estimate.accept_probs(rows, modes)
        is_unknown = estimate.lacks_data(modes)
        if caps is not None:
            accept_probs[np.arange(estimate.depth) >= caps[:, None]] = 0.0
            is_unknown &= caps > 0  # the others teach nothing
        lacks_data = bool(is_unknown.any())
        tokens = expected_tokens(accept_probs, widths)
        seconds = self.costs.seconds(num_requests, num_tokens)
        if self._state is None or lacks_data:
            best = fastest_width(tokens, seconds, constants.free_rows)
            self._state = WidthState.fresh(best, len(widths), num_requests)
        else:
            self._state = update_width(self._state, tokens, seconds, num_requests, constants, cycles)
        self._hold_for = min(max(self._state.cycles // 4, _HOLD_AT_LEAST), _HOLD_AT_MOST)
        index = self._state.index
        if lacks_data and widths[index] == 1:
            index += 1  # nothing is learned if nothing is verified
        # Costs are not probed before anything is known of acceptance.
        uncertainty = np.zeros(len(widths)) if lacks_data else self.costs.uncertainty(num_requests, index)
        self._exploration, probed = explore(
            self._exploration, index, tokens, seconds, uncertainty, constants, cycles
        )
        estimate.age(cycles)
        choice = Choice(num_requests, int(widths[index]), index, False, tokens, seconds)
        self._held = None if lacks_data else choice
        if probed is None:
            return choice
        return replace(choice, width=int(widths[probed]), index=probed, is_probe=True)

    def on_prefill(self, rows: np.ndarray, num_emitted: np.ndarray | int = 0) -> None:
        """Start new requests in these rows, which have emitted so many tokens."""
        self._num_new += len(rows)
        self.estimate.reset(rows, num_emitted)

    def on_accept_lens(self, rows: np.ndarray, modes: np.ndarray, width: int, accepted: np.ndarray) -> None:
        """Note the accept lengths of a cycle of this width, bonus excluded. [n]"""
        self._unlearned.append((rows, modes, width - 1, accepted))
        if len(self._unlearned) == _HOLD_AT_MOST:  # of a rank that does not choose
            self._learn()

    def on_cycle_time(
        self,
        num_requests: int,
        width: int,
        seconds: float,
        cycles: int = 1,
        num_tokens: int | None = None,
        was_drafted: bool = True,
    ) -> float:
        """Learn from cycle times, as `CostTable.observe` does."""
        return self.costs.observe(num_requests, width, seconds, cycles, num_tokens, was_drafted)
