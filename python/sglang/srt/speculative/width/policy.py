"""Rules for the width of the next verify, as pure functions of numbers.

A block is an anchor and the drafted tokens behind it. The draft always fills its trained block. A cycle of
width w verifies the anchor and the first w - 1 drafted tokens, accepts them up to the first rejection and
adds one token of the target. Width 1 verifies nothing: it is a plain decode step. All requests of a batch
get the same width.

n: decoding requests. K: drafted tokens of a block. W: candidate widths, ascending, each in 1 .. K + 1.
"""

from dataclasses import dataclass, replace

import numpy as np
from pydantic import NonNegativeFloat
from scipy.optimize import isotonic_regression


@dataclass(frozen=True)
class Constants:
    """The policy's constants, which the config file can set."""

    free_rows: NonNegativeFloat = 1.03  # the widest is taken if it costs at most this many times width 1
    indifference: NonNegativeFloat = 0.005  # gain (log of a ratio of speeds) that is not worth a move
    patience: NonNegativeFloat = 0.12  # gain beyond indifference, summed over cycles, that moves the width
    dwell: NonNegativeFloat = 8  # cycles after a move in which another needs four times the evidence
    probe_share: NonNegativeFloat = 0.005  # share of the time that probing other widths may cost


DEFAULTS = Constants()


def survival(accept_probs: np.ndarray) -> np.ndarray:
    """Return s_k = a_1 .. a_k, the probability that tokens 1 .. k are all accepted.

    accept_probs: [n, K], a_ik, the probability that token k of request i is accepted if those before it are.
    These are conditional, so they include what accepted tokens say about later ones (Leviathan et al. 2022,
    section 3.1, without their assumption that a is the same at every position). Returns [n, K].
    """
    return np.cumprod(accept_probs, axis=1)


def expected_tokens(accept_probs: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return the tokens that a cycle commits over the batch, per width. [W]

    This is the sum over requests of 1 + s_1 + .. + s_(w-1).
    """
    per_position = np.concatenate(([float(len(accept_probs))], survival(accept_probs).sum(axis=0)))
    return per_position.cumsum()[np.asarray(widths) - 1]


def never_cheaper_when_wider(seconds: np.ndarray) -> np.ndarray:
    """Return the nondecreasing row nearest to measured times. [W] -> [W]

    Verifying more rows cannot take less time, so a dip is noise. Least squares (Barlow et al. 1972).
    """
    return isotonic_regression(seconds).x


def fastest_width(tokens: np.ndarray, seconds: np.ndarray, free_rows: float = DEFAULTS.free_rows) -> int:
    """Return the index of the width with most tokens per second, the widest of equals.

    All widths are compared: costs are a staircase, on which the first descent is not the way to the top
    (TensorRT-LLM #17056). If the widest costs hardly more than the narrowest, it is taken: no estimate of
    acceptance can gain more there than it loses when wrong.

    tokens, seconds: [W], by ascending width.
    """
    if seconds[-1] <= free_rows * seconds[0]:
        return len(seconds) - 1
    speed = tokens / seconds
    return int(np.flatnonzero(speed >= speed.max() * (1 - 1e-9))[-1])


@dataclass(frozen=True)
class WidthState:
    """The current width and the evidence against it, from one decision to the next."""

    index: int  # of the current width among the candidates
    evidence: np.ndarray  # [W], for a move to each other width
    cycles: int  # since the width was chosen
    num_requests: int  # when it was chosen

    @classmethod
    def fresh(cls, index: int, num_widths: int, num_requests: int) -> "WidthState":
        return cls(index, np.zeros(num_widths), 0, num_requests)


def update_width(
    state: WidthState,
    tokens: np.ndarray,
    seconds: np.ndarray,
    num_requests: int,
    constants: Constants = DEFAULTS,
    cycles: int = 1,
) -> WidthState:
    """Decide to stay or to move to another width.

    cycles: since the last decision. This one counts for all of them.

    For every other width j the evidence S_j = max(0, S_j + log(speed_j / speed_now) - indifference), once a
    cycle, grows while j is the faster one (the cumulative sum test of Page 1954). Once some S_j reaches
    `patience`, the width moves to the fastest one. Within `dwell` cycles of the last move it takes four times
    the evidence. So a gain of 15 % moves it at once, 3 % after five cycles, 1 % after twenty-four. A gain
    below `indifference` never does, nor does noise without a mean. If the load has doubled or halved, the
    fastest width is taken at once.
    """
    best = fastest_width(tokens, seconds, constants.free_rows)
    moved = WidthState.fresh(best, len(seconds), num_requests)
    if num_requests >= 2 * state.num_requests or 2 * num_requests <= state.num_requests:
        return moved
    speed = np.log(np.maximum(tokens, 1e-12)) - np.log(seconds)
    gain = speed - speed[state.index] - constants.indifference
    if best != state.index and speed[best] <= speed[state.index]:
        gain[best] = constants.patience / constants.dwell  # rows are free: best by rule, not by speed
    evidence = np.maximum(0.0, state.evidence + cycles * gain)
    evidence[state.index] = 0.0
    cycles += state.cycles
    needed = constants.patience * (1 if cycles >= constants.dwell else 4)
    if best != state.index and evidence.max() >= needed:
        return moved
    return replace(state, evidence=evidence, cycles=cycles)


@dataclass(frozen=True)
class Exploration:
    """The budget for probing other widths."""

    credit: float = 0.0  # seconds that probing may still cost; negative: spent in advance
    turn: int = 0  # number of the candidate whose turn it is


def probe_loss(current: int, probed: int, tokens: np.ndarray, seconds: np.ndarray) -> float:
    """Return the seconds lost by one cycle at another width.

    It is compared with the time in which the current width commits as many tokens.
    """
    return float(max(0.0, seconds[probed] - tokens[probed] * seconds[current] / tokens[current]))


# A cost ratio whose logarithm is known to this standard deviation needs no probe out of turn. Other probes
# may be paid for this many cycles in advance.
_WELL_KNOWN, _ADVANCE = 0.04, 200


def contender(current: int, tokens: np.ndarray, seconds: np.ndarray, uncertainty: np.ndarray) -> int | None:
    """Return the index of a width that may well be faster than the current one.

    It is the width with the smallest deficit of speed in standard deviations of its cost. If that is two or
    more, there is none (the confidence bound of Auer et al. 2002). Widths with well known costs do not count.

    tokens, seconds, uncertainty: [W]; `CostTable.uncertainty`.
    """
    speed = np.log(tokens) - np.log(seconds)
    deficit = (speed[current] - speed) / np.maximum(uncertainty, 1e-9)
    deficit[(uncertainty < _WELL_KNOWN) | (deficit >= 2)] = np.inf
    deficit[current] = np.inf
    index = int(deficit.argmin())
    return index if np.isfinite(deficit[index]) else None


def explore(
    exploration: Exploration,
    current: int,
    tokens: np.ndarray,
    seconds: np.ndarray,
    uncertainty: np.ndarray,
    constants: Constants = DEFAULTS,
    cycles: int = 1,
) -> tuple[Exploration, int | None]:
    """Return the index of a width to probe in this cycle, or None.

    A probe teaches what the width costs and yields. uncertainty: [W], `CostTable.uncertainty`. cycles: since
    the last call.

    Every cycle adds `probe_share` of its time to a credit, and every probe takes its price from it. So
    probing never costs more than that share, apart from what is paid in advance.

    A `contender` is probed at once, as far as the advance allows. Start-up measures for seconds only. If
    other processes use the machine, it is wrong by a tenth, which can hold a server at the second best width
    for hundreds of cycles. The price is at least the expected loss: the positive part of a normal
    distribution has a mean of at most the distribution's own, if positive, plus 0.4 standard deviations.

    Otherwise all other candidates take turns, at a price of a quarter of a cycle or more: a draft may be
    worth its time at one of the wider widths only, and the time of a narrower one may be wrong. A turn waits
    until the credit suffices. The credit never exceeds the dearest probe by more than a cycle.
    """
    others = [*range(current + 1, len(seconds)), *range(current)]
    if not others:
        return exploration, None
    losses = [probe_loss(current, other, tokens, seconds) for other in others]
    earned = cycles * constants.probe_share * seconds[current]
    credit = min(exploration.credit + earned, max(losses) + seconds[current])
    turn = exploration.turn % len(others)
    doubtful = contender(current, tokens, seconds, uncertainty)
    if doubtful is not None:
        price = probe_loss(current, doubtful, tokens, seconds)
        price += 0.4 * uncertainty[doubtful] * seconds[doubtful]
        if credit - price >= -_ADVANCE * constants.probe_share * seconds[current]:
            return Exploration(credit - price, turn), doubtful
    price = max(losses[turn], seconds[current] / 4)
    if credit < price:
        return Exploration(credit, turn), None
    return Exploration(credit - price, turn + 1), others[turn]
