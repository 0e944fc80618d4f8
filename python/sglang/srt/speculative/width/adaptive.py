"""The worker's side of the verify width: chosen before a cycle, learned from after it.

Nothing here waits for the device. Accept lengths arrive when SGLang has them on the host anyway, one or two
cycles later, and cycle times when their events are over. Until then a choice rests on what is known.
"""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_dflash.srt.speculative.dflash_info import PrefilledRequests, Prompts
from sglang_dflash.srt.speculative.drafters.copy_stats import Proposals
from sglang_dflash.srt.speculative.width.backends import TargetBackends
from sglang_dflash.srt.speculative.width.chooser import Choice, WidthChooser
from sglang_dflash.srt.speculative.width.clock import CycleClock, CycleTiming
from sglang_dflash.srt.speculative.width.copies import CopyWidths
from sglang_dflash.srt.speculative.width.estimates import MODES

logger = logging.getLogger(__name__)

# Timings learned from together, those of equal load and width in a row as one: a single one takes the host a
# fifth of a millisecond.
_TIMINGS = 16

_GREEDY, _SAMPLED, _DRAWN, _CONSTRAINED = range(len(MODES))


class FixedWidth:
    """Verifies the whole block in every cycle."""

    def __init__(self, width: int):
        self._plan = PlannedCycle(width, 0, None)

    def begin_prefill(self, prompts: Prompts) -> None:
        """Do nothing: a fixed width learns nothing."""

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """Do nothing."""

    def choose_width(
        self,
        batch: Any,
        draws_drafts: bool,
        matches: np.ndarray | None = None,
        caps: np.ndarray | None = None,
    ) -> "PlannedCycle":
        """Plan a whole block."""
        return self._plan if caps is None else self._plan._replace(caps=caps)

    def on_launched(self, cycle: "PlannedCycle", was_drafted: bool = True) -> None:
        """Do nothing."""

    def on_accept_lens(
        self, cycle: "PlannedCycle", accept_lens: Sequence[int], proposals: Proposals | None = None
    ) -> None:
        """Do nothing."""

    def report(self) -> dict:
        """Return nothing for /server_info."""
        return {}


class _Batch(NamedTuple):
    """The requests of a cycle, which hardly ever change from one cycle to the next."""

    # Without a prefill, equal rows hold equal requests.
    key: tuple[list[int], bool, int]  # rows, whether drafts are drawn, number of prefills so far
    rows: np.ndarray  # of the request table. [n]
    generations: np.ndarray  # which request each row held. [n]
    modes: np.ndarray  # of `MODES`. [n]


class PlannedCycle(NamedTuple):
    """A chosen width, to be passed to `on_launched` and `on_accept_lens`."""

    width: int  # slots to verify, the anchor included
    num_tokens: int  # committed tokens of its requests, as far as the host knew
    batch: _Batch | None  # None: nothing is learned
    drafts: bool = True  # False: copies are verified without running the draft
    matches: np.ndarray | None = None  # lengths that the choice knew of, 0 without a match. [n]
    caps: np.ndarray | None = None  # most drafted tokens to accept per request. None: no limits. [n]

    def verified_drafts(self, num_requests: int) -> np.ndarray:
        """Return how many drafted tokens could be accepted of each request. [n]"""
        depth = np.full(num_requests, self.width - 1)
        return depth if self.caps is None else np.minimum(self.caps, depth)


class AdaptiveWidth:
    """Verifies as many drafted tokens in each cycle as pay off.

    Args:
        chooser: the policy. If there is a `schedule`, it still learns and decides, but is not obeyed.
        backends: the target's, per width.
        clock: times the cycles.
        num_rows: of the request table.
        tp_group: rank 0 chooses for all of it.
        schedule: numbers of drafted tokens, verified cycle by cycle in turn.
        log_every: cycles from one log line to the next.
        metrics: counts widths, if given.
        copies: widens cycles for copies, if there are any.
    """

    def __init__(
        self,
        chooser: WidthChooser,
        backends: TargetBackends,
        clock: CycleClock,
        num_rows: int,
        tp_group: Any,
        schedule: Sequence[int] = (),
        log_every: int = 40,
        metrics: Any = None,
        copies: CopyWidths | None = None,
    ):
        self._chooser, self._backends, self._clock, self._tp_group = chooser, backends, clock, tp_group
        self._schedule, self._log_every, self._metrics = schedule, log_every, metrics
        self._copies, self._num_undrafted = copies, 0
        self._row_generation = np.zeros(num_rows, dtype=np.int64)
        self._num_prefills = self._num_cycles = self._num_probes = self._width = 0
        self._batch: _Batch | None = None
        self._choice: Choice | None = None  # rank 0's latest
        self._cycles_per_width: Counter[int] = Counter()
        self._timings: list[CycleTiming] = []
        self._measured = self._expected = 0.0  # seconds of all cycles that were timed

    def begin_prefill(self, prompts: Prompts) -> None:
        """Start the new requests of a prefill."""
        self._start(prompts.new_reqs)

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """Start requests that another server has prefilled."""
        self._start(requests.reqs)

    def _start(self, reqs: Sequence[Any]) -> None:
        self._clock.interrupt()
        # A request that another server prefilled may have been retracted since. It then has no row.
        new = [req for req in reqs if req.kv.req_pool_idx is not None]
        rows = np.array([req.kv.req_pool_idx for req in new], dtype=np.int64)
        self._row_generation[rows] += 1
        self._num_prefills += 1
        self._chooser.on_prefill(rows, np.array([len(req.output_ids) for req in new], dtype=np.int64))
        if self._copies is not None:
            self._copies.reset(rows)

    def choose_width(
        self,
        batch: Any,
        draws_drafts: bool,
        matches: np.ndarray | None = None,
        caps: np.ndarray | None = None,
    ) -> PlannedCycle:
        """Choose how many slots the next cycle verifies.

        Args:
            batch: the scheduler's.
            draws_drafts: whether drafted tokens are drawn.
            matches: lengths of the requests' matches, if copies are on and the host knows them. [n]
            caps: most drafted tokens that each request may accept. None: no limits. [n]
        """
        self._learn_timings(self._clock.finished())
        self._batch = requests = self._describe(batch.reqs, draws_drafts)
        # As of a cycle or two ago; the batch's own lengths may not be on the host.
        num_tokens = sum([req.kv.kv_committed_len for req in batch.reqs])
        if matches is None and self._copies is not None:
            matches = self._copies.expected_matches(requests.rows)
        width, drafts = self._agree(requests, num_tokens, matches, caps)
        self._width = width
        self._num_cycles += 1
        self._cycles_per_width[width] += 1
        if self._metrics is not None:
            self._metrics.count_width(width)
        if self._num_cycles % self._log_every == 0:
            self._log(width, len(batch.reqs))
        self._backends.apply(width)
        self._clock.start()
        return PlannedCycle(width, num_tokens, requests, drafts, matches, caps)

    def _describe(self, reqs: Sequence[Any], draws_drafts: bool) -> _Batch:
        key = [req.kv.req_pool_idx for req in reqs], draws_drafts, self._num_prefills
        if self._batch is not None and self._batch.key == key:
            return self._batch
        rows = np.array(key[0], dtype=np.int64)
        modes = np.array([_mode(req, draws_drafts) for req in reqs])
        return _Batch(key, rows, self._row_generation[rows], modes)

    def on_launched(self, cycle: PlannedCycle, was_drafted: bool = True) -> None:
        """Stop timing. was_drafted: whether the draft ran."""
        assert cycle.batch is not None
        self._num_undrafted += cycle.width > 1 and not was_drafted
        self._clock.stop(len(cycle.batch.rows), cycle.width, cycle.num_tokens, was_drafted)

    def on_accept_lens(
        self, cycle: PlannedCycle, accept_lens: Sequence[int], proposals: Proposals | None = None
    ) -> None:
        """Learn from the accepted drafted tokens of each request.

        proposals: sources of the blocks, on the host, if copies are on.
        """
        batch, accepted = cycle.batch, np.asarray(accept_lens)
        assert batch is not None
        rows, modes, verified = batch.rows, batch.modes, cycle.verified_drafts(len(accepted))
        same: Any = slice(None)
        if batch.key[2] != self._num_prefills:
            same = self._row_generation[rows] == batch.generations
            rows, modes, accepted, verified = rows[same], modes[same], accepted[same], verified[same]
        if (
            self._copies is not None
            and cycle.matches is not None
            and proposals is not None
            and proposals.lengths is not None
        ):
            lengths = proposals.lengths.numpy()[same]
            is_capped = verified < cycle.width - 1
            # A copy that was passed over teaches nothing, nor does a capped one.
            taught = np.where(is_capped, -np.abs(lengths), lengths)
            self._copies.on_accept_lens(rows, modes, cycle.matches[same], taught, cycle.width - 1, accepted)
            verified = np.where((lengths <= 0) & proposals.was_drafted, verified, 0)
        self._learn_drafts(rows, modes, verified, accepted)

    def _learn_drafts(
        self, rows: np.ndarray, modes: np.ndarray, verified: np.ndarray, accepted: np.ndarray
    ) -> None:
        """Learn the acceptance of `verified` drafted tokens, and every emitted token."""
        depths = np.unique(verified)
        if len(depths) == 1:  # the same arrays as before are learned from together
            self._chooser.on_accept_lens(rows, modes, int(depths[0]) + 1, accepted)
            return
        for depth in depths:
            part = verified == depth
            self._chooser.on_accept_lens(rows[part], modes[part], int(depth) + 1, accepted[part])

    def report(self) -> dict:
        """Return plain numbers for /server_info."""
        estimate = self._chooser.estimate
        time_ratio = round(self._measured / self._expected, 3) if self._expected else None
        copies = {}
        if self._copies is not None:
            copies = {"undrafted": self._num_undrafted, "copy_accept_probs": self._copies.report()}
        return copies | {
            "width": self._width,
            "candidates": self._chooser.costs.widths.tolist(),
            "cycles_per_width": {str(width): n for width, n in sorted(self._cycles_per_width.items())},
            "probes": self._num_probes,
            "expected": self._expected_per_width(),
            "measured_over_expected_time": time_ratio,
            "accept_probs": {
                name: {
                    f"from_token_{age}": probs.round(3).tolist()
                    for age, probs in estimate.averages(mode).items()
                }
                for mode, name in enumerate(MODES)
            },
        }

    def _expected_per_width(self) -> dict[str, dict[str, float]]:
        """Return what the latest choice expected of each candidate."""
        if self._choice is None:
            return {}
        expected = zip(
            self._chooser.costs.widths.tolist(), self._choice.tokens, self._choice.seconds, strict=True
        )
        return {
            str(width): {"tokens": round(float(tokens), 3), "cycle_ms": round(1e3 * float(seconds), 3)}
            for width, tokens, seconds in expected
        }

    def _learn_timings(self, timings: Sequence[CycleTiming]) -> None:
        self._timings += timings
        if len(self._timings) >= _TIMINGS:
            for _, alike in itertools.groupby(self._timings, lambda t: (*t[:2], t.was_drafted)):
                self._learn_equal_timings(list(alike))
            self._timings = []

    def _learn_equal_timings(self, timings: list[CycleTiming]) -> None:
        num_requests, width, was_drafted = timings[0].num_requests, timings[0].width, timings[0].was_drafted
        count, seconds = len(timings), sum(timing.seconds for timing in timings)
        num_tokens = sum(timing.num_tokens for timing in timings) // count
        surprise = self._chooser.on_cycle_time(
            num_requests, width, seconds / count, count, num_tokens, was_drafted
        )
        gaps = [(t.previous_width, t.gap) for t in timings if t.gap is not None]
        for previous_width, alike in itertools.groupby(gaps, lambda gap: gap[0]):
            self._chooser.costs.observe_gaps(num_requests, previous_width, [gap for _, gap in alike])
        self._measured += seconds
        self._expected += seconds / math.exp(surprise)

    def _agree(
        self, batch: _Batch, num_tokens: int, matches: np.ndarray | None, caps: np.ndarray | None
    ) -> tuple[int, bool]:
        """Return rank 0's width, and whether to draft.

        Others may differ, and ranks that disagree hang.
        """
        width, drafts = 0, True
        if self._tp_group.rank_in_group == 0:
            width, drafts = self._choose(batch, num_tokens, matches, caps)
        if self._tp_group.world_size > 1:
            shared = torch.tensor([width, drafts])
            torch.distributed.broadcast(shared, src=self._tp_group.ranks[0], group=self._tp_group.cpu_group)
            width, drafts = int(shared[0]), bool(shared[1])
        return width, drafts

    def _choose(
        self, batch: _Batch, num_tokens: int, matches: np.ndarray | None, caps: np.ndarray | None
    ) -> tuple[int, bool]:
        choice = self._chooser.choose(batch.rows, batch.modes, num_tokens, caps)
        if self._copies is not None and matches is not None:
            if caps is not None:  # a capped copy would look longer than it may be
                matches = np.where(caps < self._chooser.estimate.depth, 0, matches)
            choice = self._copies.choose(choice, batch.modes, matches)
        self._choice = choice
        if self._schedule:
            return self._schedule[self._num_cycles % len(self._schedule)] + 1, True
        self._num_probes += choice.is_probe
        return choice.width, choice.drafts

    def _log(self, width: int, num_requests: int) -> None:
        choice = self._choice
        if choice is None:  # of a rank that does not choose
            return
        logger.info(
            "DFLASH verify width %d for %d requests: %.2f tokens each and %.1f ms a cycle expected (measured "
            "over expected time so far: %.2f). Cycles per width: %s.",
            width,
            num_requests,
            choice.tokens[choice.index] / choice.num_requests,
            1e3 * choice.seconds[choice.index],
            self._measured / self._expected if self._expected else np.nan,
            ", ".join(f"{width}: {count}" for width, count in sorted(self._cycles_per_width.items())),
        )


def _mode(req: Any, draws_drafts: bool) -> int:
    """Return which of MODES; requests with grammars or penalties are learned apart."""
    params = req.sampling_params
    if req.grammar is not None or params.logit_bias is not None or params.min_new_tokens > 0:
        return _CONSTRAINED
    if params.frequency_penalty != 0 or params.presence_penalty != 0 or params.repetition_penalty != 1:
        return _CONSTRAINED
    if params.top_k == 1:
        return _GREEDY
    return _DRAWN if draws_drafts else _SAMPLED
