"""How wide the next cycle is, for the worker: it asks before a cycle and tells what came of it.

Nothing here waits for the device. What a cycle kept is told when SGLang has it on the host anyway, one or two
cycles later, and what it took when its events are over; until then the choice rests on what is known."""

import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_dflash.srt.speculative.width.chooser import Choice, WidthChooser
from sglang_dflash.srt.speculative.width.clock import CycleClock, Lap
from sglang_dflash.srt.speculative.width.estimates import MODES
from sglang_dflash.srt.speculative.width.states import WidthStates

logger = logging.getLogger(__name__)

_LAPS = 16

_GREEDY, _SAMPLED, _DRAWN, _CONSTRAINED = range(len(MODES))


class FixedWidth:
    """Every cycle verifies the whole block."""

    def __init__(self, width: int):
        self._width = width

    def on_prefill(self, batch: Any, num_running: int) -> None:
        pass

    def choose_width(self, batch: Any, draws_drafts: bool) -> int:
        return self._width

    def on_launched(self) -> None:
        pass

    def on_accept_lens(self, accepted: Sequence[int]) -> int:
        return self._width - 1

    def report(self) -> dict:
        return {}


class _Requests(NamedTuple):
    """Those of a batch, which hardly ever change from one cycle to the next. rows: of the request table.
    draws: whether their drafts are drawn. prefills: those before. slots: `rows`. births: which request each
    of them held. modes: of `MODES`. [n]"""

    rows: list[int]
    draws: bool
    prefills: int
    slots: np.ndarray
    births: np.ndarray
    modes: np.ndarray


class _UnderWay(NamedTuple):
    """A cycle whose outcome is not known yet. num_tokens: committed ones of its requests, as far as the host
    knew."""

    width: int
    num_tokens: int
    requests: _Requests


class AdaptiveWidth:
    """chooser: the policy, which is asked but not obeyed where a `schedule`, numbers of drafted tokens, says
    the width of each cycle in turn. tp_group: rank 0 chooses for all of it. slots: rows of the request table.
    log_every: cycles from one log line to the next."""

    def __init__(
        self,
        chooser: WidthChooser,
        states: WidthStates,
        clock: CycleClock,
        slots: int,
        tp_group: Any,
        schedule: Sequence[int] = (),
        log_every: int = 40,
        metrics: Any = None,
    ):
        self._chooser, self._states, self._clock = chooser, states, clock
        self._tp_group, self._schedule, self._log_every, self._metrics = (
            tp_group,
            schedule,
            log_every,
            metrics,
        )
        self._births = np.zeros(slots, dtype=np.int64)
        self._prefills = 0
        self._requests: _Requests | None = None
        self._under_way: deque[_UnderWay] = deque()
        self._cycles = self._width = 0
        self._per_width: Counter[int] = Counter()
        self._choice: Choice | None = None
        self._probes = 0
        self._measured = self._expected = 0.0
        self._laps: list[Lap] = []  # not told yet

    def on_prefill(self, batch: Any, num_running: int) -> None:
        """A prefill, of which the last `num_running` requests are not new."""
        self._clock.interrupt()
        new = batch.reqs[: len(batch.reqs) - num_running]
        # One that another server prefilled may have been retracted since, and has no row.
        new = [req for req in new if req.kv.req_pool_idx is not None]
        slots = np.array([req.kv.req_pool_idx for req in new], dtype=np.int64)
        self._births[slots] += 1
        self._prefills += 1
        self._chooser.on_prefill(slots, np.array([len(req.output_ids) for req in new], dtype=np.int64))

    def choose_width(self, batch: Any, draws_drafts: bool) -> int:
        """How many slots the cycle that begins now verifies. draws_drafts: whether its drafts are drawn, where a
        request samples."""
        self._follow(self._clock.finished())
        requests = self._requests = self._those_of(batch.reqs, draws_drafts)
        num_tokens = sum(
            [req.kv.kv_committed_len for req in batch.reqs]
        )  # as of a cycle or two ago; the batch may not say
        width = self._agree(requests, num_tokens)
        self._under_way.append(_UnderWay(width, num_tokens, requests))
        self._cycles += 1
        self._width = width
        self._per_width[width] += 1
        if self._metrics is not None:
            self._metrics.count_width(width)
        if self._cycles % self._log_every == 0:
            self._log(width, len(requests.rows))
        self._states.apply(width, len(requests.rows))
        self._clock.start()
        return width

    def _those_of(self, reqs: Sequence[Any], draws: bool) -> _Requests:
        """One that is new has had a prefill: without one, the same rows hold the same requests."""
        rows, known = [req.kv.req_pool_idx for req in reqs], self._requests
        if known is not None and known[:3] == (rows, draws, self._prefills):
            return known
        slots = np.array(rows, dtype=np.int64)
        return _Requests(
            rows,
            draws,
            self._prefills,
            slots,
            self._births[slots],
            np.array([_mode(req, draws) for req in reqs]),
        )

    def on_launched(self) -> None:
        """The cycle asked for last has been launched."""
        entry = self._under_way[-1]
        self._clock.stop(len(entry.requests.rows), entry.width, entry.num_tokens)

    def on_accept_lens(self, accepted: Sequence[int]) -> int:
        """The oldest cycle not told of yet kept so many drafted tokens of each of its requests. Returns how
        many it verified."""
        entry = self._under_way.popleft()
        requests, labels = entry.requests, np.asarray(accepted)
        slots, modes = requests.slots, requests.modes
        assert len(labels) == len(slots), "SGLang tells of every cycle once, in order"
        if requests.prefills != self._prefills:
            same = self._births[slots] == requests.births
            slots, modes, labels = slots[same], modes[same], labels[same]
        self._chooser.on_accept_lens(slots, modes, entry.width, labels)
        return entry.width - 1

    def report(self) -> dict:
        """For /server_info: plain numbers."""
        estimate = self._chooser.estimate
        return {
            "width": self._width,
            "candidates": self._chooser.costs.widths.tolist(),
            "cycles_per_width": {str(width): count for width, count in sorted(self._per_width.items())},
            "probes": self._probes,
            "expected": self._expected_per_width(),
            "measured_over_expected_time": round(self._measured / self._expected, 3)
            if self._expected
            else None,
            "accept_probs": {
                name: {
                    f"from_token_{age}": probs.round(3).tolist()
                    for age, probs in estimate.averages(m).items()
                }
                for m, name in enumerate(MODES)
            },
        }

    def _expected_per_width(self) -> dict[str, dict[str, float]]:
        """Why the width is what it is: of the last cycle that was chosen, what each candidate was expected to
        bring and take."""
        if self._choice is None:
            return {}
        of_each = zip(
            self._chooser.costs.widths.tolist(), self._choice.tokens, self._choice.seconds, strict=True
        )
        return {
            str(width): {"tokens": round(float(tokens), 3), "cycle_ms": round(1e3 * float(seconds), 3)}
            for width, tokens, seconds in of_each
        }

    def _follow(self, laps: Sequence[Lap]) -> None:
        """Laps are told some at a time, those of the same kind that follow on each other as one: a single one
        takes the host a fifth of a millisecond."""
        self._laps += laps
        if len(self._laps) >= _LAPS:
            for (num_requests, width), alike in itertools.groupby(
                self._laps, lambda lap: (lap.num_requests, lap.width)
            ):
                self._tell_laps(num_requests, width, list(alike))
            self._laps = []

    def _tell_laps(self, num_requests: int, width: int, laps: list[Lap]) -> None:
        count, seconds = len(laps), sum(lap.seconds for lap in laps)
        num_tokens = sum(lap.num_tokens for lap in laps) // count
        surprise = self._chooser.on_cycle_time(num_requests, width, seconds / count, count, num_tokens)
        for after, gaps in itertools.groupby(
            (lap for lap in laps if lap.gap is not None), lambda lap: lap.after
        ):
            self._chooser.costs.follow_gap(num_requests, after, [lap.gap for lap in gaps])
        self._measured += seconds
        self._expected += seconds / math.exp(surprise)

    def _agree(self, requests: _Requests, num_tokens: int) -> int:
        """Rank 0's width: the others may have measured something else, and ranks that disagree hang."""
        if self._tp_group.rank_in_group == 0:
            width = self._choose(requests, num_tokens)
        else:
            width = 0
        if self._tp_group.world_size > 1:
            told = torch.tensor([width])
            torch.distributed.broadcast(told, src=self._tp_group.ranks[0], group=self._tp_group.cpu_group)
            width = int(told)
        return width

    def _choose(self, requests: _Requests, num_tokens: int) -> int:
        self._choice = self._chooser.choose(requests.slots, requests.modes, num_tokens)
        if self._schedule:
            return self._schedule[self._cycles % len(self._schedule)] + 1
        self._probes += self._choice.is_probe
        return self._choice.width

    def _log(self, width: int, num_requests: int) -> None:
        counts = ", ".join(f"{width}: {count}" for width, count in sorted(self._per_width.items()))
        choice = self._choice
        logger.info(
            "DFLASH verify width %d for %d requests: %.2f tokens each and %.1f ms a cycle expected (measured over expected "
            "time so far: %.2f). Cycles per width: %s.",
            width,
            num_requests,
            choice.tokens[choice.index] / choice.num_requests,
            1e3 * choice.seconds[choice.index],
            self._measured / self._expected if self._expected else np.nan,
            counts,
        )


def _mode(req: Any, draws: bool) -> int:
    """Which of MODES. What a grammar or a penalty changes is learned apart: it says nothing about the other
    requests."""
    params = req.sampling_params
    if req.grammar is not None or params.logit_bias is not None or params.min_new_tokens > 0:
        return _CONSTRAINED
    if params.frequency_penalty != 0 or params.presence_penalty != 0 or params.repetition_penalty != 1:
        return _CONSTRAINED
    if params.top_k == 1:
        return _GREEDY
    return _DRAWN if draws else _SAMPLED
