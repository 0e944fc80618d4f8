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

import numpy as np

# Numbers of requests to draft for, as shares of all.
_SHARES = np.linspace(0, 1, 9)


def choose_lengths(
    survival: np.ndarray, is_free: np.ndarray, verify: np.ndarray, draft: np.ndarray, uneven: float = 0.0
) -> tuple[np.ndarray, float, float]:
    """Choose how many drafted tokens of each request to verify.

    Draft for the m requests that may gain most, and take the best slots of these, for every m and number of
    slots.

    Args:
        survival: s_ik, 0 for slots that must not be verified. [n, K]
        is_free: requests whose blocks take no draft forward. [n] bool
        verify: seconds of a verify with j drafted tokens in all, j = 0 .. n K.
        draft: seconds of drafting for m requests, m = 0 .. n.
        uneven: further seconds of a cycle whose lengths differ.

    Returns:
        Lengths L_i [n]; tokens that the cycle is expected to commit; its seconds.
    """
    n, depth = survival.shape
    order = np.argsort(-survival, axis=None, kind="stable")  # equals by position, not by request
    slots, request = survival.ravel()[order], order // depth
    num_free = int(is_free.sum())
    sizes = np.unique(np.rint(_SHARES * (n - num_free)).astype(int))
    all_may = int((survival > 0).all(axis=0).sum())  # s falls along a request
    widths = np.arange(1, all_may + 2)
    width, tokens_of_all, seconds_of_all = choose_width(survival, widths, verify, float(draft[n - num_free]))
    worth = survival.sum(axis=1) + np.where(is_free, depth, 0)
    rank = np.empty(n, dtype=int)
    rank[np.argsort(-worth, kind="stable")] = np.arange(n)
    taken = (rank[request] < num_free + sizes[:, None]) & (slots > 0)
    tokens = n + (slots * taken).cumsum(axis=1)
    seconds = verify[taken.cumsum(axis=1)] + draft[sizes][:, None] + uneven
    row, last = np.unravel_index(np.argmax(tokens / seconds), tokens.shape)
    if tokens[row, last] * seconds_of_all <= tokens_of_all * seconds[row, last] * (1 + 1e-9):
        return np.full(n, width - 1), tokens_of_all, seconds_of_all
    lengths = np.bincount(request[: last + 1][taken[row, : last + 1]], minlength=n)
    return lengths, float(tokens[row, last]), float(seconds[row, last])


def choose_width(
    survival: np.ndarray, widths: np.ndarray, verify: np.ndarray, draft: float
) -> tuple[int, float, float]:
    """Choose one number of slots for all requests, the anchor included.

    The same rule with equal lengths.

    Args:
        survival: s_ik. [n, K]
        widths: candidates, ascending. [W]
        verify: seconds of a verify with j drafted tokens in all, j = 0 .. n K.
        draft: seconds of drafting for all.

    Returns:
        The width; tokens that the cycle is expected to commit; its seconds.
    """
    n = len(survival)
    tokens = np.concatenate(([float(n)], survival.sum(axis=0))).cumsum()[widths - 1]
    seconds = verify[n * (widths - 1)] + np.where(widths > 1, draft, 0.0)
    best = int(np.argmax(tokens / seconds))
    return int(widths[best]), float(tokens[best]), float(seconds[best])
