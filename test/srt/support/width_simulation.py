"""A simulated server: costs and acceptance are given, the chooser chooses verify lengths.

All seconds are simulated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle

import numpy as np

from sglang_dflash.srt.speculative.cycle.plan import BatchRequests
from sglang_dflash.srt.speculative.width.estimates import KNOWN, CostTable
from sglang_dflash.srt.speculative.width.policy import LengthChooser

WIDTHS = np.array([1, 2, 4, 8])
LOADS = np.array([1, 2, 4, 8, 16, 32, 64])
DEPTH = int(WIDTHS[-1]) - 1
NARROW = 3
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

    def draft_for(self, m: int, slots: int = DEPTH) -> float:
        return self.draft + self.each * m * slots / DEPTH if m else 0.0

    def cycle(self, lengths: np.ndarray, context: int = 0, draft_slots: int = DEPTH) -> float:
        """Return the seconds of a cycle, without the gap. context: committed tokens of each request."""
        seconds = self.verify(len(lengths), int(lengths.sum()))
        seconds += self.draft_for(int((lengths > 0).sum()), draft_slots)
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
        is_steady: whether start-up held its measurement for a good one.
        stalls: share of cycles that take a hundred times as long as they say.
        pace: how many times as long a cycle takes as it should, by its number.
        narrow: how often a token of a block of `NARROW` drafted slots is accepted, over one of a whole block.
            0: all blocks are whole.
    """

    cost: Cost
    kinds: Sequence[str]
    lag: int = 2
    noise: float = 0.1
    context: int = 0
    ignored: str = ""
    wrong: Mapping[str, float] = field(default_factory=dict)
    is_steady: bool = True
    stalls: float = 0.0
    pace: Callable[[int], float] = lambda number: 1.0
    narrow: float = 0.0
    seed: int = 0
    narrow_cycles: int = 0
    chosen: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        wrong = np.where(WIDTHS > 1, self.wrong.get("verify", 1.0), self.wrong.get("plain", 1.0))
        verify = np.array([[self.cost.verify(int(n), int(n * (w - 1))) for w in WIDTHS] for n in LOADS])
        widths = [NARROW, DEPTH] if self.narrow else [DEPTH]
        draft = np.array([[self.cost.draft_for(int(n), slots) for slots in widths] for n in LOADS])
        draft *= self.wrong.get("draft", 1.0)
        every_other = [np.where(np.arange(n) % 2, 0, DEPTH) for n in LOADS]
        half = np.array([self.cost.cycle(lengths) for lengths in every_other])
        half = 0.0 if self.ignored == "ragged_overhead" else half
        read = 0.0 if self.ignored == "read" else self.cost.read
        self.costs = CostTable(
            LOADS,
            WIDTHS,
            verify * wrong,
            draft,
            seconds_per_context_token=read,
            mixed_sample=half,
            tries=KNOWN * self.is_steady,
            draft_slots=widths,
        )
        self.chooser = LengthChooser(self.costs, 64)
        self.tokens = self.seconds = 0.0

    def run(self, n: int, cycles: int = 400, warm: int = 100, caps=DEPTH) -> "Simulation":
        """Run cycles of n requests; totals leave out the first ones, with expected tokens."""
        rows, modes, kinds = np.arange(n), np.zeros(n, dtype=int), cycle(self.kinds)
        self.accept_probs = np.stack([KINDS[next(kinds)] for _ in rows])
        said, born, late = self.rng.integers(0, 256, n), np.zeros(n, dtype=int), []
        self.chosen, self.tokens, self.seconds, self.narrow_cycles = [], 0.0, 0.0, 0
        matches, caps, is_new, num_held = np.zeros(n, dtype=int), np.broadcast_to(caps, n), True, 0
        for number in range(cycles):
            requests = BatchRequests(([], False, int(born.sum())), rows, born, modes)
            if num_held and not is_new:
                num_held -= 1
                self.chooser.count_cycle()
            else:
                choice = self.chooser.choose(requests, n * self.context, matches, caps)
                num_held = choice.num_cycles - 1
            lengths, is_narrow = choice.lengths, choice.draft_slots > 0
            accept_probs = self.accept_probs * (self.narrow if is_narrow else 1.0)
            prefix_accept_prob = accept_probs.cumprod(axis=1)
            hits = (self.rng.random(accept_probs.shape) < accept_probs).cumprod(axis=1).sum(axis=1)
            kept = np.minimum(hits, lengths)
            seconds = self.cost.cycle(lengths, self.context, NARROW if is_narrow else DEPTH)
            measured = (seconds + self.cost.gap) * np.exp(self.noise * self.rng.normal()) * self.pace(number)
            measured *= 100 if self.rng.random() < self.stalls else 1
            self.costs.observe(self.chooser.work(choice, n * self.context), measured)
            late.append((lengths, kept, is_narrow, born.copy()))
            if len(late) > self.lag:
                verified, accepted, was_narrow, whose = late.pop(0)
                [same] = np.nonzero(whose == born)
                self.chooser.drafts.learn(same, modes[same], verified[same], accepted[same], was_narrow)
            if number >= warm:
                self.chosen.append(lengths)
                self.narrow_cycles += is_narrow
                self.tokens += (
                    n + np.where(np.arange(DEPTH) < lengths[:, None], prefix_accept_prob, 0.0).sum()
                )
                self.seconds += seconds + self.cost.gap
            said += kept + 1
            [ended] = np.nonzero(said >= 256)
            said[ended], is_new = 0, ended.size > 0
            born[ended] += 1
            self.chooser.drafts.reset(ended)
        return self

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def of_best_uniform(self) -> float:
        """Speed over that of the best common width, with acceptance known."""
        return self.speed / best_uniform(self.cost, self.accept_probs, self.context)
