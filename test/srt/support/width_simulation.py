"""A simulated server: costs and acceptance are given, the policy chooses verify lengths.

All seconds are simulated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from sglang_dflash.srt.speculative.width.policy import Costs, Policy

WIDTHS = np.array([1, 2, 4, 8])
LOADS = np.array([1, 2, 4, 8, 16, 32, 64])
DEPTH = int(WIDTHS[-1]) - 1
# Probability that a drafted token is accepted if those before it are.
KINDS = {
    "strong": np.linspace(0.92, 0.85, DEPTH),
    "usual": np.linspace(0.8, 0.6, DEPTH),
    "weak": np.linspace(0.45, 0.3, DEPTH),
    "random": np.full(DEPTH, 0.002),
}


@dataclass(frozen=True)
class Cost:
    """Seconds of a cycle. A plain step of one request takes 1.

    request, row: of each request and each drafted row that is verified. step: rows that are free until they
    fill so many. draft, each: of a draft forward, and of each request it serves. ragged_overhead:
    further seconds of a cycle whose lengths differ. read: of each committed token. gap: to the next cycle.
    """

    request: float = 0.02
    row: float = 0.01
    step: int = 1
    draft: float = 0.1
    each: float = 0.02
    ragged_overhead: float = 0.0
    read: float = 0.0
    gap: float = 0.0

    def verify(self, n: int, drafted: int) -> float:
        return 1 + self.request * n + self.row * self.step * (drafted // self.step)

    def draft_for(self, m: int) -> float:
        return self.draft + self.each * m if m else 0.0

    def cycle(self, lengths: np.ndarray, context: int = 0) -> float:
        """Return the seconds of a cycle, without the gap. context: committed tokens of each request."""
        seconds = self.verify(len(lengths), int(lengths.sum()))
        seconds += self.draft_for(int((lengths > 0).sum()))
        seconds += self.read * len(lengths) * context
        return seconds + self.ragged_overhead * bool((lengths != lengths[0]).any())


def best_uniform(cost: Cost, accept_probs: np.ndarray, context: int = 0) -> float:
    """Return the tokens per second of the best common width. accept_probs: [n, K]"""
    n, prefix_accept_prob = len(accept_probs), accept_probs.cumprod(axis=1)
    return max(
        (n + prefix_accept_prob[:, : w - 1].sum()) / (cost.cycle(np.full(n, w - 1), context) + cost.gap)
        for w in WIDTHS.tolist()
    )


@dataclass
class Simulation:
    """A server whose requests answer with 256 tokens each, and are then replaced.

    Attributes:
        cost: of a cycle.
        kinds: of requests, of KINDS, in turn.
        lag: cycles until the host knows accept lengths.
        noise: standard deviation of the logarithm of a cycle's time.
        context: committed tokens of each request.
        ignored: a field of `Cost` that the server does not measure.
        wrong: factors on what start-up measured of "plain" cycles, of "verify" cycles and of the "draft".
        busy: the most by which another process lengthens each time that start-up measures.
        stalls: share of cycles that take a hundred times as long as they say.
        pace: how many times as long a cycle takes as it should, by its number.
        of_new: factor on the acceptance of a request's first two cycles.
        loads: numbers of requests that start-up measures.
    """

    cost: Cost
    kinds: Sequence[str]
    lag: int = 2
    noise: float = 0.1
    context: int = 0
    ignored: str = ""
    wrong: Mapping[str, float] = field(default_factory=dict)
    busy: float = 1.0
    stalls: float = 0.0
    pace: Callable[[int], float] = lambda number: 1.0
    of_new: float = 1.0
    loads: Sequence[int] = tuple(LOADS)
    seed: int = 0
    chosen: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        wrong = np.where(WIDTHS > 1, self.wrong.get("verify", 1.0), self.wrong.get("plain", 1.0))
        verify = np.array([[self.cost.verify(int(n), int(n * (w - 1))) for w in WIDTHS] for n in self.loads])
        draft = np.array([self.cost.draft_for(int(n)) for n in self.loads]) * self.wrong.get("draft", 1.0)
        every_other = [np.where(np.arange(n) % 2, 0, DEPTH) for n in self.loads]
        half = np.array([self.cost.cycle(lengths) for lengths in every_other])
        slow = np.random.default_rng([self.seed, 1])
        verify, draft, half = (
            seconds
            * slow.uniform(1.0, self.busy, (2, *seconds.shape)).min(axis=0)  # start-up times all twice
            for seconds in (verify * wrong, draft, half)
        )
        costs = Costs(
            self.loads,
            WIDTHS,
            verify,
            draft,
            mixed=None if self.ignored == "ragged_overhead" else half,
            seconds_per_token=0.0 if self.ignored == "read" else self.cost.read,
        )
        self.policy = Policy(costs, 64)
        self.tokens = self.seconds = 0.0

    def run(self, n: int, cycles: int = 400, warm: int = 100, caps=DEPTH) -> "Simulation":
        """Run cycles of n requests; totals leave out the first ones, with expected tokens."""
        rows, kinds = np.arange(n), cycle(self.kinds)
        self.accept_probs = np.stack([KINDS[next(kinds)] for _ in rows])
        said, born, late = self.rng.integers(0, 256, n), np.zeros(n, dtype=int), []
        self.chosen, self.tokens, self.seconds = [], 0.0, 0.0
        matches, caps, ages = np.zeros(n, dtype=int), np.broadcast_to(caps, n), np.zeros(n, dtype=int)
        for number in range(cycles):
            accept_probs = np.where(ages[:, None] < 2, self.of_new, 1.0) * self.accept_probs
            prefix_accept_prob = accept_probs.cumprod(axis=1)
            choice = self.policy.choose(rows, n * self.context, matches, caps)
            lengths, expected = choice.lengths, self.policy.seconds(choice, n * self.context)
            hits = (self.rng.random(accept_probs.shape) < accept_probs).cumprod(axis=1).sum(axis=1)
            kept = np.minimum(hits, lengths)
            seconds = self.cost.cycle(lengths, self.context)
            measured = (seconds + self.cost.gap) * np.exp(self.noise * self.rng.normal()) * self.pace(number)
            measured *= 100 if self.rng.random() < self.stalls else 1
            self.policy.pace.observe(not lengths.any(), expected, measured)
            late.append((lengths, kept, born.copy()))
            if len(late) > self.lag:
                verified, accepted, whose = late.pop(0)
                [same] = np.nonzero(whose == born)
                self.policy.acceptance.learn(same, verified[same], accepted[same])
            if number >= warm:
                self.chosen.append(lengths)
                self.tokens += (
                    n + np.where(np.arange(DEPTH) < lengths[:, None], prefix_accept_prob, 0.0).sum()
                )
                self.seconds += seconds + self.cost.gap
            said, ages = said + kept + 1, ages + 1
            [ended] = np.nonzero(said >= 256)
            said[ended] = ages[ended] = 0
            born[ended] += 1
            self.policy.acceptance.reset(ended)
        return self

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def of_best_uniform(self) -> float:
        """Speed over that of the best common width, with acceptance known."""
        return self.speed / best_uniform(self.cost, self.accept_probs, self.context)
