"""How likely a drafted token is kept: learned from what verify forwards kept. Numpy; no request's tokens are
looked at.

A verified block labels its drafted tokens: 1 where kept, 0 at the first that was not, none behind it. a_ik is
the probability that token k of request i is kept if those before it are: an average per position and age, and
how the request differs from it. What the draft itself thinks of its tokens says more
(benchmark/results/confidence.md), but too late: the width is chosen before there is a draft, which the
narrowest does without, and on CUDA before the host could read it.

m: how the token was chosen and is judged (MODES): a draw is kept in other cases than an argmax.
"""

import numpy as np

# The target's argmax; its draws against a drafted argmax; rejection of drawn drafts; logits that a grammar or
# a penalty changes.
MODES = ("greedy", "sampled", "drawn", "constrained")

# Of one position, before anything was seen: high, as what is never verified is never learned.
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0
# Standard deviations of doubt that an average gets on top: of two mistakes, verifying too much is the one
# that teaches (Auer et al. 2002). Without it a single request whose first drafts fail by chance stays without
# speculation for long; with a whole one a request whose drafts are hardly worth it gets full blocks too
# often.
_OPTIMISM, _DOUBT_WEIGHT = 0.5, 8.0
# Tokens that a request has put out, from where on it is of that age; how much better than the one before an
# age is hoped to be, in logits.
_AGES, _BETTER_WITH_AGE = np.array([0, 16, 64]), 0.5
_NUM_GROUPS = len(MODES) * len(_AGES)
# A request's own deviation, in logits: prior precision, memory in cycles (1 / (1 - 0.94)), bound.
_OWN_PRECISION, _OWN_DECAY, _OWN_LIMIT = 10.0, 0.94, 1.5


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _logit(p: np.ndarray) -> np.ndarray:
    return np.log(p) - np.log1p(-p)


class Own:
    """How each request differs from the average, in logits: one damped Newton step from none, g = S1 / (S2 +
    10), where S1 sums label - a and S2 a (1 - a) over the request's latest labels."""

    def __init__(self, slots: int):
        self._surprise = np.zeros(slots)
        self._information = np.zeros(slots)

    def reset(self, slots: np.ndarray) -> None:
        self._surprise[slots] = self._information[slots] = 0.0

    def of(self, slots: np.ndarray) -> np.ndarray:
        return np.clip(
            self._surprise[slots] / (self._information[slots] + _OWN_PRECISION), -_OWN_LIMIT, _OWN_LIMIT
        )

    def learn(self, slots: np.ndarray, surprise: np.ndarray, information: np.ndarray) -> None:
        """What cycles add to S1 and S2, oldest first: [cycles, n]."""
        weights = _OWN_DECAY ** np.arange(len(surprise))[::-1]
        for sums, new in ((self._surprise, surprise), (self._information, information)):
            sums[slots] = _OWN_DECAY ** len(new) * sums[slots] + weights @ new


class SurvivalEstimate:
    """a_ik = sigmoid(logit(b_mgk) + g_i): b an average over about the last `memory` labels of its position
    plus half a standard deviation sqrt(b (1 - b) / labels), g_i `Own`.

    g: which of `_AGES` request i has reached. The first tokens of an answer are kept less often than later
    ones, so many requests that began together say little of how they go on. Of an age not seen yet it is
    hoped that it does better than the one before.

    A position that was not verified for long keeps its average but forgets how sure it was of it, so that a
    few probes are believed: its weight halves every `forgets_after` cycles down to `least_weight`.

    slots: rows of the request table, which tell requests apart. depth: K, drafted tokens of a block.
    """

    def __init__(
        self,
        slots: int,
        depth: int,
        memory: float = 300.0,
        forgets_after: float = 200.0,
        least_weight: float = 12.0,
    ):
        self.depth = depth
        self._kept = np.zeros((len(MODES), len(_AGES), depth))
        self._seen = np.zeros_like(self._kept)
        self._put_out = np.zeros(slots, dtype=np.int64)
        self._own = Own(slots)
        self._remember, self._forget, self._least_weight = (
            1 - 1 / memory,
            0.5 ** (1 / forgets_after),
            least_weight,
        )
        self._update()
        self._guess = float(self._hopeful[0, 0])  # a_ik before anything was seen

    def _groups(self, put_out: np.ndarray, modes: np.ndarray) -> np.ndarray:
        """Of requests that have put out so many tokens, m and g as one number. [.., n]"""
        return modes * len(_AGES) + (put_out[..., None] >= _AGES[1:]).sum(axis=-1)

    def is_guessed(self, modes: np.ndarray) -> np.ndarray:
        """Of which requests nothing is known to speak of, [n] bool: their mode has fewer labels than requests
        here (and than are never forgotten), so that one block of theirs says more than all that was seen,
        which may be the server's own warm-up."""
        requests = np.bincount(modes, minlength=len(MODES))
        return (self._seen[..., 0].sum(axis=1) < np.minimum(requests, self._least_weight))[modes]

    def averages(self, mode: int) -> dict[int, np.ndarray]:
        """b_mgk without the doubt, [K], by the tokens from which on a request is of that age. What was hardly
        ever verified is taken for as good as the position before it."""
        self._update()
        return dict(zip(_AGES.tolist(), self._averages[mode], strict=True))

    def _update(self) -> None:
        averages = np.empty_like(self._kept)  # b_mgk
        before = np.full(len(MODES), _PRIOR)
        for k in range(self.depth):
            before = (self._kept[:, 0, k] + _PRIOR_WEIGHT * before) / (self._seen[:, 0, k] + _PRIOR_WEIGHT)
            averages[:, 0, k] = before
        for age in range(1, len(_AGES)):
            hoped = sigmoid(_logit(averages[:, age - 1]) + _BETTER_WITH_AGE)
            averages[:, age] = (self._kept[:, age] + _PRIOR_WEIGHT * hoped) / (
                self._seen[:, age] + _PRIOR_WEIGHT
            )
        self._averages = averages = np.clip(averages, 1e-3, 1 - 1e-3)
        variance = averages * (1 - averages)
        hopeful = np.minimum(
            averages + _OPTIMISM * np.sqrt(variance / (self._seen + _DOUBT_WEIGHT)), 1 - 1e-3
        )
        by_group = _NUM_GROUPS, self.depth
        self._hopeful = hopeful.reshape(by_group)
        # Of positions 0 .. k: what `Own` is told of a request that kept k tokens.
        self._expected, self._information = (
            of.cumsum(axis=2).reshape(by_group) for of in (averages, variance)
        )

    def accept_probs(self, slots: np.ndarray, modes: np.ndarray) -> np.ndarray:
        """a_ik of the next cycle, [n, K]. slots, modes: [n]."""
        self._update()
        base = self._hopeful[self._groups(self._put_out[slots], modes)]
        probs = sigmoid(_logit(base) + self._own.of(slots)[:, None])
        probs[self.is_guessed(modes)] = self._guess
        return probs

    def reset(self, slots: np.ndarray, put_out: np.ndarray | int = 0) -> None:
        """These rows hold new requests, which have put out so many tokens (more than none where one was
        retracted)."""
        self._own.reset(slots)
        self._put_out[slots] = put_out

    def learn(self, slots: np.ndarray, modes: np.ndarray, drafted: int, accepted: np.ndarray) -> None:
        """Cycles have each verified `drafted` tokens of each of these requests and kept `accepted`, oldest
        first: [cycles, n]."""
        cycles, put_out = len(accepted), self._put_out[slots] + (accepted + 1).cumsum(axis=0)
        self._put_out[slots] = put_out[-1]
        if drafted == 0 or not len(slots):
            return
        groups = self._groups(put_out - accepted - 1, modes)
        last = np.minimum(accepted, drafted - 1)  # labelled position
        self._own.learn(slots, accepted - self._expected[groups, last], self._information[groups, last])
        # [t, m, g, k]: requests that kept k tokens or more. Those have a label at position k; those of [.., k
        # + 1] kept it.
        cells = (np.arange(cycles)[:, None] * _NUM_GROUPS + groups) * (drafted + 1) + accepted
        outcomes = np.bincount(cells.ravel(), minlength=cycles * _NUM_GROUPS * (drafted + 1))
        at_least = outcomes.reshape(cycles, *self._seen.shape[:2], drafted + 1)[..., ::-1].cumsum(axis=-1)[
            ..., ::-1
        ]
        seen, kept = at_least[..., :drafted], at_least[..., 1:]
        from_here = seen[::-1].cumsum(axis=0)[::-1]  # a label fades with each later one of its position
        faded = self._remember ** (from_here - seen)
        for counts, new in ((self._seen, seen), (self._kept, kept)):
            counts[..., :drafted] = self._remember ** from_here[0] * counts[..., :drafted] + (
                faded * new
            ).sum(axis=0)

    def age(self, cycles: int = 1) -> None:
        """Cycles have passed: the weight of what was seen fades, its average does not."""
        weight = np.maximum(self._seen * self._forget**cycles, np.minimum(self._seen, self._least_weight))
        with np.errstate(invalid="ignore", divide="ignore"):
            self._kept *= np.where(self._seen > 0, weight / self._seen, 1.0)
        self._seen = weight
