"""The number of drafted tokens that each request verifies in the next cycle.

A cycle verifies the anchor and the first L_i of the K drafted tokens of each request. It accepts them up to
the first rejection and adds one token of the target. If all L_i are 0, the cycle is plain.

n: decoding requests. s_ik: probability that drafted tokens 1 .. k of request i are all accepted. [n, K]
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sglang_dflash.kernels.ops.speculative.copy_ahead import LONGEST_MATCH, SHORTEST_MATCH

_START_UP, _LEAST_WEIGHT = 6, 0.05  # comparisons that start-up counts for; the least weight of one
_LATEST = 0.4  # weight of the latest cycle in an average
_MOST = np.log(2)  # by which a cycle differs from those before it. More is a stall
_PRIOR, _PRIOR_WEIGHT = 0.7, 2  # before any label: high, as what is never verified is never learned
_MEMORY = 1 - 1 / 300  # of the average, per label
_SHRINKAGE, _OWN_MEMORY = 6, 0.97  # labels of the average beside a request's; what a block keeps of these
UNKNOWN_MATCH = 1  # length of a match if the host does not know whether there is one
# Probability that a copied token is right, by the length of the match before it, from SHORTEST_MATCH on: in
# 120,000 matches in the stored answers of SmolLM2 (models/training/prompts).
_OF_MATCHES = (0.6, 0.7, 0.74, 0.77, 0.8, 0.82, 0.84, 0.86, 0.88, 0.89, 0.9, 0.91, 0.92, 0.96)
_COPY_PROBS = np.array([0, *[0.1] * (SHORTEST_MATCH - 1), *_OF_MATCHES])
_SHARES = np.linspace(0, 1, 9)  # of the requests that may be drafted for
_LEAST_GAIN = 1.03  # of tokens per second over a plain cycle's. Less is not worth the risk
_FIRST_PROBE, _LAST_PROBE = 4, 100  # cycles from a probe to the next, at least and at most
_PROBE_SHARE = 0.005  # of the time, that probes may cost


@dataclass(eq=False)
class Costs:
    """Seconds of verifies and of drafts: linear between measured loads and beyond."""

    loads: Any  # numbers of requests that were measured, ascending. [L]
    verify_lens: Any  # slots per request that were measured, ascending. [W]
    verify: np.ndarray  # seconds of a cycle without its draft. [L, W]
    draft: np.ndarray  # seconds of drafting for all requests. [L]
    # Seconds of a cycle in which every other request, the first included, verifies a whole block, and the
    # rest nothing. [L] None: the cycle takes what its rows and its draft take.
    mixed: np.ndarray | None = None
    sizes: Sequence[int] = ()  # rows that a verify is padded to, ascending. Empty: it is not padded
    context: int = 0  # committed tokens of a request in the measurement
    seconds_per_token: float = 0.0  # of each committed token beyond them

    def __post_init__(self) -> None:
        self.loads, self.verify_lens = np.asarray(self.loads), np.asarray(self.verify_lens)
        # More work takes no less time, and other processes only add to it: a peak is noise.
        self.draft = np.minimum.accumulate(self.draft[::-1])[::-1]
        self.verify = np.minimum.accumulate(np.minimum.accumulate(self.verify[::-1, ::-1]), 1)[::-1, ::-1]
        self._ragged = np.zeros(len(self.loads))
        if self.mixed is not None:
            for i, n in enumerate(self.loads.tolist()):
                whole, (of_rows, of_drafts, _) = (n + 1) // 2, self._compute(n)
                of_parts = of_rows[whole * (self.verify_lens[-1] - 1)] + of_drafts[whole]
                self._ragged[i] = max(0.0, self.mixed[i] - of_parts)
        self._of_load = functools.lru_cache(maxsize=1024)(self._compute)

    def of_load(self, n: int, extra_context: int = 0) -> tuple[np.ndarray, np.ndarray, float]:
        """Return the seconds of verifies of 0 .. n K tokens, of 0 .. n drafts, of unequal lengths.

        `extra_context` is the committed tokens of all n requests beyond n times `context`.
        """
        verify, draft, ragged = self._of_load(n)
        # With shorter contexts than at start-up, the part that is not attention stays.
        return np.maximum(verify + self.seconds_per_token * extra_context, verify / 2), draft, ragged

    def _compute(self, n: int) -> tuple[np.ndarray, np.ndarray, float]:
        drafted = np.arange(n * (self.verify_lens[-1] - 1) + 1)
        verify = np.interp(drafted, n * (self.verify_lens - 1), self._at(n, self.verify))
        if len(self.sizes):
            sufficient = np.searchsorted(self.sizes, n + drafted).clip(max=len(self.sizes) - 1)
            verify = verify[np.maximum(np.take(self.sizes, sufficient) - n, drafted).clip(max=drafted[-1])]
        draft = np.append(0.0, self._at(np.arange(1, n + 1), self.draft))
        return verify, draft, max(0.0, float(self._at(n, self._ragged)))

    def _at(self, n: Any, table: np.ndarray) -> np.ndarray:
        """Read a table [L, ...] at a load, or [L] at several; beyond the last, linearly on."""
        within = np.apply_along_axis(lambda seconds: np.interp(n, self.loads, seconds), 0, table)
        slope = np.diff(table, axis=0, prepend=0 * table[:1])[-1] / np.diff(self.loads, prepend=0)[-1]
        return within + np.maximum(0, n - self.loads[-1]) * slope


class Pace:
    """Learns by which factor plain cycles, beside others, are slower than start-up says."""

    def __init__(self) -> None:
        self.log_ratio = self._seen = self._plain_share = 0.0
        self._level: float | None = None  # of the latest cycles: seconds over those expected, as a logarithm

    def observe(self, is_plain: bool, expected: float, seconds: float) -> None:
        """Learn from a cycle that takes `expected` seconds by start-up's measurement."""
        error = np.log(seconds / expected) - self.log_ratio * is_plain
        if self._level is None:
            self._level, self._plain_share = error, float(is_plain)
        surprise, contrast = np.clip(error - self._level, -_MOST, _MOST), is_plain - self._plain_share
        self._seen += contrast**2
        self.log_ratio += surprise * contrast * max(1 / (_START_UP + self._seen), _LEAST_WEIGHT)
        self._level += _LATEST * surprise
        self._plain_share += _LATEST * contrast


class Acceptance:
    """s_ik of drafted tokens, from the labels of each request, shrunk to the average of all.

    A block labels accepted tokens 1, the first that was not 0, and none after it. A step without labels is as
    good as the one before it.
    """

    def __init__(self, num_rows: int, max_draft_tokens: int):
        self._labels, self._accepted = np.zeros((2, max_draft_tokens))
        self._own_labels, self._own_accepted = np.zeros((2, num_rows, max_draft_tokens))
        self._steps = np.arange(max_draft_tokens)

    @property
    def averages(self) -> np.ndarray:
        """Probability that a token is accepted if those before it are. [K]"""
        averages, before = np.empty_like(self._labels), _PRIOR
        for k, (labels, accepted) in enumerate(zip(self._labels, self._accepted, strict=True)):
            averages[k] = before = (accepted + _PRIOR_WEIGHT * before) / (labels + _PRIOR_WEIGHT)
        return averages.clip(1e-3, 1 - 1e-3)

    def reset(self, rows: np.ndarray) -> None:
        """Start new requests in these rows."""
        self._own_labels[rows] = self._own_accepted[rows] = 0.0

    def survival(self, rows: np.ndarray) -> np.ndarray:
        """Return s_ik [n, K] of requests in these rows of the request table, [n]."""
        accepted = self._own_accepted[rows] + _SHRINKAGE * self.averages
        return (accepted / (self._own_labels[rows] + _SHRINKAGE)).cumprod(axis=1)

    def learn(self, rows: np.ndarray, verified: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from `accepted` of the `verified` drafted tokens of requests in `rows`, each [n]."""
        if not verified.any():
            return
        is_label = self._steps < np.minimum(accepted + 1, verified)[:, None]
        is_accepted = self._steps < np.minimum(accepted, verified)[:, None]
        memory = np.where(verified > 0, _OWN_MEMORY, 1.0)[:, None]
        self._own_labels[rows] = memory * self._own_labels[rows] + is_label
        self._own_accepted[rows] = memory * self._own_accepted[rows] + is_accepted
        labels = is_label.sum(axis=0)
        self._labels = _MEMORY**labels * self._labels + labels
        self._accepted = _MEMORY**labels * self._accepted + is_accepted.sum(axis=0)


def copy_survival(matches: np.ndarray, max_draft_tokens: int) -> np.ndarray:
    """Return s_ik of copies, 0 without a match. A right token makes a match longer. [n, K]"""
    lengths = np.minimum(matches[:, None] + np.arange(max_draft_tokens), LONGEST_MATCH)
    return _COPY_PROBS[lengths].cumprod(axis=1)  # the first factor is 0 without a match


def choose_lengths(
    survival: np.ndarray, is_free: np.ndarray, verify: np.ndarray, draft: np.ndarray, ragged: float = 0.0
) -> tuple[np.ndarray, float]:
    """Return how many drafted tokens of each request to verify [n], and tokens per second.

    The slots of all requests compete: of the m requests that may gain most, those with the largest s_ik are
    taken, for shares m and every number of slots. Within a request s never rises, so the chosen slots are
    always a prefix. Equal lengths are compared as well, because unequal ones may cost more.

    Args:
        survival: s_ik, 0 for slots that must not be verified. [n, K]
        is_free: requests whose blocks take no draft forward. [n] bool
        verify: seconds of a verify with j drafted tokens in all, j = 0 .. n K.
        draft: seconds of drafting for m requests, m = 0 .. n.
        ragged: further seconds of a cycle whose lengths differ.
    """
    (n, most), num_free = survival.shape, int(is_free.sum())
    equal = np.arange((survival > 0).all(axis=0).sum() + 1)
    seconds = verify[n * equal] + draft[n - num_free] * (equal > 0)
    of_equal = np.concatenate(([n], survival.sum(axis=0))).cumsum()[equal] / seconds
    length = int(of_equal.argmax())
    order = np.argsort(-survival, axis=None, kind="stable")  # equals by position, not by request
    slots, request = survival.ravel()[order], order // most
    rank = np.empty(n, dtype=int)
    rank[np.argsort(-survival.sum(axis=1) - most * is_free, kind="stable")] = np.arange(n)
    sizes = np.unique(np.rint(_SHARES * (n - num_free)).astype(int))
    taken = (rank[request] < num_free + sizes[:, None]) & (slots > 0)
    seconds = verify[taken.cumsum(axis=1)] + draft[sizes][:, None] + ragged
    speeds = (n + (slots * taken).cumsum(axis=1)) / seconds
    size, last = np.unravel_index(speeds.argmax(), speeds.shape)
    if speeds[size, last] <= of_equal[length] * (1 + 1e-9):
        return np.full(n, length), float(of_equal[length])
    return np.bincount(request[: last + 1][taken[size, : last + 1]], minlength=n), float(speeds[size, last])


class Choice(NamedTuple):
    """A decision for n requests."""

    lengths: np.ndarray  # drafted tokens to verify. [n]
    copies: np.ndarray  # which requests verify a copy instead. [n] bool


class Policy:
    """Chooses verify lengths from costs, which name the largest, and from what was accepted.

    With `skips_draft` a copy may be verified without running the draft.
    """

    def __init__(self, costs: Costs, num_rows: int, skips_draft: bool = True):
        self.costs, self.num_rows, self._skips_draft = costs, num_rows, skips_draft
        self.max_draft_tokens = int(costs.verify_lens[-1]) - 1
        self.acceptance, self.pace = Acceptance(num_rows, self.max_draft_tokens), Pace()
        self.num_probes, self._turn, self._cycles_since_probe = 0, 0, np.zeros(2)

    def choose(self, rows: np.ndarray, extra_context: int, matches: np.ndarray, caps: np.ndarray) -> Choice:
        """Return the best choice for the next cycle, or a probe, which differs to learn.

        Args:
            rows: of the request table. [n]
            extra_context: committed tokens of all requests beyond those that costs were measured with.
            matches: lengths of the requests' matches, 0 without one, or `UNKNOWN_MATCH`. [n]
            caps: most drafted tokens that each request may accept. [n]
        """
        n, steps, caps = len(rows), np.arange(self.max_draft_tokens), np.minimum(caps, self.max_draft_tokens)
        verify, draft, ragged = self.costs.of_load(n, extra_context)
        verify[0] *= np.exp(self.pace.log_ratio)
        is_allowed = steps < caps[:, None]
        drafted = self.acceptance.survival(rows) * is_allowed
        copied = copy_survival(matches, self.max_draft_tokens) * is_allowed
        # What the draft of a request costs, in tokens of a plain cycle.
        price = draft[-1] / verify[0] if self._skips_draft else 0.0
        copies = (matches > 0) & (copied.sum(axis=1) >= drafted.sum(axis=1) - price)
        survival = np.where(copies[:, None], copied, drafted)
        costs: Any = dict(verify=verify, draft=draft, ragged=ragged)
        lengths, speed = np.zeros(n, dtype=int), n / verify[0]
        if (n + survival.sum()) / verify[1] >= _LEAST_GAIN * speed:  # no choice is faster than this
            best = choose_lengths(survival, is_free=copies & self._skips_draft, **costs)
            lengths, speed = best if best[1] >= _LEAST_GAIN * speed else (lengths, speed)
        copies &= lengths > 0
        self._cycles_since_probe += 1
        if self._cycles_since_probe[0] % 2:
            return Choice(lengths, copies)  # the search for a probe takes as long as the choice
        probes = [self._probe(lengths, is_whole=(lengths >= caps) | copies, rows=rows, caps=caps)]
        if not lengths.any():  # Labels of one request would take long to correct what all have taught.
            equal = np.minimum(1 + steps[:, None], caps)  # [K, n]
            speeds = (n + drafted.sum(axis=0).cumsum()) / (verify[equal.sum(axis=1)] + draft[-1])
            probes.append(equal[speeds.argmax()])
        for kind, probe in enumerate(probes):
            tokens = n + (survival * (steps < probe[:, None])).sum()
            loss = 1 - tokens / self._seconds(Choice(probe, copies), **costs) / speed
            latest = min(_FIRST_PROBE << min(self.num_probes, 8), _LAST_PROBE)
            wait = 4**kind * np.clip(loss / _PROBE_SHARE, _FIRST_PROBE, latest)
            if self._cycles_since_probe[kind] >= wait and (probe != lengths).any():
                self.num_probes, self._cycles_since_probe[kind] = self.num_probes + 1, 0
                if kind == 0 and (wider := probe > lengths).any():
                    self._turn = int(rows[wider.argmax()]) + 1
                return Choice(probe, copies & (probe > 0))
        return Choice(lengths, copies)

    def _probe(self, lengths: np.ndarray, is_whole: np.ndarray, rows: np.ndarray, caps: np.ndarray) -> Any:
        """Return a whole block of one more request or, each fourth time, none; else the other."""
        distance = np.where(is_whole, self.num_rows, (rows - self._turn) % self.num_rows)
        wider, none = lengths.copy(), np.zeros_like(lengths)
        wider[distance.argmin()] = caps[distance.argmin()]
        first, second = (none, wider) if self.num_probes % 4 == 3 else (wider, none)
        return first if (first != lengths).any() else second

    def seconds(self, choice: Choice, extra_context: int = 0) -> float:
        """Return the seconds of a cycle by start-up's measurement."""
        return self._seconds(choice, *self.costs.of_load(len(choice.lengths), extra_context))

    def _seconds(self, choice: Choice, verify: np.ndarray, draft: np.ndarray, ragged: float) -> float:
        lengths = choice.lengths
        num_drafted = ((lengths > 0) & ~(choice.copies & self._skips_draft)).sum()
        return float(verify[lengths.sum()] + draft[num_drafted] + ragged * (lengths != lengths[0]).any())
