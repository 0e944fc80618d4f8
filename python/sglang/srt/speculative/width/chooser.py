"""The policy with its memory: asked how wide a cycle is, told what was kept and what it took. No engine, no
tensors."""

import itertools
from dataclasses import dataclass

import numpy as np

from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import SurvivalEstimate
from sglang_dflash.srt.speculative.width.policy import (
    Constants,
    Exploration,
    Standing,
    best_width,
    expected_tokens,
    explore,
    settle,
)

# Cycles that one decision holds for, as with what it learns first it takes the host most of a millisecond: a
# quarter of those since the width last moved, within these bounds, but only while no more than a quarter of
# the requests has changed.
_HOLDS_AT_LEAST, _HOLDS_AT_MOST, _MAY_CHANGE = 4, 32, 1 / 4


@dataclass(frozen=True, slots=True)
class Choice:
    """num_requests: those decided for. width: slots to verify, the anchor counted. is_probe: verified to
    learn, not because it is best. tokens, seconds: expected of a cycle of those requests at each candidate
    width. index: the chosen one's."""

    num_requests: int
    width: int
    index: int
    is_probe: bool
    tokens: np.ndarray
    seconds: np.ndarray


class WidthChooser:
    """costs: also says which widths there are. estimate: what is learned of acceptance."""

    def __init__(self, costs: CostTable, estimate: SurvivalEstimate, constants: Constants = Constants()):
        self.costs, self.constants = costs, constants
        self._estimate = estimate
        self._not_learned: list[tuple[np.ndarray, np.ndarray, int, np.ndarray]] = []
        self._standing: Standing | None = None
        self._exploration = Exploration()
        self._settled: Choice | None = None
        self._cycles = self._new = 0  # since the last decision: cycles, and requests that began

    @property
    def estimate(self) -> SurvivalEstimate:
        """What was kept is learned when somebody looks: many cycles in a row cost a fraction of one at a time
        between two forwards, which leave nothing of it in the processor's caches."""
        self._learn()
        return self._estimate

    def _learn(self) -> None:
        # As long as a batch stays the same it comes as the same arrays.
        for _, alike in itertools.groupby(
            self._not_learned, lambda cycle: (id(cycle[0]), id(cycle[1]), cycle[2])
        ):
            slots, modes, drafted, _ = (cycles := list(alike))[0]
            self._estimate.learn(slots, modes, drafted, np.array([accepted for *_, accepted in cycles]))
        self._not_learned.clear()

    def choose(self, slots: np.ndarray, modes: np.ndarray, num_tokens: int | None = None) -> Choice:
        """How wide the next cycle of these requests is. slots: [n] rows of the request table. modes: [n], of
        `MODES`. num_tokens: committed ones of all of them; None: as many as costs were measured with."""
        self._cycles += 1
        if self._settled is None or self._cycles >= self._holds_for() or not self._are_the_same(len(slots)):
            choice = self._decide(slots, modes, num_tokens, self._cycles)
            self._cycles = self._new = 0
            return choice
        return self._settled

    def _are_the_same(self, num_requests: int) -> bool:
        """Whether most of these requests are those of the last decision, and most of those are still
        there."""
        left = abs(self._settled.num_requests + self._new - num_requests)
        return max(self._new, left) <= _MAY_CHANGE * num_requests

    def _holds_for(self) -> int:
        return min(max(self._standing.cycles // 4, _HOLDS_AT_LEAST), _HOLDS_AT_MOST)

    def _decide(self, slots: np.ndarray, modes: np.ndarray, num_tokens: int | None, cycles: int) -> Choice:
        num_requests, widths = len(slots), self.costs.widths
        estimate = self.estimate
        is_guessed = bool(estimate.is_guessed(modes).any())
        tokens = expected_tokens(estimate.accept_probs(slots, modes), widths)
        seconds = self.costs.seconds(num_requests, num_tokens)
        if self._standing is None or is_guessed:
            self._standing = Standing.at(
                best_width(tokens, seconds, self.constants.free_rows), len(widths), num_requests
            )
        else:
            self._standing = settle(self._standing, tokens, seconds, num_requests, self.constants, cycles)
        index = self._standing.width
        if is_guessed and widths[index] == 1:
            index += 1  # nothing is learned where nothing is verified
        # What may be faster is not asked before anything is known of what is kept.
        doubt = np.zeros(len(widths)) if is_guessed else self.costs.doubt(num_requests, index)
        self._exploration, probed = explore(
            self._exploration, index, tokens, seconds, doubt, self.constants, cycles
        )
        estimate.age(cycles)
        choice = Choice(num_requests, int(widths[index]), index, False, tokens, seconds)
        self._settled = None if is_guessed else choice
        if probed is None:
            return choice
        return Choice(num_requests, int(widths[probed]), probed, True, tokens, seconds)

    def on_prefill(self, slots: np.ndarray, put_out: np.ndarray | int = 0) -> None:
        """These rows of the request table hold new requests. put_out: tokens they have answered already."""
        self._new += len(slots)
        self.estimate.reset(slots, put_out)

    def on_accept_lens(self, slots: np.ndarray, modes: np.ndarray, width: int, accepted: np.ndarray) -> None:
        """A cycle of this width kept so many drafted tokens of each of these requests, [n]."""
        self._not_learned.append((slots, modes, width - 1, accepted))
        if len(self._not_learned) == _HOLDS_AT_MOST:  # of a rank that is not asked
            self._learn()

    def on_cycle_time(
        self, num_requests: int, width: int, seconds: float, cycles: int = 1, num_tokens: int | None = None
    ) -> float:
        """`CostTable.follow`."""
        return self.costs.follow(
            num_requests, int(np.searchsorted(self.costs.widths, width)), seconds, cycles, num_tokens
        )
