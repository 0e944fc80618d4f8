"""The worker's side of the verify lengths: chosen before a cycle, learned from after it.

Nothing here waits for the device. Accept lengths and cycle times arrive one or two cycles later.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_dflash.kernels.ops.speculative.copy_ahead import LONGEST_MATCH
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle.host import table_rows
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks
from sglang_dflash.srt.speculative.cycle.plan import CyclePlan, Proposals
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests, Prompts
from sglang_dflash.srt.speculative.cycle.ragged_graphs import AnyRows, RowBackends
from sglang_dflash.srt.speculative.drafters.copies import UNKNOWN
from sglang_dflash.srt.speculative.width.policy import UNKNOWN_MATCH, Choice, Policy

logger = logging.getLogger(__name__)


def plan_lengths(
    backends: AnyRows | RowBackends, lengths: np.ndarray, copies: Any = False, needs_rectangle: bool = False
) -> CyclePlan:
    """Have the backends verify `lengths` drafted tokens, or as many of all, and plan it."""
    layout = backends.select(lengths, needs_rectangle)
    return CyclePlan(layout, copies=copies & (layout.num_draft_tokens > 0))


class WholeBlocks:
    """Verifies the whole block in every cycle, and learns nothing."""

    def __init__(self, block_size: int):
        self._block_size = block_size

    begin_prefill = admit_prefilled = on_launched = on_accept_lens = lambda *_: None
    report: Any = staticmethod(dict)  # nothing for /server_info

    def choose(self, batch: Any, draws: bool, matches: np.ndarray, caps: np.ndarray) -> CyclePlan:
        """Plan whole blocks."""
        return CyclePlan(whole_blocks(len(batch.reqs), self._block_size), draws, caps=caps)

    def warm_up_plans(self, max_requests: int) -> Iterator[CyclePlan]:
        """Yield a whole block, the only layout of rows that requests may have."""
        yield CyclePlan(whole_blocks(1, self._block_size))


class Trial(NamedTuple):
    """A cycle to learn from, once its seconds and its accept lengths are known."""

    plan: CyclePlan
    rows: np.ndarray  # of the request table. [n]
    generations: np.ndarray  # which request each row held. [n]
    expected: float  # seconds, at start-up's pace


@dataclass(eq=False)
class AdaptiveLengths:
    """Verifies as many drafted tokens in each cycle as pay off."""

    policy: Policy
    backends: AnyRows | RowBackends  # the target's
    clock: "CycleClock"  # times the cycles
    tp_group: Any  # rank 0 chooses for all of it
    metrics: DFlashMetrics  # counts verify lengths
    log_every: int  # cycles from one log line to the next

    def __post_init__(self) -> None:
        self._expected_matches = np.full(self.policy.num_rows, UNKNOWN_MATCH)  # if the host cannot read
        self._row_generation = np.zeros(self.policy.num_rows, dtype=np.int64)
        self._trials: deque[Trial] = deque()  # whose accept lengths are not known, in order
        self._cycles_per_verify_len, self._blocks_per_length = Counter[int](), Counter[int]()

    def begin_prefill(self, prompts: Prompts) -> None:
        """Start the new requests of a prefill."""
        self._start(prompts.table_rows[: len(prompts.new_reqs)])
        # SGLang's graphs of prefills are captured with the backend of whole blocks.
        self.backends.select(np.zeros(1, dtype=np.int64), needs_rectangle=True)

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """Start requests that another server has prefilled."""
        self._start(requests.table_rows)

    def _start(self, rows: np.ndarray) -> None:
        self.clock.interrupt()
        self._row_generation[rows] += 1
        self._expected_matches[rows] = UNKNOWN_MATCH
        self.policy.acceptance.reset(rows)

    def choose(self, batch: Any, draws: bool, matches: np.ndarray, caps: np.ndarray) -> CyclePlan:
        """Choose what the next cycle drafts and verifies.

        Args:
            batch: the scheduler's.
            draws: whether drafted tokens are drawn.
            matches: lengths of the requests' matches, of `Matches`. [n]
            caps: most drafted tokens that each request may accept. [n]
        """
        for trial, seconds in self.clock.finished():
            self.policy.pace.observe(trial.plan.verify_len == 1, trial.expected, seconds)
        rows = table_rows(batch)
        matches = np.where(matches != UNKNOWN, matches, self._expected_matches[rows])
        # As of a cycle or two ago; the batch's own lengths may not be on the host.
        num_tokens = sum([req.kv.kv_committed_len for req in batch.reqs])
        extra_context = num_tokens - len(rows) * self.policy.costs.context
        group, sent = self.tp_group, np.zeros((2, len(rows)), dtype=np.int64)
        if group.rank_in_group == 0:  # others might choose otherwise, and ranks that disagree hang
            sent[:] = self.policy.choose(rows, extra_context, matches, caps)
        if group.world_size > 1:
            torch.distributed.broadcast(torch.from_numpy(sent), group.ranks[0], group.cpu_group)
        info = batch.sampling_info  # logit processors and sampling masks read whole blocks
        returns_masks = getattr(info, "sampling_mask_batch_indices", None) is not None
        is_equal = info.has_custom_logit_processor or returns_masks
        plan = plan_lengths(self.backends, sent[0], sent[1] > 0, is_equal)._replace(draws=draws, caps=caps)
        lengths, verify_len = plan.layout.num_draft_tokens, plan.verify_len
        # Rows that a graph has beyond the choice may be a request's. The costs end with the largest choice.
        paid = np.minimum(lengths, self.policy.max_draft_tokens)
        expected = self.policy.seconds(Choice(paid, plan.copies), extra_context)
        self._trials.append(Trial(plan, rows, self._row_generation[rows], expected))
        self.metrics.count_width(verify_len)
        self._cycles_per_verify_len[verify_len] += 1
        self._blocks_per_length.update(lengths.tolist())
        if self._cycles_per_verify_len.total() % self.log_every == 0:
            said = "DFLASH verifies %d drafted tokens for %d requests. Blocks by verified tokens: %s."
            logger.info(said, lengths.sum(), len(lengths), _by_key(self._blocks_per_length))
        return plan

    def warm_up_plans(self, max_requests: int) -> Iterator[CyclePlan]:
        """Yield a cycle of unlike lengths if two requests fit, then a whole block, to run in turn."""
        most = self.policy.max_draft_tokens
        for n, is_whole in (min(2, max_requests), False), (1, True):
            yield plan_lengths(self.backends, np.resize((most, 0), n), needs_rectangle=is_whole)

    def on_launched(self) -> None:
        """Stop timing the cycle that was chosen last."""
        self.clock.stop(self._trials[-1])

    def on_accept_lens(self, accept_lens: Sequence[int], proposals: Proposals | None) -> None:
        """Learn from the oldest cycle: the accepted tokens of each request, and its match."""
        plan, rows, generations, _ = self._trials.popleft()
        is_same = self._row_generation[rows] == generations
        parts = rows, plan.max_accept, plan.copies, np.asarray(accept_lens)
        rows, verified, copies, accepted = (part[is_same] for part in parts)
        self.policy.acceptance.learn(rows, np.where(copies, 0, verified), accepted)
        if proposals is None:
            return
        # A match that was passed over may still be one. A copy goes on if all of it was accepted.
        lengths = np.abs(proposals.lengths.numpy()[is_same])
        lengths = np.where(copies, np.where(accepted < verified, 0, lengths + accepted), lengths)
        self._expected_matches[rows] = lengths.clip(UNKNOWN_MATCH, LONGEST_MATCH)

    def report(self) -> dict:
        """Return plain numbers for /server_info."""
        return {
            "candidates": self.policy.costs.verify_lens.tolist(),
            "cycles_per_width": _by_key(self._cycles_per_verify_len),
            "blocks_per_length": _by_key(self._blocks_per_length),
            "probes": self.policy.num_probes,
            "accept_probs": self.policy.acceptance.averages.round(3).tolist(),
        }


def _by_key(counter: Counter[int]) -> dict[str, int]:
    return {str(key): n for key, n in sorted(counter.items())}


LengthChooser = WholeBlocks | AdaptiveLengths


class CycleClock:
    """Times each cycle from the end of the one before it, on a GPU by CUDA events."""

    def __init__(self, device: str):
        self._is_cuda = device != "cpu"
        self._pending: deque[tuple[Any, Any, Any]] = deque()
        self._since: Any = None  # the moment that the cycle under way is timed from, if there is one

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin here, whatever ran before."""
        self._since = self._now()

    def stop(self, cycle: Any = None) -> None:
        """End this cycle. The next begins here."""
        end = self._now()
        if self._since is not None:
            self._pending.append((cycle, self._since, end))
        self._since = end

    def interrupt(self) -> None:
        """Begin nowhere: something else runs, so the cycle that ends next is not timed."""
        self._since = None

    def finished(self) -> list[tuple[Any, float]]:
        """Return cycles and their seconds, as far as they are known by now, in order."""
        timings = []
        while self._pending and (not self._is_cuda or self._pending[0][-1].query()):
            cycle, start, end = self._pending.popleft()
            timings.append((cycle, 1e-3 * start.elapsed_time(end) if self._is_cuda else end - start))
        return timings
