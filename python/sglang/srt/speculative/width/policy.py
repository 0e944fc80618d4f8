"""How wide the next verify is: the rules, as pure functions of numbers.

A block is an anchor and the drafted tokens behind it. The draft always fills its trained block; a cycle of
width w verifies the anchor and the first w - 1 drafted tokens, keeps those up to the first rejected one and
adds one of the target's own. Width 1 verifies nothing: a plain decode step. All requests of a batch get the
same width.

n: requests that decode. K: drafted tokens of a block. W: candidate widths, ascending, each in 1 .. K + 1.
"""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Constants:
    """free_rows: the widest width is kept where it costs at most so many times what width 1 does.
    indifference: a gain (log of a ratio of speeds) that is not worth moving for.
    patience: gains beyond indifference, summed over cycles, that make the width move.
    dwell: cycles after a move in which another needs four times the evidence.
    probe_share: share of the time that verifying other widths than the best may cost.
    """

    free_rows: float = 1.03
    indifference: float = 0.005
    patience: float = 0.12
    dwell: int = 8
    probe_share: float = 0.005


def survival(accept_probs: np.ndarray) -> np.ndarray:
    """Probability that drafted tokens 1 .. k are all kept: s_k = a_1 a_2 .. a_k.

    accept_probs: [n, K], a_ik, the probability that token k of request i is kept if those before it are.
    Conditional, so that what the kept tokens say about the later ones is in it already (Leviathan et al.
    2022, section 3.1, without their assumption that a is the same at every position)."""
    return np.cumprod(accept_probs, axis=1)


def expected_tokens(accept_probs: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Tokens that one cycle commits over the batch, at each width: sum over requests of 1 + s_1 + .. +
    s_(w-1). [W]"""
    per_slot = np.concatenate(([float(len(accept_probs))], survival(accept_probs).sum(axis=0)))
    return per_slot.cumsum()[np.asarray(widths) - 1]


def never_cheaper_when_wider(seconds: np.ndarray) -> np.ndarray:
    """The nondecreasing row nearest to measured times, least squares: neighbours in the wrong order are
    averaged (pool adjacent violators, Barlow et al. 1972). Verifying more rows cannot take less time, so a
    dip is noise. [W] -> [W]"""
    pools: list[tuple[float, int]] = []
    for value in seconds:
        size = 1
        while pools and pools[-1][0] > value:
            mean, other = pools.pop()
            value, size = (mean * other + value * size) / (other + size), size + other
        pools.append((float(value), size))
    return np.concatenate([np.full(size, value) for value, size in pools])


def best_width(tokens: np.ndarray, seconds: np.ndarray, free_rows: float = Constants.free_rows) -> int:
    """Index of the width with the most tokens per second, over all widths: costs are a staircase, on which
    the first descent is not the way to the top (TensorRT-LLM #17056). Of equals the widest. Where even the
    widest costs hardly more than the narrowest, it is the widest: estimates of acceptance cannot be worth
    more there than what they cost when wrong.

    tokens, seconds: [W], by ascending width.
    """
    if seconds[-1] <= free_rows * seconds[0]:
        return len(seconds) - 1
    speed = tokens / seconds
    return int(np.flatnonzero(speed >= speed.max() * (1 - 1e-9))[-1])


@dataclass(frozen=True)
class Standing:
    """What is kept from one decision to the next. width: an index into the candidates. evidence: [W], for
    moving to each other one. cycles: since the width was last settled. load: requests then."""

    width: int
    evidence: tuple[float, ...]
    cycles: int
    load: int

    @classmethod
    def at(cls, width: int, num_widths: int, load: int) -> "Standing":
        return cls(width, (0.0,) * num_widths, 0, load)


def settle(
    standing: Standing,
    tokens: np.ndarray,
    seconds: np.ndarray,
    num_requests: int,
    constants: Constants = Constants(),
    cycles: int = 1,
) -> Standing:
    """One decision: stay, or move to another width. cycles: since the last one; it counts for all of them.

    For every other width j the evidence S_j = max(0, S_j + log(speed_j / speed_now) - indifference), once a
    cycle, grows while it is the faster one (the cumulative sum test of Page 1954). The width moves once some
    S_j reaches `patience`, and then to the best width, but within `dwell` cycles of the last move only on
    four times the evidence. So 15 % move it at once, 3 % after five cycles, 1 % after twenty-four; less than
    `indifference` never does, nor does noise without a mean. A load that has doubled or halved is another
    question: the best width is taken straight away."""
    best = best_width(tokens, seconds, constants.free_rows)
    if num_requests >= 2 * standing.load or 2 * num_requests <= standing.load:
        return Standing.at(best, len(seconds), num_requests)
    speed = np.log(np.maximum(tokens, 1e-12)) - np.log(seconds)
    gain = speed - speed[standing.width] - constants.indifference
    if best != standing.width and speed[best] <= speed[standing.width]:
        gain[best] = constants.patience / constants.dwell  # rows are free: best by rule, not by speed
    evidence = np.maximum(0.0, np.asarray(standing.evidence) + cycles * gain)
    evidence[standing.width] = 0.0
    cycles += standing.cycles
    needed = constants.patience * (1 if cycles >= constants.dwell else 4)
    if best != standing.width and evidence.max() >= needed:
        return Standing.at(best, len(seconds), num_requests)
    return replace(standing, evidence=tuple(evidence.tolist()), cycles=cycles)


@dataclass(frozen=True)
class Exploration:
    """credit: seconds that probing may still cost; below zero, what it has cost in advance. turn: whose turn
    it is among the candidates."""

    credit: float = 0.0
    turn: int = 0


def probe_loss(standing: int, probed: int, tokens: np.ndarray, seconds: np.ndarray) -> float:
    """Seconds lost by verifying another width for one cycle, as far as is known: its time, less the time in
    which the present width commits as many tokens."""
    return float(max(0.0, seconds[probed] - tokens[probed] * seconds[standing] / tokens[standing]))


# A cost ratio of which the logarithm is known to this standard deviation is worth no probe out of turn;
# others are paid for so many cycles in advance.
_WELL_KNOWN, _ADVANCE = 0.04, 200


def contender(standing: int, tokens: np.ndarray, seconds: np.ndarray, doubt: np.ndarray) -> int | None:
    """The width that may well be faster than the present one, None if there is none: of those whose costs are
    not well known, the one that lacks the fewest standard deviations of them, fewer than two (the confidence
    bound of Auer et al. 2002).

    tokens, seconds, doubt: [W]; doubt as of `CostTable.doubt`.
    """
    speed = np.log(tokens) - np.log(seconds)
    lacks = (speed[standing] - speed) / np.maximum(doubt, 1e-9)
    lacks[(doubt < _WELL_KNOWN) | (lacks >= 2)] = np.inf
    lacks[standing] = np.inf
    index = int(lacks.argmin())
    return index if np.isfinite(lacks[index]) else None


def explore(
    exploration: Exploration,
    standing: int,
    tokens: np.ndarray,
    seconds: np.ndarray,
    doubt: np.ndarray,
    constants: Constants = Constants(),
    cycles: int = 1,
) -> tuple[Exploration, int | None]:
    """Whether this cycle verifies another width than the present one, to learn what that costs and brings:
    its index, or None. doubt: [W], `CostTable.doubt`. cycles: since it was last asked.

    Every cycle adds `probe_share` of its time to a credit, and every probe takes its price from it. So
    probing never costs more than that share, but for what is paid in advance.

    A `contender` is probed at once, as far as the advance goes: start-up measures for seconds only, and where
    other processes use the machine it is wrong by a tenth, which can hold a server at the second best width
    for hundreds of cycles. The price is no less than what is expected to be lost: the positive part of a
    normal distribution has a mean of at most its own, where that is positive, and 0.4 standard deviations.

    Else all other candidates take turns, at a quarter of a cycle or more: a draft may be worth its time at
    one of the wider ones only, and of a narrower one the time may be wrong. Whose turn it is waits until the
    credit is there; the credit never exceeds the dearest probe by more than a cycle."""
    others = [*range(standing + 1, len(seconds)), *range(standing)]
    if not others:
        return exploration, None
    losses = [probe_loss(standing, other, tokens, seconds) for other in others]
    earned = cycles * constants.probe_share * seconds[standing]
    credit = min(exploration.credit + earned, max(losses) + seconds[standing])
    turn = exploration.turn % len(others)
    doubted = contender(standing, tokens, seconds, doubt)
    if doubted is not None:
        price = probe_loss(standing, doubted, tokens, seconds) + 0.4 * doubt[doubted] * seconds[doubted]
        if credit - price >= -_ADVANCE * constants.probe_share * seconds[standing]:
            return Exploration(credit - price, turn), doubted
    price = max(losses[turn], seconds[standing] / 4)
    if credit < price:
        return Exploration(credit, turn), None
    return Exploration(credit - price, turn + 1), others[turn]
