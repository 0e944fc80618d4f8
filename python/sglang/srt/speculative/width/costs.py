"""Seconds of a cycle: measured at start-up, followed while serving."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import isotonic_regression

_GAP_RATE = 0.05  # per cycle


class CostTable:
    """Seconds of verifying and of drafting.

    A verify of n requests takes j drafted tokens in all, and a draft serves m requests. Both are measured at
    start-up for some loads, with `context` committed tokens per request. Between these loads they are linear
    in n or, if forwards are padded to captured sizes, those of the next larger one. A machine that gets
    slower changes all costs alike, and no choice: seconds are those of start-up's pace.

    Attributes:
        gap: seconds from a cycle to the next, followed while serving.

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
        self.gap = 0.0
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
        return seconds

    def draft(self, num_requests: int) -> np.ndarray:
        """Return the seconds of drafting for 0 .. n requests."""
        seconds = self._at(np.arange(num_requests + 1), self._draft)
        seconds[0] = 0.0
        return seconds

    def uneven(self, num_requests: int) -> float:
        """Return the further seconds of a cycle whose lengths differ."""
        return float(self._at(num_requests, self._uneven))

    def observe(self, expected: float, seconds: float, gap: float) -> None:
        """Learn the gap before a cycle.

        A pause of the server is a gap too. So a gap counts as one cycle at most.

        Args:
            expected: seconds of the cycle by this table, without the gap.
            seconds: as measured.
            gap: as measured.
        """
        self.gap += _GAP_RATE * (expected * min(gap / max(seconds, 1e-9), 1.0) - self.gap)
