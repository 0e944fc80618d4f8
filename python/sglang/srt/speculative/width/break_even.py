"""The load from which rows cost on a GPU, and adaptive verify lengths from there on.

A GPU reads the target's weights once for all rows of a verify. Few rows take hardly longer than one, and
verifying less of a block saves nothing.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sglang_dflash.srt.speculative.cycle.plan import CyclePlan
from sglang_dflash.srt.speculative.width.controller import AdaptiveLengths, WholeBlocks, plan_lengths

_LEAST_SAVED = 0.05  # of a verify's seconds by half its rows


def break_even(loads: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the least load from which rows cost. Infinity: rows are free at each load.

    Rows cost at a load if half of them would take less than 95 % of the seconds. Half the rows of n whole
    blocks take as long as those of n / 2 requests. Seconds are linear between two loads, and below the first
    as between the first two. More rows take no less time: a peak is noise.

    Example: 1, 16, 48 and 96 whole blocks take 7.0, 7.2, 20 and 41 ms. At 16, half the rows take the 7.1 ms
    of 8 requests, 1.5 % less. At 48 they take the 10.4 ms of 24 requests, 48 % less: rows cost from 48 on.

    Args:
        loads: numbers of requests, ascending.
        seconds: of a verify of one whole block for each request, by load.
    """
    lowered = np.minimum.accumulate(np.asarray(seconds)[::-1])[::-1]
    slope = (lowered[1] - lowered[0]) / (loads[1] - loads[0]) if len(loads) > 1 else 0.0
    of_none = lowered[0] - loads[0] * slope
    halves = np.interp(np.asarray(loads) / 2, [0, *loads], [of_none, *lowered])
    costs = halves < (1 - _LEAST_SAVED) * lowered
    return loads[int(costs.argmax())] if costs.any() else math.inf


class AdaptiveFromBreakEven(AdaptiveLengths):
    """Verifies whole blocks of fewer than `least` requests, and learns nothing from them.

    Such a cycle does no more than one of a server with whole blocks alone. Only a prefill is noted, as its
    requests may run beside more of them later.

    Args:
        least: requests from which lengths are adaptive, at least two.
        whole: plans the cycles of fewer.
        **adaptive: the arguments of `AdaptiveLengths`.
    """

    def __init__(self, least: int, whole: WholeBlocks, **adaptive: Any):
        super().__init__(**adaptive)
        self._least, self._whole, self._is_paused = least, whole, True

    def choose(self, batch: Any, draws: bool, matches: np.ndarray, caps: np.ndarray) -> CyclePlan:
        """Plan whole blocks of few requests. See `AdaptiveLengths`."""
        if len(batch.reqs) >= self._least:
            self._is_paused = False
            return super().choose(batch, draws, matches, caps)
        if not self._is_paused:
            self._pause()
        return self._whole.choose(batch, draws, matches, caps)

    def _pause(self) -> None:
        self._is_paused, self._held_for = True, ()
        self._clock.interrupt()
        self._backends.select(np.array([self.chooser.max_draft_tokens]))

    def on_launched(self, plan: CyclePlan) -> None:
        """Stop timing, if anything is timed."""
        if not self._is_paused:
            super().on_launched(plan)

    def plans_of_each_layout(self, max_requests: int) -> Iterator[CyclePlan]:
        """Yield a cycle of unlike lengths, then a whole block. See `AdaptiveLengths`."""
        lengths = np.resize((self.chooser.max_draft_tokens, 0), self._least)
        yield plan_lengths(self._backends, lengths, np.zeros(self._least, dtype=bool))
        self._pause()
        yield from self._whole.plans_of_each_layout(max_requests)
