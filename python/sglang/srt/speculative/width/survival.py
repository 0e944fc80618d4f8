"""Probability that drafted and copied tokens are accepted. Numpy.

A verified block labels its drafted tokens: 1 if accepted, 0 for the first that was not, none after it. The
draft's own confidence would say more, but too late: lengths are chosen before there is a draft.

m: how the token was chosen and is judged (MODES). A draw is accepted in other cases than an argmax, and what
a client's grammar does must not decide for others.
"""

import numpy as np

from sglang_dflash.kernels.ops.speculative.copy_ahead import RULE

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


class _Averages:
    """Accepted share of labels per mode and step.

    Before any label a step is as good as the one before it, or as `priors` say.
    """

    def __init__(self, steps: int, priors: dict[int, float]):
        self.seen = np.zeros((len(MODES), steps))
        self.kept = np.zeros_like(self.seen)
        self._priors = priors

    def get(self) -> np.ndarray:
        averages, before = np.empty_like(self.seen), np.zeros(len(MODES))
        for k in range(averages.shape[1]):
            if k in self._priors:
                before = np.full(len(MODES), self._priors[k])
            before = (self.kept[:, k] + _PRIOR_WEIGHT * before) / (self.seen[:, k] + _PRIOR_WEIGHT)
            averages[:, k] = before
        return np.clip(averages, 1e-3, 1 - 1e-3)

    def learn(self, cells: np.ndarray, is_kept: np.ndarray) -> None:
        """Add labels at cells, mode * steps + step. [labels]"""
        shape, size = self.seen.shape, self.seen.size
        seen = np.bincount(cells, minlength=size).reshape(shape)
        kept = np.bincount(cells[is_kept], minlength=size).reshape(shape)
        self.seen = _MEMORY**seen * self.seen + seen
        self.kept = _MEMORY**seen * self.kept + kept


class DraftSurvival:
    """s_ik of drafted tokens: each request's own labels, shrunk to the average of its mode.

    The labels have `num_rows` rows, as the request table, and `depth` columns: K, the drafted tokens of a
    block.
    """

    def __init__(self, num_rows: int, depth: int):
        self._averages = _Averages(depth, {0: _DRAFT_PRIOR})
        self._seen, self._kept = np.zeros((num_rows, depth)), np.zeros((num_rows, depth))
        self._steps = np.arange(depth)

    @property
    def averages(self) -> np.ndarray:
        """Probability that a token is accepted if those before it are. [modes, K]"""
        return self._averages.get()

    def reset(self, rows: np.ndarray) -> None:
        """Start new requests in these rows."""
        self._seen[rows] = self._kept[rows] = 0.0

    def of(self, rows: np.ndarray, modes: np.ndarray) -> np.ndarray:
        """Return s_ik [n, K] of the next cycle, for requests in these rows [n] with modes [n]."""
        averages = self._averages.get()[modes]
        own = (self._kept[rows] + _OWN_WEIGHT * averages) / (self._seen[rows] + _OWN_WEIGHT)
        return own.cumprod(axis=1)

    def learn(self, rows: np.ndarray, modes: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from a cycle.

        Args:
            rows: of the request table. [n]
            modes: of `MODES`. [n]
            drafted: verified tokens of the draft; 0 for a copy. [n]
            accepted: of these. [n]
        """
        seen = self._steps < np.minimum(accepted + 1, drafted)[:, None]
        kept = self._steps < np.where(drafted > 0, accepted, 0)[:, None]
        memory = np.where(drafted > 0, _OWN_MEMORY, 1.0)[:, None]
        self._seen[rows] = memory * self._seen[rows] + seen
        self._kept[rows] = memory * self._kept[rows] + kept
        cells = modes[:, None] * len(self._steps) + self._steps
        self._averages.learn(cells[seen], kept[seen])


class CopySurvival:
    """s_ik of copied tokens, by mode and length of the match.

    Each accepted token makes the match longer by one. So one probability per length says how long copies
    last. Matches of `RULE.longest` tokens or more share a probability. `depth` is the most copied tokens of a
    request.
    """

    def __init__(self, depth: int):
        self._averages = _Averages(RULE.longest + 1, {0: _UNKNOWN_PRIOR, RULE.shortest: _COPY_PRIOR})
        self._steps = np.arange(depth)

    @property
    def averages(self) -> np.ndarray:
        """Probability that a copied token is accepted. [modes, longest + 1]"""
        return self._averages.get()

    def of(self, modes: np.ndarray, matches: np.ndarray) -> np.ndarray:
        """Return s_ik [n, depth] of k = 1 .. depth, 0 without a match, for modes and matches [n]."""
        lengths = np.minimum(matches[:, None] + self._steps, RULE.longest)
        return self._averages.get()[modes[:, None], lengths].cumprod(axis=1) * (matches > 0)[:, None]

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
        lengths = np.minimum(matches[:, None] + self._steps, RULE.longest)
        cells = modes[:, None] * (RULE.longest + 1) + lengths
        self._averages.learn(cells[is_seen], (self._steps < right[:, None])[is_seen])
