"""Rules for the drafted tokens that the next verify takes, as pure functions of numbers.

A block is an anchor and K drafted tokens behind it. A cycle verifies the anchor and the first L_i drafted
tokens of each request. It accepts them up to the first rejection and adds one token of the target. L_i = 0 is
a plain decode step of that request.

n: decoding requests. s_ik: probability that drafted tokens 1 .. k of request i are all accepted. [n, K]

With own lengths the slots of all requests compete: a cycle has a budget of rows, and the slots with the
largest s_ik fill it. s falls along a request, so what is taken of one is a prefix. Budgets, and numbers of
requests that are drafted for, are compared by tokens per second. Equal lengths are compared as well: unequal
ones cost more than their rows.
"""

from typing import NamedTuple

import numpy as np

from sglang_dflash.srt.speculative.cycle.plan import Requests, Work
from sglang_dflash.srt.speculative.width.estimates import KNOWN, AcceptanceEstimate, CopyEstimate, CostTable

# Numbers of requests to draft for, as shares of all.
_SHARES = np.linspace(0, 1, 9)


def choose_lengths(
    prefix_accept_prob: np.ndarray,
    is_free: np.ndarray,
    verify: np.ndarray,
    draft: np.ndarray,
    ragged_overhead: float = 0.0,
) -> tuple[np.ndarray, float, float]:
    """Choose how many drafted tokens of each request to verify.

    Draft for the m requests that may gain most, and take the best slots of these, for every m and number of
    slots.

    Args:
        prefix_accept_prob: s_ik, 0 for slots that must not be verified. [n, K]
        is_free: requests whose blocks take no draft forward. [n] bool
        verify: seconds of a verify with j drafted tokens in all, j = 0 .. n K.
        draft: seconds of drafting for m requests, m = 0 .. n.
        ragged_overhead: further seconds of a cycle whose lengths differ.

    Returns:
        Lengths L_i [n]; tokens that the cycle is expected to commit; its seconds.
    """
    n, max_draft_tokens = prefix_accept_prob.shape
    order = np.argsort(-prefix_accept_prob, axis=None, kind="stable")  # equals by position, not by request
    slots, request = prefix_accept_prob.ravel()[order], order // max_draft_tokens
    num_free = int(is_free.sum())
    sizes = np.unique(np.rint(_SHARES * (n - num_free)).astype(int))
    all_may = int((prefix_accept_prob > 0).all(axis=0).sum())  # s falls along a request
    length_of_all = np.arange(all_may + 1)  # if the lengths are equal
    tokens_of_all = np.concatenate(([float(n)], prefix_accept_prob.sum(axis=0))).cumsum()[length_of_all]
    seconds_of_all = verify[n * length_of_all] + np.where(length_of_all > 0, draft[n - num_free], 0.0)
    best = int(np.argmax(tokens_of_all / seconds_of_all))
    worth = prefix_accept_prob.sum(axis=1) + np.where(is_free, max_draft_tokens, 0)
    rank = np.empty(n, dtype=int)
    rank[np.argsort(-worth, kind="stable")] = np.arange(n)
    taken = (rank[request] < num_free + sizes[:, None]) & (slots > 0)
    tokens = n + (slots * taken).cumsum(axis=1)
    seconds = verify[taken.cumsum(axis=1)] + draft[sizes][:, None] + ragged_overhead
    row, last = np.unravel_index(np.argmax(tokens / seconds), tokens.shape)
    if tokens[row, last] * seconds_of_all[best] <= tokens_of_all[best] * seconds[row, last] * (1 + 1e-9):
        return np.full(n, best), float(tokens_of_all[best]), float(seconds_of_all[best])
    lengths = np.bincount(request[: last + 1][taken[row, : last + 1]], minlength=n)
    return lengths, float(tokens[row, last]), float(seconds[row, last])


# Cycles from one trial of unknown costs to the next, for each request beside the first.
_TRIAL_EVERY = 2
# A choice without copies is for so many cycles of an unchanged batch. On a CPU choosing takes a millisecond,
# and a decode step 15 to 50.
HOLD = 4


class Choice(NamedTuple):
    """A decision for n requests, and what it expects."""

    lengths: np.ndarray  # drafted tokens to verify. [n]
    copies: np.ndarray  # which requests verify a copy instead. [n] bool
    tokens: float  # committed by the cycle, of all requests
    seconds: float
    num_cycles: int = 1  # of an unchanged batch that it is for


class LengthChooser:
    """Chooses verify lengths from costs and from what was accepted.

    Args:
        costs: of a cycle. Its verify lengths are the candidates; the largest is the most a request verifies.
        num_rows: of the request table.
        probe_share: share of the time that probes may cost.
        skips_draft: whether a copy may be verified without running the draft.

    Attributes:
        drafts: what is known of the acceptance of drafted tokens.
        copies: what is known of the acceptance of copied tokens.
        max_draft_tokens: K, most drafted tokens to verify of a request.
        num_probes: blocks or cycles that were verified to learn.
    """

    def __init__(self, costs: CostTable, num_rows: int, probe_share: float = 0.005, skips_draft: bool = True):
        self.costs, self.max_draft_tokens = costs, int(costs.verify_lens[-1]) - 1
        self.drafts = AcceptanceEstimate(num_rows, self.max_draft_tokens)
        self.copies = CopyEstimate(self.max_draft_tokens)
        self.num_rows, self._probe_share, self._skips_draft = num_rows, probe_share, skips_draft
        self._turn = self.num_probes = self._cycles_without_choice = self._cycles_without_trial = 0
        self._has_probed = False  # in the latest choice
        self._credit = 0.0  # seconds that probes may cost

    def choose(self, requests: Requests, further: int, matches: np.ndarray, caps: np.ndarray) -> Choice:
        """Return a choice or a probe for the next cycles.

        Args:
            requests: of the batch.
            further: committed tokens of all requests beyond those that costs were measured with.
            matches: lengths of the requests' matches, 0 without one, or `UNKNOWN_MATCH`. [n]
            caps: most drafted tokens that each request may accept. [n]
        """
        self.count_cycle()
        caps = np.minimum(caps, self.max_draft_tokens)
        choice = self._decide(requests, further, matches, caps)
        if not choice.copies.any():
            choice = choice._replace(num_cycles=HOLD)
        self._credit += self._probe_share * self._cycles_without_choice * choice.seconds
        self._cycles_without_choice = 0
        probe = choice if self._has_probed else self._probe(choice, requests.rows, further, caps)
        # Costs are corrected by comparison with the cycles beside a probe, so these must be others.
        self._has_probed = probe is not choice
        return probe

    def count_cycle(self) -> None:
        """Count a cycle, whether or not it is chosen anew."""
        self._cycles_without_choice += 1
        self._cycles_without_trial += 1

    def _decide(self, requests: Requests, further: int, matches: np.ndarray, caps: np.ndarray) -> Choice:
        n, modes = len(requests.rows), requests.modes
        verify, draft = self.costs.verify(n, further), self.costs.draft(n)
        is_allowed = np.arange(self.max_draft_tokens) < caps[:, None]
        prefix_accept_prob = np.where(is_allowed, self.drafts.prefix_accept_probs(requests.rows, modes), 0.0)
        copies = np.zeros(n, dtype=bool)
        if matches.any():
            copied = np.where(is_allowed, self.copies.prefix_accept_probs(modes, matches), 0.0)
            # What the draft of a request costs, in tokens of a cycle at this price.
            price = draft[-1] / verify[0] if self._skips_draft else 0.0
            worth, drafted = copied.sum(axis=1), prefix_accept_prob.sum(axis=1)
            copies = (worth > 0) & (worth >= drafted - price)
            prefix_accept_prob = np.where(copies[:, None], copied, prefix_accept_prob)
        is_free = copies & self._skips_draft
        ragged_overhead = self.costs.ragged_overhead(n)
        lengths, tokens, seconds = choose_lengths(
            prefix_accept_prob, is_free=is_free, verify=verify, draft=draft, ragged_overhead=ragged_overhead
        )
        return Choice(lengths, copies & (lengths > 0), tokens, seconds)

    def work(self, choice: Choice, further: int = 0) -> Work:
        """Return what a cycle of this choice does, with so many further committed tokens."""
        lengths, is_drafted = choice.lengths, choice.lengths > 0
        if self._skips_draft:
            is_drafted = is_drafted & ~choice.copies
        is_ragged = bool((lengths != lengths[0]).any())
        return Work(
            requests=len(lengths),
            verified=int(lengths.sum()),
            drafted_for=int(is_drafted.sum()),
            is_ragged=is_ragged,
            further=further,
        )

    def _probe(self, choice: Choice, rows: np.ndarray, further: int, most: np.ndarray) -> Choice:
        """Return the choice or, to learn what it costs and brings, something else.

        The narrowest cycle takes turns with a whole block of one more request, as far as `probe_share` of the
        time pays. While the costs of one are not known, that one is tried, more seldom with more requests.
        Requests verify at most `most` drafted tokens. [n]
        """
        n = len(rows)
        is_short = (choice.lengths < most) & ~choice.copies
        narrowest = np.minimum(most, self.costs.verify_lens[0] - 1)
        widest = np.where(is_short, most, choice.lengths)
        distance = np.where(is_short, (rows - self._turn) % self.num_rows, self.num_rows)
        wider = np.where(np.arange(n) == distance.argmin(), widest, choice.lengths)
        kinds = [choice._replace(lengths=lengths, num_cycles=1) for lengths in (narrowest, wider)]
        tries = [self.costs.tries(self.work(kind)) for kind in kinds]
        is_turn = bool(self.num_probes % 2) or not is_short.any()
        is_new = min(tries) < KNOWN and self._cycles_without_trial >= _TRIAL_EVERY * (n - 1)
        if is_new:
            probe = kinds[int(np.argmin(tries))]
        elif is_turn and (choice.lengths > narrowest).any():
            probe = kinds[0]
        else:
            probe = kinds[1]
        if not self._probe_share or (probe.lengths == choice.lengths).all():
            return choice
        seconds = self.costs.expected(self.work(probe, further))
        tokens = n if probe is kinds[0] else choice.tokens  # at least
        price = 0.0 if is_new else max(seconds - choice.seconds * tokens / choice.tokens, 0.0)
        self._credit = min(self._credit, max(price, 3 * choice.seconds))
        if self._credit < price:
            return choice
        self._credit -= price
        self.num_probes += 1
        self._cycles_without_trial *= not is_new
        if probe.lengths is wider:
            self._turn = int(rows[(wider > choice.lengths).argmax()]) + 1
        return probe._replace(seconds=seconds)
