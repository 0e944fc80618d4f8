"""What a cycle takes at each width and load: measured at start-up, then followed while serving."""

import numpy as np

from sglang_dflash.srt.speculative.width.policy import never_cheaper_when_wider

# How much of a surprise becomes a change for all widths alike (the machine, the contexts), and for the cell it came from: there
# an average of the first ones, as the start-up may have been wrong about it.
_COMMON_RATE, _CELL_RATE = 0.1, 0.05
# A cycle that took e^0.7, twice, what was expected counts as that: others are pauses of the machine.
_LARGEST_SURPRISE = 0.7
_GAP_RATE = 0.05


class CostTable:
    """T(n, w) = r * c(n, w) * base(n, w) + gap(n), seconds.

    base: measured at start-up for some loads; between them linear in n, or, where forwards are padded to captured sizes, that
    of the next larger one (`padded`). r: how much slower everything is now, and c: this load and width, both from the
    logarithm of measured / expected cycles. gap: the time between two cycles that follow on each other.

    loads: requests the rows were measured at, ascending. widths: [W], ascending. seconds: [len(loads), W].
    """

    def __init__(self, loads: np.ndarray, widths: np.ndarray, seconds: np.ndarray, padded: bool = False):
        self.loads, self.widths, self._padded = np.asarray(loads), np.asarray(widths), padded
        self._base = np.log(np.stack([never_cheaper_when_wider(row) for row in np.asarray(seconds, dtype=float)]))
        self._common = 0.0
        self._cells = np.zeros_like(self._base)
        self._visits = np.full(self._base.shape, 1.0)
        self._gaps = np.full(len(self.loads), np.nan)

    def _between(self, num_requests: int) -> tuple[int, int, float]:
        """The rows a load lies between, and how far it is from the first. Beyond the last: in proportion, as rows then cost
        arithmetic."""
        above = int(np.searchsorted(self.loads, num_requests))
        if above == len(self.loads):
            return above - 1, above - 1, 0.0
        if above == 0 or self._padded or self.loads[above] == num_requests:
            return above, above, 0.0
        low, high = self.loads[above - 1], self.loads[above]
        return above - 1, above, float((num_requests - low) / (high - low))

    def cycle_seconds(self, num_requests: int) -> np.ndarray:
        """Of each width, without the gap. [W]"""
        low, high, share = self._between(num_requests)
        rows = np.exp(self._common + self._cells + self._base)
        row = (1 - share) * rows[low] + share * rows[high]
        return never_cheaper_when_wider(row) * max(1.0, num_requests / self.loads[-1])

    def gap(self, num_requests: int) -> float:
        known = np.flatnonzero(~np.isnan(self._gaps))
        if not len(known):
            return 0.0
        low, high, share = self._between(num_requests)
        row = high if share >= 0.5 else low
        return float(self._gaps[known[np.abs(known - row).argmin()]])

    def seconds(self, num_requests: int) -> np.ndarray:
        """What a cycle takes, from its start to that of the next one. [W]"""
        return self.cycle_seconds(num_requests) + self.gap(num_requests)

    def follow(self, num_requests: int, width_index: int, seconds: float) -> float:
        """A cycle took so long, without the gap. Returns the logarithm of measured / expected."""
        surprise = float(np.log(max(seconds, 1e-9)) - np.log(self.cycle_seconds(num_requests)[width_index]))
        change = float(np.clip(surprise, -_LARGEST_SURPRISE, _LARGEST_SURPRISE))
        self._common += _COMMON_RATE * change
        low, high, share = self._between(num_requests)
        for row, part in ((low, 1 - share), (high, share)):
            self._visits[row, width_index] += part
            rate = max(_CELL_RATE, 1 / self._visits[row, width_index])
            self._cells[row, width_index] += rate * part * change
        return surprise

    def follow_gap(self, num_requests: int, seconds: float) -> None:
        """Time from the end of a cycle to the start of the next, which was a decode step of the same requests."""
        low, high, share = self._between(num_requests)
        row = high if share >= 0.5 else low
        before = self._gaps[row]
        # Once known, a pause counts as three gaps at most.
        self._gaps[row] = seconds if np.isnan(before) else before + _GAP_RATE * (min(seconds, 3 * before) - before)
