"""The worker's side of the verify lengths: chosen before a cycle, learned from after it.

Nothing here waits for the device. Accept lengths arrive when SGLang has them on the host anyway, one or two
cycles later, and cycle times when their events are over. Until then a choice rests on what is known.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sglang_dflash.kernels.ops.speculative.copy_ahead import LONGEST_MATCH, SHORTEST_MATCH
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle.host import table_rows
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks
from sglang_dflash.srt.speculative.cycle.plan import NO_REQUESTS, NO_WORK, BatchRequests, CyclePlan, Proposals
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests, Prompts
from sglang_dflash.srt.speculative.cycle.ragged_graphs import AnyRows, RowBackends
from sglang_dflash.srt.speculative.drafters.copies import UNKNOWN
from sglang_dflash.srt.speculative.width.estimates import MODES, UNKNOWN_MATCH, CycleClock
from sglang_dflash.srt.speculative.width.policy import Choice, LengthChooser

logger = logging.getLogger(__name__)

Backends = AnyRows | RowBackends
_GREEDY, _SAMPLED, _DRAWN, _CONSTRAINED = range(len(MODES))


def plan_lengths(
    backends: Backends, lengths: np.ndarray, copies: np.ndarray, needs_rectangle: bool = False
) -> CyclePlan:
    """Have the backends verify `lengths` drafted tokens, and plan the cycle that does.

    With `needs_rectangle`, all requests must verify equally many tokens.
    """
    layout = backends.select(lengths, needs_rectangle)
    return CyclePlan(layout, copies=copies & (layout.num_draft_tokens > 0))


class WholeBlocks:
    """Verifies the whole block in every cycle, and learns nothing."""

    def __init__(self, block_size: int):
        self._block_size = block_size

    def _do_nothing(self, *_: Any) -> None:
        """Do nothing: no state per request, nothing to learn."""

    begin_prefill = admit_prefilled = on_launched = on_accept_lens = _do_nothing

    def choose(self, batch: Any, draws: bool, matches: np.ndarray, caps: np.ndarray) -> CyclePlan:
        """Plan whole blocks. See `AdaptiveLengths`."""
        return CyclePlan(whole_blocks(len(batch.reqs), self._block_size), draws, caps=caps)

    def plans_of_each_layout(self, max_requests: int) -> Iterator[CyclePlan]:
        """Yield a cycle of each layout of rows that requests may have: a whole block."""
        yield CyclePlan(whole_blocks(1, self._block_size))

    def report(self) -> dict:
        """Return nothing for /server_info."""
        return {}


class AdaptiveLengths:
    """Verifies as many drafted tokens in each cycle as pay off.

    Args:
        chooser: the policy.
        backends: the target's.
        clock: times the cycles.
        tp_group: rank 0 chooses for all of it.
        metrics: counts verify lengths.
        log_every: cycles from one log line to the next.
    """

    def __init__(
        self,
        chooser: LengthChooser,
        backends: Backends,
        clock: CycleClock,
        tp_group: Any,
        metrics: DFlashMetrics,
        log_every: int,
    ):
        self.chooser, self._backends, self._clock, self._tp_group = chooser, backends, clock, tp_group
        self._metrics, self._log_every, self._next_log = metrics, log_every, log_every
        # Lengths of matches to expect, if the host cannot read them: of copies that go on.
        self._expected_matches = np.full(chooser.num_rows, UNKNOWN_MATCH)
        self._row_generation = np.zeros(chooser.num_rows, dtype=np.int64)
        self._num_prefills = self._num_cycles = self._verify_len = 0
        # The plan of the next cycles, how many they are, for which batch, and matches that it passed over: of
        # each request if some draft, else the longest. [n]
        self._held, self._num_held = CyclePlan(whole_blocks(1, 1)), 0
        self._held_for: Any = ()
        self._passed: Any = 0
        self._requests = NO_REQUESTS
        self._cycles_per_verify_len: Counter[int] = Counter()
        self._cycles_per_draft_slots: Counter[int] = Counter()
        self._blocks_per_length: Counter[int] = Counter()
        self._measured = self._expected = 0.0  # seconds of all cycles that were timed

    def begin_prefill(self, prompts: Prompts) -> None:
        """Start the new requests of a prefill."""
        self._start(prompts.table_rows[: len(prompts.new_reqs)])

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """Start requests that another server has prefilled."""
        self._start(requests.table_rows)

    def _start(self, rows: np.ndarray) -> None:
        self._clock.interrupt()
        self._row_generation[rows] += 1
        self._num_prefills += 1
        self._expected_matches[rows] = UNKNOWN_MATCH
        self.chooser.drafts.reset(rows)

    def choose(self, batch: Any, draws: bool, matches: np.ndarray, caps: np.ndarray) -> CyclePlan:
        """Choose what the next cycle drafts and verifies.

        A choice without copies is for a few cycles, as choosing takes time on the host. It ends early if the
        batch changes, or if a match is longer than one that it passed over. Where the host does not know the
        matches, each cycle is chosen, and compares them.

        Args:
            batch: the scheduler's.
            draws: whether drafted tokens are drawn.
            matches: lengths of the requests' matches, of `Matches`. [n]
            caps: most drafted tokens that each request may accept. [n]
        """
        self._requests = requests = self._describe(batch, draws)
        is_known = matches != UNKNOWN
        matches = np.where(is_known, matches, self._expected_matches[requests.rows])
        for_what = requests.key, caps.tolist()
        if self._num_held and self._held_for == for_what and (matches <= self._passed).all():
            self._num_held -= 1
            self.chooser.count_cycle()
            self._count_cycle(self._held)
            return self._held
        self._learn_timings()
        # As of a cycle or two ago; the batch's own lengths may not be on the host.
        num_tokens = sum([req.kv.kv_committed_len for req in batch.reqs])
        extra_context = num_tokens - len(batch.reqs) * self.chooser.costs.context
        choice = self._broadcast_choice(requests, extra_context, matches, caps)
        info = batch.sampling_info  # logit processors and sampling masks read whole blocks
        returns_masks = getattr(info, "sampling_mask_batch_indices", None) is not None
        is_equal = info.has_custom_logit_processor or returns_masks
        plan = plan_lengths(self._backends, choice.lengths, choice.copies, is_equal)
        choice = choice._replace(lengths=plan.layout.num_draft_tokens)
        if choice.draft_slots < plan.verify_len - 1:
            choice = choice._replace(draft_slots=0)  # the backends verify more than these blocks have
        work = self.chooser.work(choice, extra_context)
        plan = plan._replace(
            draws=draws,
            caps=caps,
            matches=matches,
            draft_slots=choice.draft_slots,
            requests=requests,
            work=work,
        )
        self._count_cycle(plan)
        self._log(choice)
        self._held_for, self._num_held = for_what, choice.num_cycles - 1 if is_known.all() else 0
        self._passed = matches if work.verified else matches.max()
        if self._num_held:
            # Of a cycle that drafts nothing there is nothing to learn, and no match to compare.
            self._held = plan._replace(matches=NO_REQUESTS.rows, work=work if work.verified else NO_WORK)
        return plan

    def plans_of_each_layout(self, max_requests: int) -> Iterator[CyclePlan]:
        """Yield a cycle of unlike lengths, then a whole block. Each is to run before the next.

        Buffers hold `max_requests` requests. If that is one, both cycles are whole blocks.
        """
        most = self.chooser.max_draft_tokens
        for n in min(2, max_requests), 1:
            yield plan_lengths(self._backends, np.resize((most, 0), n), np.zeros(n, dtype=bool))

    def _count_cycle(self, plan: CyclePlan) -> None:
        self._verify_len = plan.verify_len
        self._num_cycles += 1
        self._cycles_per_verify_len[plan.verify_len] += 1
        if plan.verify_len > 1 and not plan.copies.all():
            self._cycles_per_draft_slots[plan.draft_slots or self.chooser.max_draft_tokens] += 1
        self._blocks_per_length.update(plan.layout.num_draft_tokens.tolist())
        self._metrics.count_width(plan.verify_len)

    def _log(self, choice: Choice) -> None:
        lengths = choice.lengths
        if self._num_cycles >= self._next_log and choice.seconds:
            self._next_log = self._num_cycles + self._log_every
            logger.info(
                "DFLASH verifies %d drafted tokens for %d requests, %d at most: %.2f tokens each and %.1f ms "
                "a cycle expected (measured over expected time so far: %.2f). Blocks by verified tokens: %s.",
                lengths.sum(),
                len(lengths),
                self._verify_len - 1,
                choice.tokens / len(lengths),
                1e3 * choice.seconds,
                self._measured / self._expected if self._expected else np.nan,
                ", ".join(f"{length}: {n}" for length, n in sorted(self._blocks_per_length.items())),
            )

    def _describe(self, batch: Any, draws_drafts: bool) -> BatchRequests:
        rows = table_rows(batch)
        key = rows.tolist(), draws_drafts, self._num_prefills
        if self._requests.key == key:
            return self._requests
        modes = np.array([_mode(req, draws_drafts) for req in batch.reqs])
        return BatchRequests(key, rows, self._row_generation[rows], modes)

    def _broadcast_choice(
        self, requests: BatchRequests, extra_context: int, matches: np.ndarray, caps: np.ndarray
    ) -> Choice:
        """Return rank 0's choice. Others may differ, and ranks that disagree hang."""
        n = len(requests.rows)
        choice = Choice(np.zeros(n, dtype=np.int64), np.zeros(n, dtype=bool), 0.0, 0.0)
        if self._tp_group.rank_in_group == 0:
            choice = self.chooser.choose(requests, extra_context, matches, caps)
        if self._tp_group.world_size > 1:
            rows = (
                choice.lengths,
                choice.copies,
                np.full(n, choice.num_cycles),
                np.full(n, choice.draft_slots),
            )
            sent = torch.from_numpy(np.stack(rows).astype(np.int64))
            torch.distributed.broadcast(sent, src=self._tp_group.ranks[0], group=self._tp_group.cpu_group)
            lengths, copies, (num_cycles, *_), (draft_slots, *_) = sent.tolist()
            choice = choice._replace(
                lengths=np.array(lengths),
                copies=np.array(copies) > 0,
                num_cycles=num_cycles,
                draft_slots=draft_slots,
            )
        return choice

    def on_launched(self, plan: CyclePlan) -> None:
        """Stop timing."""
        self._clock.stop(plan.work)

    def _learn_timings(self) -> None:
        for work, seconds in self._clock.finished():
            if not work.requests:
                continue
            self._measured += seconds
            self._expected += self.chooser.costs.expected(work)
            self.chooser.costs.observe(work, seconds)

    def on_accept_lens(
        self, plan: CyclePlan, accept_lens: Sequence[int], proposals: Proposals | None
    ) -> None:
        """Learn from the accepted drafted tokens of each request, and where its block came from."""
        if not plan.work.requests:
            return
        requests, accepted = plan.requests, np.asarray(accept_lens)
        rows, modes, verified = requests.rows, requests.modes, plan.max_accept
        same: Any = slice(None)
        if requests.key[2] != self._num_prefills:
            same = self._row_generation[rows] == requests.generations
            rows, modes, accepted, verified = rows[same], modes[same], accepted[same], verified[same]
        if proposals is not None and proposals.right is not None:
            lengths, right = proposals.lengths.numpy()[same], proposals.right.numpy()[same]
            self._learn_copies(
                rows,
                modes=modes,
                expected=plan.matches[same],
                lengths=lengths,
                right=right,
                accepted=accepted,
            )
            verified = np.where((lengths <= 0) & ~plan.copies[same], verified, 0)
        self.chooser.drafts.learn(
            rows, modes=modes, drafted=verified, accepted=accepted, is_narrow=plan.draft_slots > 0
        )

    def _learn_copies(
        self,
        rows: np.ndarray,
        modes: np.ndarray,
        expected: np.ndarray,
        lengths: np.ndarray,
        right: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Learn from matches, used or not. The choice knew of matches of `expected` lengths."""
        seen = np.minimum(np.minimum(right, accepted) + 1, self.chooser.max_draft_tokens)
        goes_on = right > accepted
        longer = np.minimum(np.abs(lengths) + right, LONGEST_MATCH)
        self._expected_matches[rows] = np.where(goes_on, longer, UNKNOWN_MATCH)
        some = (expected > 0) & (seen > 0)
        if some.any():
            self.chooser.copies.learn(modes[some], expected[some], seen[some], np.minimum(right, seen)[some])

    def report(self) -> dict:
        """Return plain numbers for /server_info."""
        time_ratio = round(self._measured / self._expected, 3) if self._expected else None
        copies = {}
        if DFlashOptions.COPY_AHEAD.get():
            averages = self.chooser.copies.averages[:, SHORTEST_MATCH:].round(3)
            copies = {"copy_accept_probs": dict(zip(MODES, averages.tolist(), strict=True))}
        return copies | {
            "width": self._verify_len,
            "expected": self._expected_per_verify_len(),
            "candidates": self.chooser.costs.verify_lens.tolist(),
            "cycles_per_width": {str(width): n for width, n in sorted(self._cycles_per_verify_len.items())},
            "cycles_per_draft_slots": {
                str(slots): n for slots, n in sorted(self._cycles_per_draft_slots.items())
            },
            "blocks_per_length": {str(length): n for length, n in sorted(self._blocks_per_length.items())},
            "probes": self.chooser.num_probes,
            "measured_over_expected_time": time_ratio,
            "accept_probs": dict(zip(MODES, self.chooser.drafts.averages.round(3).tolist(), strict=True)),
        }

    def _expected_per_verify_len(self) -> dict[str, dict[str, float]]:
        """Return the time of a cycle of the latest batch, by a verify length for all."""
        n, expected = len(self._requests.rows), {}
        costs = self.chooser.costs
        verify, draft = costs.verify(n), costs.draft(n)
        for verify_len in costs.verify_lens.tolist() if n else ():
            seconds = verify[n * (verify_len - 1)] + draft[n if verify_len > 1 else 0]
            expected[str(verify_len)] = {"cycle_ms": round(1e3 * float(seconds), 3)}
        return expected


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


LengthPlanner = WholeBlocks | AdaptiveLengths
