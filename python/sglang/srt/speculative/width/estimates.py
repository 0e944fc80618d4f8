"""Probability that a drafted token is accepted, learned from accept lengths. Numpy.

A verified block labels its drafted tokens: 1 if accepted, 0 for the first that was not, none after it. a_ik
is the probability that token k of request i is accepted if those before it are. It is an average per position
and age, plus the request's deviation. The draft's own confidence would say more
(benchmark/results/confidence.md), but too late: the width is chosen before there is a draft, which width 1
does without, and on CUDA before the host could read it.

m: how the token was chosen and is judged (MODES). A draw is accepted in other cases than an argmax.
"""

import numpy as np

# The target's argmax; its draws compared with a drafted argmax; rejection of drawn drafts; logits that a
# grammar or a penalty changes.
MODES = ("greedy", "sampled", "drawn", "constrained")

# Of one position, before any label: high, because what is never verified is never learned.
_PRIOR, _PRIOR_WEIGHT = 0.7, 2.0
# Standard deviations added to an average: of two mistakes, verifying too much is the one that teaches (Auer
# et al. 2002). With 0, a single request whose first drafts fail by chance stays without speculation for long.
# With 1, a request whose drafts are hardly worth it gets full blocks too often.
_OPTIMISM, _OPTIMISM_WEIGHT = 0.5, 8.0
# Emitted tokens at which a request reaches each age; how much better than the previous age one is expected to
# be before any label, in logits.
_AGES, _BETTER_WITH_AGE = np.array([0, 16, 64]), 0.5
_NUM_GROUPS = len(MODES) * len(_AGES)
# A request's own deviation, in logits: prior precision, memory in cycles (1 / (1 - 0.94)), bound.
_DEVIATION_PRECISION, _DEVIATION_DECAY, _DEVIATION_LIMIT = 10.0, 0.94, 1.5


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def logit(p: np.ndarray) -> np.ndarray:
    return np.log(p) - np.log1p(-p)


class SurvivalEstimate:
    """a_ik = sigmoid(logit(b_mgk) + g_i), learned from accept lengths.

    b is an average over about the last `memory` labels of its position, plus half a standard deviation
    sqrt(b (1 - b) / labels). g: which of `_AGES` request i has reached. The first tokens of an answer are
    accepted less often than later ones, so many requests that began together say little about their later
    tokens. An age without labels is expected to do better than the previous one.

    g_i is the request's deviation: one damped Newton step from zero, S1 / (S2 + 10), where S1 sums label - a
    and S2 a (1 - a) over the request's latest labels.

    A position that was not verified for long keeps its average but loses weight, so that a few probes are
    believed: its weight halves every `forgets_after` cycles down to `least_weight`.

    num_rows: of the request table. depth: K, drafted tokens of a block.
    """

    def __init__(
        self,
        num_rows: int,
        depth: int,
        memory: float = 300.0,
        forgets_after: float = 200.0,
        least_weight: float = 12.0,
    ):
        self.depth = depth
        self._accepted = np.zeros((len(MODES), len(_AGES), depth))
        self._labelled = np.zeros_like(self._accepted)
        self._num_emitted = np.zeros(num_rows, dtype=np.int64)
        self._surprise, self._information = np.zeros(num_rows), np.zeros(num_rows)  # S1, S2
        self._remember, self._forget = 1 - 1 / memory, 0.5 ** (1 / forgets_after)
        self._least_weight = least_weight
        self._update()
        self._guess = float(self._optimistic[0, 0])  # a_ik before any label

    def _groups(self, num_emitted: np.ndarray, modes: np.ndarray) -> np.ndarray:
        """Return m and g as one number, after so many emitted tokens. [.., n]"""
        return modes * len(_AGES) + (num_emitted[..., None] >= _AGES[1:]).sum(axis=-1)

    def lacks_data(self, modes: np.ndarray) -> np.ndarray:
        """Return which requests have a mode of which hardly anything is known. [n] bool

        Such a mode has fewer labels than requests here (and than are never forgotten). One block of these
        requests then says more than all labels so far, which may be the server's own warm-up.
        """
        requests = np.bincount(modes, minlength=len(MODES))
        return (self._labelled[..., 0].sum(axis=1) < np.minimum(requests, self._least_weight))[modes]

    def averages(self, mode: int) -> dict[int, np.ndarray]:
        """Return b_mgk without the optimism, [K], by the first token of an age.

        A position that was hardly ever verified counts as good as the one before it.
        """
        self._update()
        return dict(zip(_AGES.tolist(), self._averages[mode], strict=True))

    def _update(self) -> None:
        averages = np.empty_like(self._accepted)  # b_mgk
        accepted, weight = self._accepted, self._labelled + _PRIOR_WEIGHT
        previous = np.full(len(MODES), _PRIOR)
        for k in range(self.depth):
            previous = (accepted[:, 0, k] + _PRIOR_WEIGHT * previous) / weight[:, 0, k]
            averages[:, 0, k] = previous
        for age in range(1, len(_AGES)):
            expected = sigmoid(logit(averages[:, age - 1]) + _BETTER_WITH_AGE)
            averages[:, age] = (accepted[:, age] + _PRIOR_WEIGHT * expected) / weight[:, age]
        self._averages = averages = np.clip(averages, 1e-3, 1 - 1e-3)
        variance = averages * (1 - averages)
        optimism = _OPTIMISM * np.sqrt(variance / (self._labelled + _OPTIMISM_WEIGHT))
        by_group = _NUM_GROUPS, self.depth
        self._optimistic = np.minimum(averages + optimism, 1 - 1e-3).reshape(by_group)
        # Sums over positions 0 .. k: what a request that kept k tokens adds to S1 and S2.
        self._expected_sum = averages.cumsum(axis=2).reshape(by_group)
        self._variance_sum = variance.cumsum(axis=2).reshape(by_group)

    def accept_probs(self, rows: np.ndarray, modes: np.ndarray) -> np.ndarray:
        """Return a_ik of the next cycle. rows, modes: [n] -> [n, K]"""
        self._update()
        base = self._optimistic[self._groups(self._num_emitted[rows], modes)]
        deviation = self._surprise[rows] / (self._information[rows] + _DEVIATION_PRECISION)
        bounded = np.clip(deviation, -_DEVIATION_LIMIT, _DEVIATION_LIMIT)
        probs = sigmoid(logit(base) + bounded[:, None])
        probs[self.lacks_data(modes)] = self._guess
        return probs

    def reset(self, rows: np.ndarray, num_emitted: np.ndarray | int = 0) -> None:
        """Start new requests in these rows, which have emitted so many tokens."""
        self._surprise[rows] = self._information[rows] = 0.0
        self._num_emitted[rows] = num_emitted

    def learn(self, rows: np.ndarray, modes: np.ndarray, drafted: int, accepted: np.ndarray) -> None:
        """Learn from cycles that verified `drafted` tokens of each of these requests.

        accepted: tokens that each cycle accepted, oldest first. [cycles, n]
        """
        cycles, num_emitted = len(accepted), self._num_emitted[rows] + (accepted + 1).cumsum(axis=0)
        self._num_emitted[rows] = num_emitted[-1]
        if drafted == 0 or not len(rows):
            return
        groups = self._groups(num_emitted - accepted - 1, modes)
        last = np.minimum(accepted, drafted - 1)  # labelled position
        decay = _DEVIATION_DECAY ** np.arange(cycles)[::-1]
        surprise, information = accepted - self._expected_sum[groups, last], self._variance_sum[groups, last]
        for sums, new in ((self._surprise, surprise), (self._information, information)):
            sums[rows] = _DEVIATION_DECAY**cycles * sums[rows] + decay @ new
        # [t, m, g, k]: requests that accepted k tokens or more. They have a label at position k, and those of
        # [.., k + 1] accepted it.
        cells = (np.arange(cycles)[:, None] * _NUM_GROUPS + groups) * (drafted + 1) + accepted
        outcomes = np.bincount(cells.ravel(), minlength=cycles * _NUM_GROUPS * (drafted + 1))
        outcomes = outcomes.reshape(cycles, *self._labelled.shape[:2], drafted + 1)
        at_least = outcomes[..., ::-1].cumsum(axis=-1)[..., ::-1]
        labelled, is_accepted = at_least[..., :drafted], at_least[..., 1:]
        from_here = labelled[::-1].cumsum(axis=0)[::-1]  # a label fades with each later one of its position
        faded = self._remember ** (from_here - labelled)
        for counts, new in ((self._labelled, labelled), (self._accepted, is_accepted)):
            kept = self._remember ** from_here[0] * counts[..., :drafted]
            counts[..., :drafted] = kept + (faded * new).sum(axis=0)

    def age(self, cycles: int = 1) -> None:
        """Fade the weight of all labels, not their average, after some cycles."""
        labelled = self._labelled
        weight = np.maximum(labelled * self._forget**cycles, np.minimum(labelled, self._least_weight))
        with np.errstate(invalid="ignore", divide="ignore"):
            self._accepted *= np.where(labelled > 0, weight / labelled, 1.0)
        self._labelled = weight
