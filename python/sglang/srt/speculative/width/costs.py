"""What a cycle takes at each width and load: measured at start-up, then followed while serving."""

import math
from collections.abc import Sequence

import numpy as np

from sglang_dflash.srt.speculative.width.policy import never_cheaper_when_wider

# Standard deviations, all of logarithms of seconds: of how much slower everything is than at start-up, and of
# how wrong the start-up was about contexts and about one width at one load, before any cycle; of what these
# change by from one cycle to the next; of a cycle's time.
_COMMON, _READS, _CELL = 0.3, 0.5, 0.1
_COMMON_DRIFT, _CELL_DRIFT = 0.015, 0.002
_NOISE = 0.13
# A cycle that took e^0.7, twice, what was expected counts as that: others are pauses of the machine.
_LARGEST_SURPRISE = 0.7
_GAP_RATE = 0.05


class CostTable:
    """T(n, w, t) = r * c(n, w) * (base(n, w) + q * reads(w) * (t - n * context)) + gap(n, w), seconds.

    base: measured at start-up for some loads, with `context` committed tokens a request; between them linear
    in n, or, where forwards are padded to captured sizes, that of the next larger one (`padded`). reads: what
    each committed token more costs attention, measured too; t are the tokens of all requests. It hardly
    depends on the width, so with long contexts a wide verify takes little longer than a narrow one, which no
    factor says. r: how much slower everything is now, q: reading, and c: this load and width; their
    logarithms are the state of an extended Kalman filter (Kalman 1960) that observes log(measured / expected)
    of each cycle. So a width that is seldom verified moves with the others, and little by one noisy cycle of
    its own. gap: the time from a cycle to the one that follows on it; waits_for_verdicts: it depends on
    whether something was verified, as the host then learns lengths from the device before it can plan
    (`known_lengths.py`).

    loads: requests the rows were measured at, ascending. widths: [W], ascending. seconds: [len(loads), W].
    reads: [W]."""

    def __init__(
        self,
        loads: np.ndarray,
        widths: np.ndarray,
        seconds: np.ndarray,
        padded: bool = False,
        reads: np.ndarray | float = 0.0,
        context: int = 0,
        waits_for_verdicts: bool = False,
    ):
        self.loads, self.widths, self._padded = np.asarray(loads), np.asarray(widths), padded
        self._base = np.stack([never_cheaper_when_wider(row) for row in np.asarray(seconds, dtype=float)])
        self._reads = never_cheaper_when_wider(np.maximum(np.broadcast_to(reads, self.widths.shape), 0.0))
        self._context = context
        # [2 + loads * W]: log r, log q, then log c row by row; and its covariance.
        self._state = np.zeros(2 + self._base.size)
        self._covariance = np.diag([_COMMON**2, _READS**2] + [_CELL**2] * self._base.size)
        # Of each width the kind its gap is kept under: after plain cycles, after others.
        self._kinds = (
            (self.widths > 1).astype(int) if waits_for_verdicts else np.zeros(len(self.widths), dtype=int)
        )
        self._gaps = np.full((len(self.loads), 2), np.nan)

    def _between(self, num_requests: int) -> tuple[int, int, float]:
        """The rows a load lies between, and how far it is from the first. Beyond the last: in proportion, as
        rows then cost arithmetic."""
        above = int(np.searchsorted(self.loads, num_requests))
        if above == len(self.loads):
            return above - 1, above - 1, 0.0
        if above == 0 or self._padded or self.loads[above] == num_requests:
            return above, above, 0.0
        low, high = self.loads[above - 1], self.loads[above]
        return above - 1, above, float((num_requests - low) / (high - low))

    def _rows_of(self, num_requests: int) -> np.ndarray:
        """How much each row counts for a load, one in all. [loads]"""
        low, high, share = self._between(num_requests)
        rows = np.zeros(len(self.loads))
        rows[low] += 1 - share
        rows[high] += share
        return rows

    def _corrections(self) -> np.ndarray:
        """log c, [loads, W]."""
        return self._state[2:].reshape(self._base.shape)

    def cycle_seconds(self, num_requests: int, num_tokens: int | None = None) -> np.ndarray:
        """Of each width, without the gap. num_tokens: committed ones of all these requests; None: as many as
        at start-up. [W]"""
        low, high, share = self._between(num_requests)
        base = self._base[[low, high]] * max(1.0, num_requests / self.loads[-1])
        # Of shorter contexts than at start-up, what is not attention stays.
        seconds = np.maximum(base + self._reading(num_requests, num_tokens), base / 2)
        below, above = np.exp(self._state[0] + self._corrections()[[low, high]]) * seconds
        return never_cheaper_when_wider((1 - share) * below + share * above)

    def _reading(self, num_requests: int, num_tokens: int | None) -> np.ndarray:
        """What contexts beyond those at start-up add at each width, but for r and c. [W]"""
        more = 0 if num_tokens is None else num_tokens - num_requests * self._context
        return np.exp(self._state[1]) * self._reads * more

    def gap(self, num_requests: int) -> np.ndarray:
        """Of each width; of a kind not seen yet the other's. [W]"""
        row, kinds = self._nearest(num_requests), []
        for kind in (0, 1):
            known = np.flatnonzero(~np.isnan(self._gaps[:, kind]))
            kinds.append(self._gaps[known[np.abs(known - row).argmin()], kind] if len(known) else np.nan)
        other = kinds[::-1]
        return np.nan_to_num(np.where(np.isnan(kinds), other, kinds))[self._kinds]

    def _nearest(self, num_requests: int) -> int:
        low, high, share = self._between(num_requests)
        return high if share >= 0.5 else low

    def seconds(self, num_requests: int, num_tokens: int | None = None) -> np.ndarray:
        """What a cycle takes, from its start to that of the next one. [W]"""
        return self.cycle_seconds(num_requests, num_tokens) + self.gap(num_requests)

    def doubt(self, num_requests: int, width_index: int) -> np.ndarray:
        """How wrong log(seconds of each width / seconds of this one) may be, its standard deviation. What
        slows all widths alike is not in it. [W]"""
        rows = self._rows_of(num_requests)
        covariance = self._covariance[2:, 2:].reshape(2 * self._base.shape)
        among = np.einsum("r,rwsv,s->wv", rows, covariance, rows)
        variance = among.diagonal() + among[width_index, width_index] - 2 * among[width_index]
        return np.sqrt(np.maximum(variance, 0.0))

    def follow(
        self,
        num_requests: int,
        width_index: int,
        seconds: float,
        cycles: int = 1,
        num_tokens: int | None = None,
    ) -> float:
        """A cycle took so long, without the gap, on average over some. Returns the logarithm of measured /
        expected."""
        expected = self.cycle_seconds(num_requests, num_tokens)[width_index]
        reading = math.exp(self._state[0]) * self._reading(num_requests, num_tokens)[width_index] / expected
        surprise = math.log(max(seconds, 1e-9) / expected)
        bounded = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        self._observe(num_requests, width_index, min(max(reading, 0.0), 1.0), bounded, cycles)
        return surprise

    def _observe(
        self, num_requests: int, width_index: int, reading: float, surprise: float, cycles: int
    ) -> None:
        """A step of the filter. What was observed is log r + log c, of a load in between as much of either
        row as it is near, and of log q the share that reading had in the time."""
        covariance, diagonal = self._covariance, np.einsum("ii->i", self._covariance)
        diagonal[0] += cycles * _COMMON_DRIFT**2
        diagonal[1] += cycles * _CELL_DRIFT**2 if diagonal[1] < _READS**2 else 0.0
        diagonal[2:] += np.where(diagonal[2:] < _CELL**2, cycles * _CELL_DRIFT**2, 0.0)
        observed = np.zeros_like(self._state)
        observed[:2] = 1.0, reading
        observed[2 + width_index :: len(self.widths)] = self._rows_of(num_requests)
        direction = covariance @ observed
        gain = direction / (observed @ direction + _NOISE**2 / cycles)
        self._state += surprise * gain
        covariance -= np.outer(gain, direction)

    def follow_gap(self, num_requests: int, width: int, seconds: Sequence[float]) -> None:
        """Times from the end of a cycle of this width to the start of the next, which was a decode step of
        the same requests."""
        at = self._nearest(num_requests), self._kinds[int(np.searchsorted(self.widths, width))]
        gap = float(self._gaps[at])
        for new in seconds:
            # Once known, a pause counts as three gaps at most.
            gap = new if math.isnan(gap) else gap + _GAP_RATE * (min(new, 3 * gap) - gap)
        self._gaps[at] = gap
