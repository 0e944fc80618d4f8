"""Widths for the sake of copies: estimates of their own, and a choice in each cycle.

The policy of the draft is slow on purpose. Copies come and go with the text, so the cycle decides anew.
"""

import numpy as np

from sglang_dflash.kernels.ops.speculative.copy_ahead import RULE
from sglang_dflash.srt.speculative.width.chooser import Choice
from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import MODES, logit, sigmoid

# Of the shortest match, before any label; how much better each longer one is expected to be, in logits.
_PRIOR, _PRIOR_WEIGHT, _BETTER_WHEN_LONGER = 0.5, 4.0, 0.25
# In place of a length, which is never so small: the host expects no match, but there may be one.
_UNKNOWN, _PRIOR_UNKNOWN = 1, 0.1
_GAIN = 1.03  # least gain of speed for which a cycle leaves the width chosen for the draft


class CopyEstimate:
    """Probability that a copied token is accepted, by sampling mode and length of its match.

    Each accepted token makes the match longer by one. So one number per length says how long copies last, and
    a plain cycle teaches it as well as a verified block: it compares one copied token with the emitted one.

    It is an average over about the last `memory` labels. A length with few labels is expected to do better
    than the next shorter one. Matches of `RULE.longest` tokens or more are alike.

    depth: drafted tokens of a block.
    """

    def __init__(self, depth: int, memory: float = 300.0):
        self._depth, self._remember = depth, 1 - 1 / memory
        self._labelled = np.zeros((len(MODES), RULE.longest + 1))
        self._accepted = np.zeros_like(self._labelled)
        self._tokens: np.ndarray | None = None

    def averages(self) -> np.ndarray:
        """Return the probability per mode and length; 0 without a match. [modes, longest + 1]"""
        averages = np.zeros_like(self._labelled)
        expected: np.ndarray | float = _PRIOR_UNKNOWN
        for length in range(_UNKNOWN, RULE.longest + 1):
            if _UNKNOWN < length <= RULE.shortest:
                expected = _PRIOR
            labelled, accepted = self._labelled[:, length], self._accepted[:, length]
            average = (accepted + _PRIOR_WEIGHT * expected) / (labelled + _PRIOR_WEIGHT)
            averages[:, length] = average
            expected = sigmoid(logit(np.clip(average, 1e-3, 1 - 1e-3)) + _BETTER_WHEN_LONGER)
        return averages

    def tokens(self, modes: np.ndarray, matches: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """Return the expected tokens of a cycle per request and width. [n, W]

        modes, matches: as of `learn`. [n]
        """
        if self._tokens is None:
            lengths = np.arange(RULE.longest + 1)[:, None] + np.arange(self._depth)
            survival = self.averages()[:, np.minimum(lengths, RULE.longest)]
            survival[:, 0] = 0.0
            steps = np.concatenate((np.ones_like(survival[..., :1]), survival.cumprod(axis=-1)), axis=-1)
            self._tokens = steps.cumsum(axis=-1)
        return self._tokens[modes, matches][:, widths - 1]

    def learn(self, modes: np.ndarray, matches: np.ndarray, accepted: np.ndarray, compared: int) -> None:
        """Learn from copies.

        Args:
            modes: of `MODES`. [n]
            matches: length of the match before each copy. [n]
            accepted: tokens of each copy before the first that was wrong. [n]
            compared: tokens of each copy that were compared with the target's.
        """
        position = np.arange(compared)
        is_labelled = position <= accepted[:, None]
        lengths = np.minimum(matches[:, None] + position, RULE.longest)
        cells = (modes[:, None] * (RULE.longest + 1) + lengths)[is_labelled]
        is_accepted = (position < accepted[:, None])[is_labelled]
        size, shape = self._labelled.size, self._labelled.shape
        labelled, kept = (np.bincount(c, minlength=size).reshape(shape) for c in (cells, cells[is_accepted]))
        faded = self._remember**labelled
        self._labelled = faded * self._labelled + labelled
        self._accepted = faded * self._accepted + kept
        self._tokens = None


class CopyWidths:
    """Widens cycles in which copies are worth it, with the draft or without.

    The host knows the matches of the next cycle if it reads them from the device, as on a CPU. Elsewhere it
    expects a copy to go on that was right in the latest cycle it knows. So the estimate is of what a match
    yields that the host expects, and of what a request yields that it expects none of.

    Args:
        costs: names the candidates.
        num_rows: of the request table.
        depth: drafted tokens of a block.
        skips_draft: whether a cycle may verify copies without running the draft.
    """

    def __init__(self, costs: CostTable, num_rows: int, depth: int, skips_draft: bool):
        self._costs, self._skips_draft = costs, skips_draft
        self.estimate = CopyEstimate(depth)
        self._expected = np.full(num_rows, _UNKNOWN)

    def reset(self, rows: np.ndarray) -> None:
        """Start new requests in these rows."""
        self._expected[rows] = _UNKNOWN

    def expected_matches(self, rows: np.ndarray) -> np.ndarray:
        """Return the lengths of the next cycle's matches as far as results tell. rows: [n] -> [n]"""
        return self._expected[rows]

    def choose(self, choice: Choice, modes: np.ndarray, matches: np.ndarray) -> Choice:
        """Return the fastest way to verify copies, or the given choice if that is about as fast.

        A request with a match counts with its copy or with the mean of the drafts, whichever is better.
        Without the draft the others commit one token each, and the cycle takes so much less time.

        Args:
            choice: the width for the draft.
            modes: of `MODES`. [n]
            matches: lengths, 0 without a match. [n]
        """
        if choice.is_probe or not matches.any():
            return choice
        is_match = matches > 0
        copied = self.estimate.tokens(modes[is_match], matches[is_match], self._costs.widths)
        num_others, mean = len(matches) - len(copied), choice.tokens / choice.num_requests
        with_draft = num_others * mean + np.maximum(copied, mean).sum(axis=0)
        options = [(with_draft, choice.seconds, True)]
        if self._skips_draft:
            seconds = choice.seconds * (1 - self._costs.draft_share(len(matches)))
            options.append((num_others + copied.sum(axis=0), seconds, False))
        wider = slice(choice.index, None)  # the draft's width stays the least
        tokens, seconds, drafts = max(options, key=lambda option: (option[0] / option[1])[wider].max())
        index = choice.index + int((tokens / seconds)[wider].argmax())
        present_speed = with_draft[choice.index] / choice.seconds[choice.index]
        if tokens[index] < _GAIN * present_speed * seconds[index]:
            return choice
        return Choice(
            len(matches), int(self._costs.widths[index]), index, False, tokens, seconds, drafts=drafts
        )

    def on_accept_lens(
        self,
        rows: np.ndarray,
        modes: np.ndarray,
        matches: np.ndarray,
        lengths: np.ndarray,
        num_drafted: int,
        accepted: np.ndarray,
    ) -> None:
        """Learn from a cycle, and note which copies go on.

        Args:
            rows: of the request table. [n]
            modes: of `MODES`. [n]
            matches: as `choose` was given them. [n]
            lengths: of `Proposals`. [n]
            num_drafted: proposed tokens that were verified of each request.
            accepted: of these. [n]
        """
        compared = max(num_drafted, 1)
        num_right = np.where(lengths > 0, accepted if num_drafted else 1, 0)
        # A match that was passed over for the draft shows nothing.
        learns = (matches > 0) & ((lengths >= 0) | (num_drafted == 0))
        if learns.any():
            self.estimate.learn(modes[learns], matches[learns], num_right[learns], compared)
        goes_on = np.minimum(lengths + compared, RULE.longest)
        self._expected[rows] = np.where(num_right == compared, goes_on, _UNKNOWN)

    def report(self) -> dict[str, list[float]]:
        """Return accept probabilities for /server_info, by mode, after matches of 3, 4, .. tokens."""
        averages = self.estimate.averages()[:, RULE.shortest :].round(3)
        return dict(zip(MODES, averages.tolist(), strict=True))
