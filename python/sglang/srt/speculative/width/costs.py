"""Seconds of a cycle: measured at start-up, followed while serving."""

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import isotonic_regression

_PACE_RATE, _GAP_RATE = 0.02, 0.05
# A cycle that took more than e^0.7, twice, the expected time counts as that: the rest is a pause.
_LARGEST_SURPRISE = 0.7


class CostTable:
    """Seconds of verifying and of drafting.

    A verify of n requests takes j drafted tokens in all, and a draft serves m requests. Both are measured at
    start-up for some loads, with `context` committed tokens per request. Between these loads they are linear
    in n or, if forwards are padded to captured sizes, those of the next larger one. One pace, followed while
    serving, multiplies all of it. The gap is the time from a cycle to the next.

    Args:
        loads: numbers of requests that were measured, ascending. [L]
        widths: slots per request that were measured, ascending. [W]
        verify: seconds of a cycle without its draft. [L, W]
        draft: seconds of drafting for all requests. [L]
        padded: whether forwards are padded to the next of `loads`.
        reads: seconds per committed token beyond `context`.
        context: committed tokens per request in the measurement.
        sizes: rows that a verify is padded to, ascending. None: it is not, or to whole requests.
        half: seconds of a cycle in which every other request, the first included, has a whole block and
            the rest verify nothing. [L] None: unequal lengths cost no more than their rows.
    """

    def __init__(
        self,
        loads: np.ndarray,
        widths: np.ndarray,
        verify: np.ndarray,
        draft: np.ndarray,
        padded: bool = False,
        reads: float = 0.0,
        context: int = 0,
        sizes: Sequence[int] | None = None,
        half: np.ndarray | None = None,
    ):
        self.loads, self.widths, self._padded = np.asarray(loads), np.asarray(widths), padded
        # Verifying more rows cannot take less time, so a dip is noise.
        self._verify = np.stack([isotonic_regression(row).x for row in np.asarray(verify, dtype=float)])
        self._draft = isotonic_regression(np.asarray(draft, dtype=float)).x
        self._reads, self._context = reads, context
        self._sizes = None if sizes is None else np.asarray(sizes)
        self._log_pace = 0.0
        self._gaps = [math.nan, math.nan]  # after plain cycles, after others
        self._uneven = np.zeros(len(self.loads))
        for i, n in enumerate(self.loads):
            whole = (n + 1) // 2
            of_rows = self.verify(n)[whole * (self.widths[-1] - 1)] + self.draft(n)[whole]
            self._uneven[i] = 0.0 if half is None else max(0.0, half[i] - of_rows)

    def _at(self, requests: np.ndarray | int, column: np.ndarray) -> np.ndarray:
        """Read a column of a table between loads. Beyond the last load time grows in proportion."""
        if self._padded:
            index = np.searchsorted(self.loads, requests).clip(max=len(self.loads) - 1)
            return column[index] * np.maximum(1.0, np.asarray(requests) / self.loads[-1])
        return np.interp(requests, self.loads, column) * np.maximum(1.0, requests / self.loads[-1])

    def verify(
        self, num_requests: int, num_tokens: int | None = None, depth: int | None = None
    ) -> np.ndarray:
        """Return the seconds of verifying 0 .. n K drafted tokens, without the gap.

        num_tokens: committed tokens of all requests; None: as many as at start-up. depth: K, tokens of a
        request. None: as many as were measured. Rows beyond these cost what whole blocks of as many rows do,
        of more requests.
        """
        further = 0 if num_tokens is None else num_tokens - num_requests * self._context
        by_width = np.array([self._at(num_requests, column) for column in self._verify.T])
        # With shorter contexts than at start-up, the part that is not attention stays.
        by_width = np.maximum(by_width + self._reads * further, by_width / 2)
        drafted = np.arange(num_requests * (depth or self.widths[-1] - 1) + 1)
        seconds = np.interp(drafted, num_requests * (self.widths - 1), by_width)
        beyond = drafted[num_requests * (self.widths[-1] - 1) + 1 :]
        if len(beyond):
            whole = self._at(
                np.r_[num_requests, (num_requests + beyond) / self.widths[-1]], self._verify[:, -1]
            )
            seconds[-len(beyond) :] += whole[1:] - whole[0]
        if self._sizes is not None:
            sufficient = np.searchsorted(self._sizes, num_requests + drafted).clip(max=len(self._sizes) - 1)
            seconds = seconds[np.clip(self._sizes[sufficient] - num_requests, drafted, drafted[-1])]
        return math.exp(self._log_pace) * seconds

    def draft(self, num_requests: int) -> np.ndarray:
        """Return the seconds of drafting for 0 .. n requests."""
        seconds = math.exp(self._log_pace) * self._at(np.arange(num_requests + 1), self._draft)
        seconds[0] = 0.0
        return seconds

    def uneven(self, num_requests: int) -> float:
        """Return the further seconds of a cycle whose lengths differ."""
        return math.exp(self._log_pace) * float(self._at(num_requests, self._uneven))

    def gaps(self) -> tuple[float, float]:
        """Return the time to the next cycle after a plain one, and after another."""
        plain, other = self._gaps
        known = [gap for gap in self._gaps if not math.isnan(gap)]
        return (0.0, 0.0) if not known else (known[0] if math.isnan(plain) else plain, known[-1])

    def observe(self, expected: float, seconds: float, gap: float | None, was_plain: bool) -> None:
        """Learn from a cycle: its seconds without the gap, those expected, and the gap before it.

        was_plain: whether the cycle before it verified no drafted token.
        """
        surprise = math.log(max(seconds, 1e-9) / expected)
        self._log_pace += _PACE_RATE * min(max(surprise, -_LARGEST_SURPRISE), _LARGEST_SURPRISE)
        if gap is not None:
            kind = 0 if was_plain else 1
            before = self._gaps[kind]
            # Once known, a pause counts as three gaps at most.
            new = gap if math.isnan(before) else before + _GAP_RATE * (min(gap, 3 * before) - before)
            self._gaps[kind] = new
