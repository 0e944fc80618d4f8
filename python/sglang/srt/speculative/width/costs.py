"""Seconds of a cycle: measured at start-up, corrected while serving."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

KNOWN = 8  # cycles after which an entry is known
_NEIGHBOURS = 7  # cycles before and after one that tell how fast the machine is
_MOST = np.log(2)  # what one cycle says of an entry, in logarithms: half or twice at most
_LEAST_RATE = 0.05  # at which a cycle is believed after many


class Work(NamedTuple):
    """Work of a cycle."""

    requests: int  # that it decodes
    verified: int  # drafted tokens in all
    drafted_for: int  # requests that the draft serves
    is_uneven: bool = False  # whether requests verify different numbers
    num_tokens: int | None = None  # committed tokens of all requests; None: as many as at start-up


class CostTable:
    """Seconds of verifying and of drafting.

    A verify of n requests takes j drafted tokens in all, and a draft serves m requests. Both are measured at
    start-up for some loads, with `context` committed tokens per request. Between these loads they are linear
    in n or, if forwards are padded to captured sizes, those of the next larger one.

    Other processes may have slowed the machine at start-up. So each served cycle corrects the entries which
    its time is made of. It is compared with the cycles around it: a machine that gets slower changes all
    costs by one factor, and no choice. Seconds are those of start-up's pace.

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
        tries: served cycles that each load's measurement counts for. [L]
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
        tries: np.ndarray | float = KNOWN,
    ):
        self.loads, self.widths, self._padded = np.asarray(loads), np.asarray(widths), padded
        num_loads, num_widths = len(self.loads), len(self.widths)
        # More work takes no less time, and other processes only add to it: a peak is noise.
        verify, draft = (_lowered(np.array(table, dtype=float)) for table in (verify, draft))
        self._entries = np.concatenate((verify.ravel(), draft, np.zeros(num_loads), [reads]))
        self._verify = self._entries[: verify.size].reshape(num_loads, num_widths)
        self._draft, self._uneven = self._entries[verify.size : -1].reshape(2, num_loads)
        of_loads = np.broadcast_to(np.asarray(tries, dtype=float), num_loads)
        self._tries = np.concatenate((of_loads.repeat(num_widths), of_loads, of_loads, [KNOWN]))
        self._recent: deque[tuple[np.ndarray, float]] = deque(maxlen=2 * _NEIGHBOURS + 1)
        self._context, self._sizes = context, None if sizes is None else np.asarray(sizes)
        for i, n in enumerate(self.loads):
            whole = (n + 1) // 2
            of_rows = self.verify(n)[whole * (self.widths[-1] - 1)] + self.draft(n)[whole]
            self._uneven[i] = 0.0 if half is None else max(0.0, half[i] - of_rows)

    def _at(self, requests: np.ndarray | int, table: np.ndarray) -> np.ndarray:
        """Read a table [L, ..] between loads. Beyond the last load time grows in proportion."""
        index = np.interp(requests, self.loads, np.arange(len(self.loads)))
        table = _read(table, np.ceil(index) if self._padded else index)
        return table * np.maximum(1.0, requests / self.loads[-1])

    def verify(self, num_requests: int, num_tokens: int | None = None) -> np.ndarray:
        """Return the seconds of verifying 0 .. n K drafted tokens.

        Args:
            num_requests: n.
            num_tokens: committed tokens of all requests. None: as many as at start-up.
        """
        further = 0 if num_tokens is None else num_tokens - num_requests * self._context
        by_width = self._at(num_requests, self._verify)
        # With shorter contexts than at start-up, the part that is not attention stays.
        by_width = np.maximum(by_width + self._entries[-1] * further, by_width / 2)
        drafted = np.arange(num_requests * (self.widths[-1] - 1) + 1)
        seconds = np.interp(drafted, num_requests * (self.widths - 1), by_width)
        return seconds[self._padded_rows(num_requests, drafted).clip(max=drafted[-1])]

    def _padded_rows(self, num_requests: int, drafted: np.ndarray) -> np.ndarray:
        """Return how many drafted tokens the forward takes that verifies so many."""
        if self._sizes is None:
            return drafted
        sufficient = np.searchsorted(self._sizes, num_requests + drafted).clip(max=len(self._sizes) - 1)
        return np.maximum(self._sizes[sufficient] - num_requests, drafted)

    def draft(self, num_requests: int) -> np.ndarray:
        """Return the seconds of drafting for 0 .. n requests."""
        seconds = self._at(np.arange(num_requests + 1), self._draft)
        seconds[0] = 0.0
        return seconds

    def uneven(self, num_requests: int) -> float:
        """Return the further seconds of a cycle whose lengths differ."""
        return float(self._at(num_requests, self._uneven))

    def _weights(self, work: Work) -> np.ndarray:
        """Return how much of each entry a cycle takes."""
        n, further = work.requests, 0
        if work.num_tokens is not None:
            further = max(work.num_tokens - n * self._context, 0)
        row = self._padded_rows(n, np.array(work.verified))
        loads, widths = np.eye(len(self.loads)), np.eye(len(self.widths))
        by_load, drafts = self._at(n, loads), self._at(work.drafted_for, loads) * (work.drafted_for > 0)
        by_width = _read(widths, np.interp(row, n * (self.widths - 1), np.arange(len(widths))))
        verify = np.outer(by_load, by_width).ravel()
        return np.concatenate((verify, drafts, by_load * work.is_uneven, [further]))

    def expected(self, work: Work) -> float:
        """Return the seconds of a cycle."""
        return float(self._weights(work) @ self._entries)

    def tries(self, work: Work) -> float:
        """Return how often served cycles have corrected the entries of a cycle."""
        shares = self._weights(work) * self._entries
        return float(shares @ self._tries / shares.sum())

    def observe(self, work: Work, seconds: float) -> None:
        """Correct the entries of the latest cycle whose neighbours are known.

        `seconds` are those of the cycle and the pause before it.
        """
        self._recent.append((self._weights(work), np.log(seconds)))
        if len(self._recent) <= _NEIGHBOURS:
            return
        weights, measured = map(np.array, zip(*self._recent, strict=True))
        ratios = measured - np.log(weights @ self._entries)
        error = (ratios[-1 - _NEIGHBOURS] - np.median(ratios)).clip(-_MOST, _MOST)
        shares = weights[-1 - _NEIGHBOURS] * self._entries
        shares *= shares.sum() / (shares @ shares)
        self._tries += shares
        self._entries *= np.exp(error * shares * np.maximum(1 / (1 + self._tries), _LEAST_RATE))
        restore = _lowered if error < 0 else _raised
        self._verify[:], self._draft[:] = restore(self._verify), restore(self._draft)


def _read(table: np.ndarray, index: Any) -> np.ndarray:
    """Read a table at fractional indices of its first axis, linearly."""
    below, above = np.floor(index).astype(int), np.ceil(index).astype(int)
    return table[below] + (index - below) * (table[above] - table[below])


def _lowered(table: np.ndarray) -> np.ndarray:
    """Lower entries to those of more work, along each axis."""
    for axis in range(table.ndim):
        table = np.flip(np.minimum.accumulate(np.flip(table, axis), axis), axis)
    return table


def _raised(table: np.ndarray) -> np.ndarray:
    """Raise entries to those of less work, along each axis."""
    for axis in range(table.ndim):
        table = np.maximum.accumulate(table, axis)
    return table
