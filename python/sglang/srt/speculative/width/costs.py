"""Cost of a cycle per width and load: measured at start-up, tracked while serving."""

import math
from collections.abc import Sequence

import numpy as np

from sglang_dflash.srt.speculative.width.policy import never_cheaper_when_wider

# Standard deviations of logarithms of seconds. Before any cycle: of how much slower everything is than at
# start-up, and of the start-up's error for contexts and for one width at one load.
_COMMON, _READS, _CELL = 0.3, 0.5, 0.1
_COMMON_DRIFT, _CELL_DRIFT = 0.015, 0.002  # of the change of these from one cycle to the next
_NOISE = 0.13  # of a cycle's time
# A cycle that took more than e^0.7, twice, the expected time counts as that: the rest is a pause.
_LARGEST_SURPRISE = 0.7
_GAP_RATE = 0.05
_LARGEST_DRAFT_SHARE = 0.9  # beyond it is noise of the measurement


class CostTable:
    """Seconds of a cycle of n requests with t tokens at width w, followed while serving.

    T(n, w, t) = r * c(n, w) * (base(n, w) + q * reads(w) * (t - n * context)) + gap(n, w)

    base: measured at start-up for some loads, with `context` committed tokens per request. Between these
    loads it is linear in n or, if forwards are padded to captured sizes, that of the next larger one. reads:
    what each further committed token costs attention, also measured; t are the tokens of all requests. It
    hardly depends on the width, so with long contexts a wide verify takes little longer than a narrow one,
    which no factor can express.

    r: how much slower everything is now, q: reading, c: this load and width. Their logarithms are the state
    of an extended Kalman filter (Kalman 1960) that observes log(measured / expected) of each cycle. So a
    width that is seldom verified moves with the others, and little by one noisy cycle of its own.

    gap: the time from a cycle to the next. If the host waits for accept lengths before it can plan
    (`known_lengths.py`), the gap depends on whether something was verified.

    Args:
        loads: numbers of requests that were measured, ascending. [L]
        widths: candidates, ascending. [W]
        seconds: of a cycle. [L, W]
        padded: whether forwards are padded to the next of `loads`.
        reads: seconds per committed token beyond `context`. [W]
        context: committed tokens per request in the measurement.
        waits_for_accept_lens: whether the host waits for accept lengths.
        draft: seconds of the draft's forward in these. [L]
    """

    def __init__(
        self,
        loads: np.ndarray,
        widths: np.ndarray,
        seconds: np.ndarray,
        padded: bool = False,
        reads: np.ndarray | float = 0.0,
        context: int = 0,
        waits_for_accept_lens: bool = False,
        draft: np.ndarray | float = 0.0,
    ):
        self.loads, self.widths, self._padded = np.asarray(loads), np.asarray(widths), padded
        self._base = np.stack([never_cheaper_when_wider(row) for row in np.asarray(seconds, dtype=float)])
        self._reads = never_cheaper_when_wider(np.maximum(np.broadcast_to(reads, self.widths.shape), 0.0))
        self._context = context
        runs_draft = self.widths > 1
        self._draft = np.broadcast_to(draft, (len(self.loads),))[:, None] * runs_draft
        # [2 + L * W]: log r, log q, then log c row by row; and its covariance.
        self._state = np.zeros(2 + self._base.size)
        self._covariance = np.diag([_COMMON**2, _READS**2] + [_CELL**2] * self._base.size)
        # Gaps are kept per load and kind: after plain cycles, after others. [L, 2]; kind of each width. [W]
        self._gaps = np.full((len(self.loads), 2), np.nan)
        self._kinds = (self.widths > 1).astype(int) * waits_for_accept_lens

    def _load_weights(self, num_requests: int) -> np.ndarray:
        """Return how much each measured load counts for this one, one in all. [L]

        Beyond the last load only that one counts: rows then cost arithmetic, in proportion.
        """
        weights, above = np.zeros(len(self.loads)), int(np.searchsorted(self.loads, num_requests))
        if self._padded or above in (0, len(self.loads)):
            weights[min(above, len(self.loads) - 1)] = 1.0
        else:
            low, high = self.loads[above - 1], self.loads[above]
            share = (num_requests - low) / (high - low)
            weights[above - 1 : above + 1] = 1 - share, share
        return weights

    def _nearest_load(self, num_requests: int) -> int:
        weights = self._load_weights(num_requests)
        return int(np.flatnonzero(weights == weights.max())[-1])

    def cycle_seconds(self, num_requests: int, num_tokens: int | None = None) -> np.ndarray:
        """Return the seconds of a cycle per width, without the gap. [W]

        num_tokens: committed tokens of all requests; None: as many as at start-up.
        """
        base = self._base * max(1.0, num_requests / self.loads[-1])
        # With shorter contexts than at start-up, the part that is not attention stays.
        seconds = np.maximum(base + self._reading_seconds(num_requests, num_tokens), base / 2)
        corrections = np.exp(self._state[0] + self._state[2:].reshape(base.shape))
        return never_cheaper_when_wider(self._load_weights(num_requests) @ (corrections * seconds))

    def draft_share(self, num_requests: int) -> np.ndarray:
        """Return the draft's share of a cycle, as measured at start-up, per width. [W]"""
        weights = self._load_weights(num_requests)
        return np.minimum((weights @ self._draft) / (weights @ self._base), _LARGEST_DRAFT_SHARE)

    def _reading_seconds(self, num_requests: int, num_tokens: int | None) -> np.ndarray:
        """Return what contexts beyond those at start-up add, before r and c. [W]"""
        further = 0 if num_tokens is None else num_tokens - num_requests * self._context
        return np.exp(self._state[1]) * self._reads * further

    def gap(self, num_requests: int) -> np.ndarray:
        """Return the idle gap before the next cycle, per width. [W]

        If one kind of cycle has no sample yet, the other kind's gap is used.
        """
        load, gaps = self._nearest_load(num_requests), np.full(2, np.nan)
        for kind in (0, 1):
            known = np.flatnonzero(~np.isnan(self._gaps[:, kind]))
            if len(known):
                gaps[kind] = self._gaps[known[np.abs(known - load).argmin()], kind]
        return np.nan_to_num(np.where(np.isnan(gaps), gaps[::-1], gaps))[self._kinds]

    def seconds(self, num_requests: int, num_tokens: int | None = None) -> np.ndarray:
        """Return the seconds from one start of a cycle to the next, per width. [W]"""
        return self.cycle_seconds(num_requests, num_tokens) + self.gap(num_requests)

    def uncertainty(self, num_requests: int, width_index: int) -> np.ndarray:
        """Return the standard deviation of log(seconds / seconds of this width). [W]

        It is per width, and leaves out what slows all widths alike.
        """
        weights = self._load_weights(num_requests)
        covariance = self._covariance[2:, 2:].reshape(2 * self._base.shape)
        by_width = np.einsum("r,rwsv,s->wv", weights, covariance, weights)
        variance = by_width.diagonal() + by_width[width_index, width_index] - 2 * by_width[width_index]
        return np.sqrt(np.maximum(variance, 0.0))

    def observe(
        self,
        num_requests: int,
        width: int,
        seconds: float,
        cycles: int = 1,
        num_tokens: int | None = None,
        was_drafted: bool = True,
    ) -> float:
        """Learn the mean time of cycles, without gaps; return log(measured / expected).

        Cycles without the draft teach what the same cycles with it would take.
        """
        index = self._index(width)
        if not was_drafted:
            seconds = seconds / (1 - self.draft_share(num_requests)[index])
        expected = self.cycle_seconds(num_requests, num_tokens)[index]
        reading = math.exp(self._state[0]) * self._reading_seconds(num_requests, num_tokens)[index] / expected
        surprise = math.log(max(seconds, 1e-9) / expected)
        bounded = min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        # A step of the filter. Observed are log r, log c (between two loads, of both in proportion) and, by
        # the share of reading in the time, log q.
        observed = np.zeros_like(self._state)
        observed[:2] = 1.0, min(max(reading, 0.0), 1.0)
        observed[2 + index :: len(self.widths)] = self._load_weights(num_requests)
        covariance, diagonal = self._covariance, np.einsum("ii->i", self._covariance)
        diagonal[0] += cycles * _COMMON_DRIFT**2
        diagonal[1] += cycles * _CELL_DRIFT**2 if diagonal[1] < _READS**2 else 0.0
        diagonal[2:] += np.where(diagonal[2:] < _CELL**2, cycles * _CELL_DRIFT**2, 0.0)
        direction = covariance @ observed
        gain = direction / (observed @ direction + _NOISE**2 / cycles)
        self._state += bounded * gain
        covariance -= np.outer(gain, direction)
        return surprise

    def observe_gaps(self, num_requests: int, width: int, seconds: Sequence[float]) -> None:
        """Learn gaps between a cycle of this width and the next of the same requests."""
        cell = self._nearest_load(num_requests), self._kinds[self._index(width)]
        gap = float(self._gaps[cell])
        for new in seconds:
            # Once known, a pause counts as three gaps at most.
            gap = new if math.isnan(gap) else gap + _GAP_RATE * (min(new, 3 * gap) - gap)
        self._gaps[cell] = gap

    def _index(self, width: int) -> int:
        return int(np.searchsorted(self.widths, width))
