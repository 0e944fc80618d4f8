"""A server of numbers: costs and acceptance are given, the width is the chooser's. Seconds here are simulated
ones."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sglang_dflash.srt.speculative.width.chooser import WidthChooser
from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import SurvivalEstimate
from sglang_dflash.srt.speculative.width.policy import expected_tokens

WIDTHS = np.array([1, 2, 4, 8])
LOADS = np.array([1, 2, 4, 8, 16, 32, 64])


def smooth_cost(draft: float = 0.3, row: float = 0.01) -> Callable[[int, int], float]:
    """Seconds of a cycle: a plain step 1, a row more `row`, a draft `draft`."""
    return lambda n, width: 1 + row * n * (width - 1) + (draft if width > 1 else 0)


def staircase_cost(step: int = 64, rise: float = 0.6, draft: float = 0.2) -> Callable[[int, int], float]:
    """Rows are free until they fill a tile."""
    return lambda n, width: 1 + rise * ((n * width - 1) // step) + (draft if width > 1 else 0)


def mean_tokens(accept_probs: np.ndarray, width: int) -> float:
    return 1 + np.cumprod(accept_probs[: width - 1]).sum()


def best_speed(cost, accept_probs: np.ndarray, n: int, widths=WIDTHS) -> float:
    """Tokens per second of the best fixed width, by trying them all."""
    return max(n * mean_tokens(accept_probs, int(w)) / cost(n, int(w)) for w in widths)


@dataclass
class Simulation:
    """cost: with no committed tokens. noise: spread of the logarithm of a cycle's time. table: what the
    start-up measured; the truth if None. reads: seconds that a committed token costs more; context: of each
    request, as it is now. knows_reads: whether the start-up measured it. young, grown_up: of an answer's
    first so many tokens, what makes the probability of each being kept so many times what it is later;
    answers have 128 tokens, and another one follows."""

    cost: Callable[[int, int], float]
    noise: float = 0.0
    seed: int = 0
    table: Callable[[int, int], float] | None = None
    widths: np.ndarray = field(default_factory=lambda: WIDTHS)
    reads: float = 0.0
    context: int = 0
    knows_reads: bool = True
    young: float = 1.0
    grown_up: int = 0

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        measured = [[(self.table or self.cost)(int(n), int(w)) for w in self.widths] for n in LOADS]
        estimate = SurvivalEstimate(slots=256, depth=int(self.widths[-1]) - 1)
        self.chooser = WidthChooser(
            CostTable(LOADS, self.widths, np.array(measured), reads=self.reads * self.knows_reads), estimate
        )
        self.put_out = np.zeros(256, dtype=int)
        self.chosen: list[int] = []
        self.probes: list[int] = []
        self.seconds = self.tokens = 0.0

    def run(self, cycles: int, accept_probs: np.ndarray, slots=range(4), modes=None) -> "Simulation":
        """accept_probs: [K], or [n, K] if requests differ. Totals are those of the last run, and what its
        choices were worth on average: luck is taken out."""
        slots = np.array(list(slots))
        modes = np.zeros(len(slots), dtype=int) if modes is None else modes
        accept_probs = np.broadcast_to(accept_probs, (len(slots), np.shape(accept_probs)[-1]))
        self.chosen, self.probes, self.seconds, self.tokens = [], [], 0.0, 0.0
        for cycle in range(cycles):
            num_tokens = len(slots) * self.context
            choice = self.chooser.choose(slots, modes, num_tokens)
            probs = np.where(
                self.put_out[slots, None] < self.grown_up, self.young * accept_probs, accept_probs
            )
            kept = self.rng.random(probs.shape) < probs
            accepted = kept[:, : choice.width - 1].cumprod(axis=1).sum(axis=1)
            takes = self.cost(len(slots), choice.width) + self.reads * num_tokens
            seconds = takes * np.exp(self.noise * self.rng.standard_normal())
            self.chooser.on_accept_lens(slots, modes, choice.width, accepted)
            self.chooser.on_cycle_time(len(slots), choice.width, seconds, num_tokens=num_tokens)
            self.chosen.append(choice.width)
            if choice.is_probe:
                self.probes.append(cycle)
            self.seconds += takes
            self.tokens += expected_tokens(probs, np.array([choice.width]))[0]
            self._answer(slots, accepted + 1)
        return self

    def _answer(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        self.put_out[slots] += tokens
        ended = slots[self.put_out[slots] >= 128]
        if self.grown_up and len(ended):
            self.put_out[ended] = 0
            self.chooser.on_prefill(ended)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def usual(self) -> int:
        """The width most cycles had."""
        return int(np.bincount(self.chosen).argmax())

    @property
    def settled(self) -> list[int]:
        """What was chosen, probes aside."""
        return [width for cycle, width in enumerate(self.chosen) if cycle not in set(self.probes)]

    def moves(self) -> int:
        return int((np.diff(self.settled) != 0).sum())
