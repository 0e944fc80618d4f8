"""A simulated server: costs and acceptance are given, the chooser chooses the width.

All seconds are simulated.
"""

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
    """Seconds of a cycle: a plain step takes 1, each further row `row`, a draft `draft`."""
    return lambda n, width: 1 + row * n * (width - 1) + (draft if width > 1 else 0)


def staircase_cost(step: int = 64, rise: float = 0.6, draft: float = 0.2) -> Callable[[int, int], float]:
    """Rows are free until they fill a tile."""
    return lambda n, width: 1 + rise * ((n * width - 1) // step) + (draft if width > 1 else 0)


def mean_tokens(accept_probs: np.ndarray, width: int) -> float:
    return 1 + np.cumprod(accept_probs[: width - 1]).sum()


def best_speed(cost, accept_probs: np.ndarray, n: int, widths=WIDTHS) -> float:
    """Return the tokens per second of the best fixed width."""
    return max(n * mean_tokens(accept_probs, int(w)) / cost(n, int(w)) for w in widths)


@dataclass
class Simulation:
    """A server whose requests answer with 128 tokens each, and are then replaced.

    The next request takes the same row.
    """

    cost: Callable[[int, int], float]  # seconds of (requests, width) with no committed tokens
    noise: float = 0.0  # standard deviation of the logarithm of a cycle's time
    seed: int = 0
    table: Callable[[int, int], float] | None = None  # what the start-up measured; None: the truth
    widths: np.ndarray = field(default_factory=lambda: WIDTHS)
    reads: float = 0.0  # seconds per committed token
    context: int = 0  # committed tokens of each request
    knows_reads: bool = True  # whether the start-up measured `reads`
    young: float = 1.0  # factor of the acceptance of an answer's first tokens
    grown_up: int = 0  # number of these first tokens

    def __post_init__(self):
        self.rng = np.random.default_rng(self.seed)
        measured = [[(self.table or self.cost)(int(n), int(w)) for w in self.widths] for n in LOADS]
        estimate = SurvivalEstimate(num_rows=256, depth=int(self.widths[-1]) - 1)
        self.chooser = WidthChooser(
            CostTable(LOADS, self.widths, np.array(measured), reads=self.reads * self.knows_reads), estimate
        )
        self.num_emitted = np.zeros(256, dtype=int)
        self.chosen: list[int] = []
        self.probes: list[int] = []
        self.seconds = self.tokens = 0.0

    def run(self, cycles: int, accept_probs: np.ndarray, rows=range(4), modes=None) -> "Simulation":
        """Run some cycles; totals are of this run, with expected instead of drawn tokens.

        accept_probs: [K], or [n, K] if requests differ.
        """
        rows = np.array(list(rows))
        modes = np.zeros(len(rows), dtype=int) if modes is None else modes
        accept_probs = np.broadcast_to(accept_probs, (len(rows), np.shape(accept_probs)[-1]))
        self.chosen, self.probes, self.seconds, self.tokens = [], [], 0.0, 0.0
        for cycle in range(cycles):
            num_tokens = len(rows) * self.context
            choice = self.chooser.choose(rows, modes, num_tokens)
            probs = np.where(
                self.num_emitted[rows, None] < self.grown_up, self.young * accept_probs, accept_probs
            )
            is_accepted = self.rng.random(probs.shape) < probs
            accepted = is_accepted[:, : choice.width - 1].cumprod(axis=1).sum(axis=1)
            expected_seconds = self.cost(len(rows), choice.width) + self.reads * num_tokens
            seconds = expected_seconds * np.exp(self.noise * self.rng.standard_normal())
            self.chooser.on_accept_lens(rows, modes, choice.width, accepted)
            self.chooser.on_cycle_time(len(rows), choice.width, seconds, num_tokens=num_tokens)
            self.chosen.append(choice.width)
            if choice.is_probe:
                self.probes.append(cycle)
            self.seconds += expected_seconds
            self.tokens += expected_tokens(probs, np.array([choice.width]))[0]
            self._emit(rows, accepted + 1)
        return self

    def _emit(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        self.num_emitted[rows] += tokens
        ended = rows[self.num_emitted[rows] >= 128]
        if self.grown_up and len(ended):
            self.num_emitted[ended] = 0
            self.chooser.on_prefill(ended)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def usual(self) -> int:
        """Return the most frequent width."""
        return int(np.bincount(self.chosen).argmax())

    @property
    def settled(self) -> list[int]:
        """The chosen widths without probes."""
        return [width for cycle, width in enumerate(self.chosen) if cycle not in set(self.probes)]

    def moves(self) -> int:
        return int((np.diff(self.settled) != 0).sum())
