"""Estimates for the policy: how likely tokens are accepted, and how long cycles take.

A verified block labels its drafted tokens: 1 if accepted, 0 for the first that was not, none after it. The
draft's own confidence would say more, but too late: lengths are chosen before there is a draft.

m: how the token was chosen and is judged (MODES). A draw is accepted in other cases than an argmax, and what
a client's grammar does must not decide for others.

Seconds of a cycle are measured at start-up, and corrected while serving. `CycleClock` measures them without
waiting for the device: by CUDA events, or by wall time on a CPU.
"""

import functools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_dflash.kernels.ops.speculative.copy_ahead import LONGEST_MATCH, SHORTEST_MATCH
from sglang_dflash.srt.speculative.cycle.plan import CycleWork

# The target's argmax; its draws compared with a drafted argmax; rejection of drawn drafts; logits that a
# grammar or a penalty changes.
MODES = ("greedy", "sampled", "drawn", "constrained")

# Before any label: high, because what is never verified is never learned.
_DRAFT_PRIOR, _COPY_PRIOR, _PRIOR_WEIGHT = 0.7, 0.5, 2.0
# Length of a match that the host does not know of, where it learns of matches late: there may be one.
UNKNOWN_MATCH, _UNKNOWN_PRIOR = 1, 0.1
# A request's own labels: how many its mode's average counts for; what is kept of them per verified block.
_OWN_WEIGHT, _OWN_MEMORY = 12.0, 0.97
_MEMORY = 1 - 1 / 300  # of averages, per label
# How often tokens of a narrower draft block are accepted before any label, over those of a whole one, and how
# many labels that counts for. Low, so that probes look first: with fewer rows some drafts lose a third.
_NARROW_PRIOR, _NARROW_WEIGHT = 0.9, 20.0


class _Averages:
    """Accepted share of labels per mode and step.

    Before any label a step is as good as the one before it, or as `priors` say.
    """

    def __init__(self, steps: int, priors: dict[int, float]):
        self._labels, self._accepted = np.zeros((2, len(MODES), steps))
        self._priors = priors

    @property
    def averages(self) -> np.ndarray:
        """Probability that a token is accepted if those before it are. [modes, steps]"""
        averages, before = np.empty_like(self._labels), np.zeros(len(MODES))
        for k in range(averages.shape[1]):
            if k in self._priors:
                before = np.full(len(MODES), self._priors[k])
            before = (self._accepted[:, k] + _PRIOR_WEIGHT * before) / (self._labels[:, k] + _PRIOR_WEIGHT)
            averages[:, k] = before
        return np.clip(averages, 1e-3, 1 - 1e-3)

    def _add(self, cells: np.ndarray, is_accepted: np.ndarray) -> None:
        """Add labels at cells, mode * steps + step. [labels]"""
        shape, size = self._labels.shape, self._labels.size
        labels = np.bincount(cells, minlength=size).reshape(shape)
        accepted = np.bincount(cells[is_accepted], minlength=size).reshape(shape)
        self._labels = _MEMORY**labels * self._labels + labels
        self._accepted = _MEMORY**labels * self._accepted + accepted


class AcceptanceEstimate(_Averages):
    """s_ik of drafted tokens: each request's own labels, shrunk to the average of its mode.

    The labels have `num_rows` rows, as the request table, and `max_draft_tokens` columns. They are of whole
    draft blocks. A narrower block changes what the draft proposes, so its tokens are accepted less or more
    often, by a factor per mode and step. A request's labels of both kinds are kept together, divided by it.

    Args:
        num_rows: of the request table.
        max_draft_tokens: K.
        narrow_slots: drafted slots of the narrower block. 0: all are whole.
    """

    def __init__(self, num_rows: int, max_draft_tokens: int, narrow_slots: int = 0):
        super().__init__(max_draft_tokens, {0: _DRAFT_PRIOR})
        self._seen, self._kept = np.zeros((2, num_rows, max_draft_tokens))
        self._steps = np.arange(max_draft_tokens)
        self._narrow = _Averages(narrow_slots, {})

    def reset(self, rows: np.ndarray) -> None:
        """Start new requests in these rows."""
        self._seen[rows] = self._kept[rows] = 0.0

    def narrow_factors(self) -> np.ndarray:
        """Return how often tokens of narrower blocks are accepted, over whole ones. [modes, K]

        0 for steps that a narrower block does not have.
        """
        averages, narrow = self.averages, self._narrow
        factors, num_slots = np.zeros_like(averages), narrow._labels.shape[1]
        expected = averages[:, :num_slots]
        found = narrow._accepted + _NARROW_WEIGHT * _NARROW_PRIOR * expected
        factors[:, :num_slots] = found / (narrow._labels + _NARROW_WEIGHT) / expected
        return factors

    def prefix_accept_probs(self, rows: np.ndarray, modes: np.ndarray, is_narrow: bool = False) -> np.ndarray:
        """Return s_ik [n, K] of the next cycle, for requests in these rows [n] with modes [n]."""
        averages = self.averages[modes]
        own = (self._kept[rows] + _OWN_WEIGHT * averages) / (self._seen[rows] + _OWN_WEIGHT)
        if is_narrow:
            own *= self.narrow_factors()[modes]
        return own.clip(max=1.0).cumprod(axis=1)

    def learn(
        self,
        rows: np.ndarray,
        modes: np.ndarray,
        drafted: np.ndarray,
        accepted: np.ndarray,
        is_narrow: bool = False,
    ) -> None:
        """Learn from a cycle.

        Args:
            rows: of the request table. [n]
            modes: of `MODES`. [n]
            drafted: verified tokens of the draft; 0 for a copy. [n]
            accepted: of these. [n]
            is_narrow: whether the draft's blocks were narrower.
        """
        seen = self._steps < np.minimum(accepted + 1, drafted)[:, None]
        kept = self._steps < np.where(drafted > 0, accepted, 0)[:, None]
        memory = np.where(drafted > 0, _OWN_MEMORY, 1.0)[:, None]
        as_whole = kept / self.narrow_factors()[modes].clip(min=0.1) if is_narrow else kept
        self._seen[rows] = memory * self._seen[rows] + seen
        self._kept[rows] = memory * self._kept[rows] + as_whole
        averages = self._narrow if is_narrow else self
        cells = modes[:, None] * averages._labels.shape[1] + self._steps
        averages._add(cells[seen], kept[seen])


class CopyEstimate(_Averages):
    """s_ik of copied tokens, by mode and length of the match.

    Each accepted token makes the match longer by one. So one probability per length says how long copies
    last. Matches of `LONGEST_MATCH` tokens or more share a probability. A request copies at most
    `max_draft_tokens`.
    """

    def __init__(self, max_draft_tokens: int):
        super().__init__(LONGEST_MATCH + 1, {0: _UNKNOWN_PRIOR, SHORTEST_MATCH: _COPY_PRIOR})
        self._steps = np.arange(max_draft_tokens)

    def prefix_accept_probs(self, modes: np.ndarray, matches: np.ndarray) -> np.ndarray:
        """Return s_ik [n, max_draft_tokens], 0 without a match, for modes and matches [n]."""
        lengths = np.minimum(matches[:, None] + self._steps, LONGEST_MATCH)
        return self.averages[modes[:, None], lengths].cumprod(axis=1) * (matches > 0)[:, None]

    def learn(self, modes: np.ndarray, matches: np.ndarray, seen: np.ndarray, right: np.ndarray) -> None:
        """Learn from matches, whether or not they were used.

        Args:
            modes: of `MODES`. [n]
            matches: length of each match. [n]
            seen: tokens of its continuation that were compared with the target's, up to the first wrong one.
                [n]
            right: of these. [n]
        """
        is_seen = self._steps < seen[:, None]
        lengths = np.minimum(matches[:, None] + self._steps, LONGEST_MATCH)
        cells = modes[:, None] * (LONGEST_MATCH + 1) + lengths
        self._add(cells[is_seen], (self._steps < right[:, None])[is_seen])


KNOWN = 8  # cycles after which an entry is known
_NEIGHBOURS = 7  # cycles before and after one that tell how fast the machine is
_MOST = np.log(2)  # what one cycle says of an entry, in logarithms: mixed_sample or twice at most
_LEAST_RATE = 0.05  # at which a cycle is believed after many


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
        verify_lens: slots per request that were measured, ascending. [W]
        verify: seconds of a cycle without its draft. [L, W]
        draft: seconds of drafting for all requests. [L], or [L, D] by the drafted slots of a block.
        padded: whether forwards are padded to the next of `loads`.
        seconds_per_context_token: for each committed token beyond `context`.
        context: committed tokens per request in the measurement.
        sizes: rows that a verify is padded to, ascending. Empty: it is not, or to whole requests.
        mixed_sample: seconds of a cycle in which every other request, the first included, has a whole block
            and the rest verify nothing. [L], or of the first loads.
        tries: served cycles that each load's measurement counts for. [L]
        draft_slots: drafted slots per block that were measured, ascending. [D] None: whole blocks alone.
    """

    def __init__(
        self,
        loads: np.ndarray,
        verify_lens: np.ndarray,
        verify: np.ndarray,
        draft: np.ndarray,
        padded: bool = False,
        seconds_per_context_token: float = 0.0,
        context: int = 0,
        sizes: Sequence[int] = (),
        mixed_sample: np.ndarray | float = 0.0,
        tries: np.ndarray | float = KNOWN,
        draft_slots: Sequence[int] | None = None,
    ):
        self.loads, self.verify_lens, self._padded = np.asarray(loads), np.asarray(verify_lens), padded
        num_loads, num_lens = len(self.loads), len(self.verify_lens)
        self.draft_slots = np.asarray(draft_slots or self.verify_lens[-1:] - 1)
        # More work takes no less time, and other processes only add to it: a peak is noise.
        verify, draft = (
            _lowered(np.array(table, dtype=float).reshape(num_loads, -1)) for table in (verify, draft)
        )
        self._entries = np.concatenate(
            (verify.ravel(), draft.ravel(), np.zeros(num_loads), [seconds_per_context_token])
        )
        of_verify, of_draft, self._ragged_overhead = np.split(
            self._entries[:-1], [verify.size, verify.size + draft.size]
        )
        self._verify, self._draft = of_verify.reshape(num_loads, num_lens), of_draft.reshape(num_loads, -1)
        of_loads = np.broadcast_to(np.asarray(tries, dtype=float), num_loads)
        num_widths = len(self.draft_slots)
        of_entries = of_loads.repeat(num_lens), of_loads.repeat(num_widths), of_loads, [KNOWN]
        self._tries = np.concatenate(of_entries)
        self._recent: deque[tuple[np.ndarray, float]] = deque(maxlen=2 * _NEIGHBOURS + 1)
        self.context, self._sizes = context, np.asarray(sizes)
        self._weights_at_context = functools.lru_cache(maxsize=1024)(self._compute_weights)
        for i, (n, sample) in enumerate(zip(self.loads, np.atleast_1d(mixed_sample), strict=False)):
            whole = (n + 1) // 2
            of_rows = self.verify(n)[whole * (self.verify_lens[-1] - 1)] + self.draft(n)[whole]
            self._ragged_overhead[i:] = max(0.0, sample - of_rows)

    def _at(self, requests: np.ndarray | int, table: np.ndarray) -> np.ndarray:
        """Read a table [L, ..] between loads. Beyond the last load time grows in proportion."""
        index = np.interp(requests, self.loads, np.arange(len(self.loads)))
        table = _read(table, np.ceil(index) if self._padded else index)
        return table * np.maximum(1.0, requests / self.loads[-1])

    def verify(self, num_requests: int, extra_context: int = 0) -> np.ndarray:
        """Return the seconds of verifying 0 .. n K drafted tokens.

        Args:
            num_requests: n.
            extra_context: committed tokens of all requests beyond n times `context`.
        """
        by_length = self._at(num_requests, self._verify)
        # With shorter contexts than at start-up, the part that is not attention stays.
        by_length = np.maximum(by_length + self._entries[-1] * extra_context, by_length / 2)
        drafted = np.arange(num_requests * (self.verify_lens[-1] - 1) + 1)
        seconds = np.interp(drafted, num_requests * (self.verify_lens - 1), by_length)
        return seconds[self._padded_rows(num_requests, drafted).clip(max=drafted[-1])]

    def _padded_rows(self, num_requests: int, drafted: np.ndarray) -> np.ndarray:
        """Return the drafted tokens of a forward that is padded to a captured size."""
        if not self._sizes.size:
            return drafted
        sufficient = np.searchsorted(self._sizes, num_requests + drafted).clip(max=len(self._sizes) - 1)
        return np.maximum(self._sizes[sufficient] - num_requests, drafted)

    def draft(self, num_requests: int, draft_slots: int = 0) -> np.ndarray:
        """Return the seconds of drafting for 0 .. n requests, in blocks of one width. [n + 1]"""
        seconds = self._at(np.arange(num_requests + 1), self._draft[:, self._column(draft_slots)])
        seconds[0] = 0.0
        return seconds

    def _column(self, draft_slots: int) -> int:
        """Return the index of a width of draft blocks in `draft_slots`."""
        return int(np.searchsorted(self.draft_slots, draft_slots)) if draft_slots else -1

    def ragged_overhead(self, num_requests: int) -> float:
        """Return the further seconds of a cycle whose lengths differ."""
        return float(self._at(num_requests, self._ragged_overhead))

    def _weights(self, work: CycleWork) -> np.ndarray:
        """Return how much of each entry a cycle takes."""
        weights = self._weights_at_context(work._replace(extra_context=0)).copy()
        weights[-1] = max(work.extra_context, 0)
        return weights

    def _compute_weights(self, work: CycleWork) -> np.ndarray:
        """Return how much of each entry a cycle takes without further committed tokens."""
        n = work.requests
        row = self._padded_rows(n, np.array(work.verified))
        loads, lengths, widths = (
            np.eye(len(axis)) for axis in (self.loads, self.verify_lens, self.draft_slots)
        )
        by_load, drafts = self._at(n, loads), self._at(work.drafted_for, loads) * (work.drafted_for > 0)
        by_length = _read(lengths, np.interp(row, n * (self.verify_lens - 1), np.arange(len(lengths))))
        verify = np.outer(by_load, by_length).ravel()
        drafts = np.outer(drafts, widths[self._column(work.draft_slots)]).ravel()
        return np.concatenate((verify, drafts, by_load * work.is_ragged, [0.0]))

    def expected(self, work: CycleWork) -> float:
        """Return the seconds of a cycle."""
        return float(self._weights(work) @ self._entries)

    def tries(self, work: CycleWork) -> float:
        """Return how often served cycles have corrected the entries of a cycle."""
        shares = self._weights(work) * self._entries
        return float(shares @ self._tries / shares.sum())

    def observe(self, work: CycleWork, seconds: float) -> None:
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


class CycleClock:
    """Times work from `start`, or the end of the work before it, to its `stop`.

    Call `interrupt` if something other than a cycle runs: the work that ends next is then not timed.
    """

    def __init__(self, device: str):
        self._is_cuda = device != "cpu"
        self._free_events: list[Any] = []  # read; recorded again, as making one in every cycle takes time
        self._pending: deque[tuple[Any, Any, Any]] = deque()
        self._since: list[Any] = []  # the moment that the work under way is timed from, if there is one

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = self._free_events.pop() if self._free_events else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin here, whatever ran before."""
        self._since = [self._now()]

    def stop(self, work: Any = None) -> None:
        """End this work. The next begins here."""
        end = self._now()
        self._pending.extend((work, start, end) for start in self._since)
        self._since = [end]

    def interrupt(self) -> None:
        """Begin nowhere."""
        self._since = []

    def finished(self) -> list[tuple[Any, float]]:
        """Return work and its seconds, as far as they are known by now, in order."""
        timings = []
        while self._pending and (not self._is_cuda or self._pending[0][-1].query()):
            work, start, end = self._pending.popleft()
            seconds = 1e-3 * start.elapsed_time(end) if self._is_cuda else end - start
            timings.append((work, seconds))
            if self._is_cuda:
                self._free_events.append(start)
        return timings
