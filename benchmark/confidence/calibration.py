"""How likely a drafted token is kept, by what the draft itself thinks of its tokens: measured by measure.py
against `speculative/width/estimates.py`, which does not ask the draft."""

import numpy as np

from sglang_dflash.srt.speculative.width.estimates import MODES, Own, sigmoid


def labels(accepted: np.ndarray, drafted: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """What a verify of `drafted` tokens a request says about a block of `depth`: (is_labelled, is_kept), [n,
    depth] bool. accepted: [n], drafted tokens kept."""
    position = np.arange(depth)
    kept = position < accepted[:, None]
    return (position <= accepted[:, None]) & (position < drafted), kept


class ConfidenceCalibration:
    """a_ik = sigmoid(w_m x_ik + b_mk + g_i), x the draft's confidence: the logit of its probability for the
    token it proposes, bounded to +-40, at the temperature the draft used.

    Every `_EVERY` cycles one damped Newton step on the labels since the last, for w and all b at once. With W
        = a (1 - a) summed per position, c = sum W + 1e-3, d = sum W x, h = sum (y - a): dw = [sum (y - a) x -
        sum_k d_k h_k / c_k] / [sum W x^2 + 1e-3 - sum_k d_k^2 / c_k] * N / (N + 64) db_k = (h_k - d_k dw) /
        c_k * n_k / (n_k + 64)
    the block elimination of a Hessian whose b part is diagonal; N, n_k labels in all and of the position; w
    stays >= 0."""

    _EVERY, _LIMIT, _DAMPING = 100, 40.0, 64.0

    def __init__(self, slots: int, depth: int):
        self.depth = depth
        self.weight = np.full(len(MODES), 0.5)
        self.bias = np.zeros((len(MODES), depth))
        self._own = Own(slots)
        # Per mode: sum (y - a) x, sum W x^2; per position: c, d, h, n.
        self._sums = np.zeros((len(MODES), 2))
        self._position_sums = np.zeros((len(MODES), 4, depth))
        self._cycles = 0

    def _base(self, modes: np.ndarray, confidence: np.ndarray) -> np.ndarray:
        x = np.clip(confidence, -self._LIMIT, self._LIMIT)
        return self.weight[modes][:, None] * x + self.bias[modes]

    def accept_probs(self, slots: np.ndarray, modes: np.ndarray, confidence: np.ndarray) -> np.ndarray:
        """[n, K], of blocks whose drafts are known already. confidence: [n, K]."""
        return sigmoid(self._base(modes, confidence) + self._own.of(slots)[:, None])

    def reset(self, slots: np.ndarray) -> None:
        self._own.reset(slots)

    def learn(
        self, slots: np.ndarray, modes: np.ndarray, drafted: int, accepted: np.ndarray, confidence: np.ndarray
    ) -> None:
        is_labelled, is_kept = labels(accepted, drafted, self.depth)
        x = np.clip(confidence, -self._LIMIT, self._LIMIT)
        base = self._base(modes, confidence)
        own = self._own.of(slots)[:, None]
        average = sigmoid(base)
        surprise = np.where(is_labelled, is_kept - average, 0).sum(axis=1)
        self._own.learn(
            slots, surprise[None], np.where(is_labelled, average * (1 - average), 0).sum(axis=1)[None]
        )
        a = sigmoid(base + own)
        residual, weight = np.where(is_labelled, is_kept - a, 0), np.where(is_labelled, a * (1 - a), 0)
        for mode in np.unique(modes):
            rows = modes == mode
            self._sums[mode] += (residual * x)[rows].sum(), (weight * x**2)[rows].sum()
            per_position = weight, weight * x, residual, is_labelled
            self._position_sums[mode] += np.stack([values[rows].sum(axis=0) for values in per_position])
        self._cycles += 1
        if self._cycles % self._EVERY == 0:
            self._step()

    def _step(self) -> None:
        for mode in range(len(MODES)):
            (gradient, curvature), (c, d, h, n) = self._sums[mode], self._position_sums[mode]
            count, c = n.sum(), c + 1e-3
            if count:
                step = (gradient - (d * h / c).sum()) / max(curvature + 1e-3 - (d * d / c).sum(), 1e-3)
                step *= count / (count + self._DAMPING)
                step = max(step, -self.weight[mode])
                self.weight[mode] += step
                self.bias[mode] += (h - d * step) / c * n / (n + self._DAMPING)
        self._sums[:] = self._position_sums[:] = 0.0
