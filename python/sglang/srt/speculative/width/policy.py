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

from sglang_dflash.srt.speculative.cycle.plan import BatchRequests, CycleWork
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
# Cycles that a choice without copies lasts in an unchanged batch. On a CPU choosing takes a millisecond,
# and a decode step 15 to 50.
HOLD = 4


class Choice(NamedTuple):
    """A decision for n requests, and what it expects."""

    lengths: np.ndarray  # drafted tokens to verify. [n]
    copies: np.ndarray  # which requests verify a copy instead. [n] bool
    tokens: float  # committed by the cycle, of all requests
    seconds: float
    num_cycles: int = 1  # of an unchanged batch that it is for
    draft_slots: int = 0  # of each block. 0: all


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
        narrow_slots = [0, *costs.draft_slots.tolist()][-2]
        self.drafts = AcceptanceEstimate(num_rows, self.max_draft_tokens, narrow_slots)
        self.copies = CopyEstimate(self.max_draft_tokens)
        self.num_rows, self._probe_share, self._skips_draft = num_rows, probe_share, skips_draft
        self._turn = self.num_probes = self._cycles_without_choice = self._cycles_without_trial = 0
        self._has_probed = False  # in the latest choice
        self._credit = 0.0  # seconds that probes may cost

    def choose(
        self, requests: BatchRequests, extra_context: int, matches: np.ndarray, caps: np.ndarray
    ) -> Choice:
        """Return a choice or a probe for the next cycles.

        Args:
            requests: of the batch.
            extra_context: committed tokens of all requests beyond those that costs were measured with.
            matches: lengths of the requests' matches, 0 without one, or `UNKNOWN_MATCH`. [n]
            caps: most drafted tokens that each request may accept. [n]
        """
        self.count_cycle()
        caps = np.minimum(caps, self.max_draft_tokens)
        choice, *others = self._decide(requests, extra_context, matches, caps)
        if not choice.copies.any():
            choice = choice._replace(num_cycles=HOLD)
        self._credit += self._probe_share * self._cycles_without_choice * choice.seconds
        self._cycles_without_choice = 0
        probe = choice
        if not self._has_probed:
            probe = self._probe(
                choice, others=others, rows=requests.rows, extra_context=extra_context, caps=caps
            )
        # Costs are corrected by comparison with the cycles beside a probe, so these must be others.
        self._has_probed = probe is not choice
        return probe

    def count_cycle(self) -> None:
        """Count a cycle, whether or not it is chosen anew."""
        self._cycles_without_choice += 1
        self._cycles_without_trial += 1

    def _decide(
        self, requests: BatchRequests, extra_context: int, matches: np.ndarray, caps: np.ndarray
    ) -> list[Choice]:
        """Return the best choice. If nothing is copied, others of other draft widths follow."""
        n, modes = len(requests.rows), requests.modes
        verify, ragged_overhead = self.costs.verify(n, extra_context), self.costs.ragged_overhead(n)
        is_allowed = np.arange(self.max_draft_tokens) < caps[:, None]
        copied = np.zeros(is_allowed.shape)
        if matches.any():
            copied = np.where(is_allowed, self.copies.prefix_accept_probs(modes, matches), 0.0)
        worth, choices = copied.sum(axis=1), []
        for draft_slots in (0, *self.costs.draft_slots[:-1].tolist()):
            draft, is_narrow = self.costs.draft(n, draft_slots), draft_slots > 0
            drafted = self.drafts.prefix_accept_probs(requests.rows, modes, is_narrow)
            drafted = np.where(is_allowed, drafted, 0.0)
            # What the draft of a request costs, in tokens of a cycle at this price.
            price = draft[-1] / verify[0] if self._skips_draft else 0.0
            copies = (worth > 0) & (worth >= drafted.sum(axis=1) - price)
            lengths, tokens, seconds = choose_lengths(
                np.where(copies[:, None], copied, drafted),
                is_free=copies & self._skips_draft,
                verify=verify,
                draft=draft,
                ragged_overhead=ragged_overhead,
            )
            copies &= lengths > 0
            choices.append(
                Choice(lengths, copies=copies, tokens=tokens, seconds=seconds, draft_slots=draft_slots)
            )
            if copies.any():  # a copy fills a whole block, and so does the draft beside it
                return choices[:1]
        return sorted(choices, key=lambda choice: -choice.tokens / choice.seconds)

    def work(self, choice: Choice, extra_context: int = 0) -> CycleWork:
        """Return what a cycle of this choice does, with `extra_context` more committed tokens."""
        lengths, is_drafted = choice.lengths, choice.lengths > 0
        if self._skips_draft:
            is_drafted = is_drafted & ~choice.copies
        is_ragged = bool((lengths != lengths[0]).any())
        return CycleWork(
            requests=len(lengths),
            verified=int(lengths.sum()),
            drafted_for=int(is_drafted.sum()),
            is_ragged=is_ragged,
            extra_context=extra_context,
            draft_slots=choice.draft_slots,
        )

    def _probe(
        self, choice: Choice, others: list[Choice], rows: np.ndarray, extra_context: int, caps: np.ndarray
    ) -> Choice:
        """Return the choice or, to learn what it costs and brings, something else.

        A whole block of one more request, the cycle with the fewest rows and the `others` take turns, as far
        as `probe_share` of the time pays. While the costs of one are not known, that one is tried, more
        seldom with more requests. Requests verify at most `caps` drafted tokens. [n]
        """
        n = len(rows)
        is_short = (choice.lengths < caps) & ~choice.copies
        narrowest = np.minimum(caps, self.costs.verify_lens[0] - 1)
        widest = np.where(is_short, caps, choice.lengths)
        distance = np.where(is_short, (rows - self._turn) % self.num_rows, self.num_rows)
        wider = np.where(np.arange(n) == distance.argmin(), widest, choice.lengths)
        whole = choice._replace(num_cycles=1, draft_slots=0)
        kinds = [whole._replace(lengths=wider), whole._replace(lengths=narrowest, tokens=n), *others]
        tries = [self.costs.tries(self.work(kind)) for kind in kinds]
        is_new = min(tries) < KNOWN and self._cycles_without_trial >= _TRIAL_EVERY * (n - 1)
        turn = int(np.argmin(tries)) if is_new else self.num_probes % len(kinds)
        in_turn = kinds[turn : turn + 1] if is_new else kinds[turn:] + kinds[:turn]
        unlike = [kind for kind in in_turn if self._differ(kind, choice)]
        if not self._probe_share or not unlike:
            return choice
        probe = unlike[0]
        seconds = self.costs.expected(self.work(probe, extra_context))
        price = 0.0 if is_new else max(seconds - choice.seconds * probe.tokens / choice.tokens, 0.0)
        self._credit = min(self._credit, max(price, 3 * choice.seconds))
        if self._credit < price:
            return choice
        self._credit -= price
        self.num_probes += 1
        self._cycles_without_trial *= not is_new
        if probe.lengths is wider:
            self._turn = int(rows[(wider > choice.lengths).argmax()]) + 1
        return probe._replace(seconds=seconds)

    def _differ(self, one: Choice, other: Choice) -> bool:
        """Return whether two choices verify other rows, or draft blocks of other widths."""
        if (one.lengths != other.lengths).any():
            return True
        return one.draft_slots != other.draft_slots and self.work(one).drafted_for > 0
