"""Timers of cycles and of verifies, at start-up."""

import functools
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.observer import CycleObserver
from sglang_dflash.srt.speculative.cycle.plan import CyclePlan
from sglang_dflash.srt.speculative.cycle.verify import verify
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput
from sglang_dflash.srt.speculative.width.controller import Backends, plan_lengths
from sglang_dflash.srt.speculative.width.estimates import CycleClock

_REPEATS = 5
_STEADY = 1.2  # samples of a quiet machine, over the least of them
_OVERLAPPED_CYCLES = 2  # timed together on a GPU
# Committed tokens of all requests with which the cost of one is measured: enough that it shows.
_MANY_TOKENS = {"cpu": 8192, "cuda": 131072}


def feasible_context(worker: Any, wanted: int) -> int:
    """Return `wanted` committed tokens, or fewer if two blocks would have no room behind them."""
    runner = worker.target_worker.model_runner
    longest = min(runner.model_config.context_len, runner.max_total_num_tokens)
    return max(1, min(wanted, longest - 2 * worker.block_size))


class _DraftClock(CycleClock, CycleObserver):
    """Times the drafts of cycles, from `start` on."""

    def on_drafted(self, batch: Any, cycle: Any, block: Any) -> None:
        self.stop()


class CycleTimer:
    """Times the worker's cycles. n: requests. context: committed tokens of each."""

    def __init__(
        self, worker: Any, backends: Backends, verify_lens: tuple[int, ...], draft_slots: Sequence[int] = ()
    ):
        self._worker, self._backends, self._verify_lens = worker, backends, verify_lens
        self._draft_slots = draft_slots
        self.runner = worker.target_worker.model_runner

    @contextmanager
    def _own_kv_slots(self, requests: int, context: int) -> Iterator[None]:
        """Point the first rows of the request table at unused slots of the pool.

        There may be fewer slots than needed. Requests that all read one slot are cheaper than they will be.
        """
        table, page = self.runner.req_to_token_pool.req_to_token, self.runner.page_size or 1
        whole_pool = self.runner.max_total_num_tokens // page * page
        length = -(-(context + 2 * self._worker.block_size) // page) * page
        length = min(length, table.shape[1], whole_pool)
        starts = page + torch.arange(requests, device=table.device) % (whole_pool // length) * length
        before = table[:requests, :length].clone()
        table[:requests, :length] = starts[:, None] + torch.arange(length, device=table.device)
        yield
        table[:requests, :length] = before

    def time_loads(
        self, cycles: Sequence[tuple[int, ...]], loads: list[int], context: int, budget: float
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return each cycle's seconds, its draft's [loads, cycles], and which loads are steady.

        Seconds are the least of some samples. Loads take turns, so that a second in which the machine does
        something else spoils one sample of each and not all samples of one. A load is steady if most samples
        are near the least.
        """
        deadline = time.perf_counter() + budget
        samples: list[list[np.ndarray]] = []  # of each load, [repeats][2, cycles]
        with self._own_kv_slots(loads[-1], context):
            for n in loads:
                start = time.perf_counter()
                samples.append([self._time_cycles(cycles, n, context)])
                if 2 * time.perf_counter() - start >= deadline:  # a larger load takes at least as long
                    break
            for n, of_load in [*zip(loads, samples, strict=False)] * (_REPEATS - 1):
                if time.perf_counter() >= deadline:
                    break
                of_load.append(self._time_cycles(cycles, n, context))
        least = np.stack([np.min(of_load, axis=0) for of_load in samples], axis=1)
        spread = [
            np.median(np.array(of_load)[:, 0] / seconds)
            for of_load, seconds in zip(samples, least[0], strict=True)
        ]
        is_steady = np.array([len(of_load) > 2 for of_load in samples]) & (np.array(spread) < _STEADY)
        return least[0], least[1], is_steady

    def time_context(self, n: int, context: int, budget: float) -> float:
        """Return the seconds that a committed token beyond `context` adds to a verify.

        0 if contexts can hardly be longer. Attention reads a context once, however many rows query
        it, and a cycle that drafts also reads the draft's. So the shortest and the longest verify are
        measured together: at one length and moment, memory time says little if other processes use it.
        """
        longer = feasible_context(self._worker, _MANY_TOKENS[self._worker.device] // n)
        if longer < 2 * context:
            return 0.0
        deadline = time.perf_counter() + budget
        added: list[float] = []  # seconds of both cycles together
        cycles = [(self._verify_lens[0] - 1,), (self._verify_lens[-1] - 1,)]
        with self._own_kv_slots(n, longer):
            for _ in range(_REPEATS):
                short, long = (self._time_cycles(cycles, n, length)[0].sum() for length in (context, longer))
                added.append(float(long - short))
                if time.perf_counter() >= deadline:
                    break
        draft_pool = self._worker.draft_worker.model_runner.token_to_kv_pool
        draft_share = draft_pool.mem_usage / self.runner.token_to_kv_pool.mem_usage
        num_reads = len(cycles) + draft_share * sum(map(any, cycles))
        return max(float(np.median(added)), 0.0) / (n * (longer - context)) / num_reads

    @torch.no_grad()
    def _time_cycles(self, cycles: Sequence[tuple[int, ...]], n: int, context: int) -> np.ndarray:
        """Return the seconds of each cycle, and of its draft. [2, cycles]

        A cycle is given by the drafted tokens that its requests verify, in turn. The last, which is one of
        the widest, comes first: what a narrow cycle leaves to the next costs that one least. The first cycle
        of a length is not timed: it may have to run what the previous one left, and finds memory laid out for
        another length.
        """
        seconds = []
        for in_turn in reversed(cycles):
            plan = plan_lengths(self._backends, np.resize(in_turn, n), np.zeros(n, dtype=bool))
            draft_slots = min((slots for slots in self._draft_slots if slots >= max(in_turn)), default=0)
            plan = plan._replace(draft_slots=draft_slots)
            run = functools.partial(self._run, plan=plan)
            timed = _OVERLAPPED_CYCLES if self._worker.device == "cuda" else 1
            batches = [make_batch(self._worker, n, context) for _ in range(1 + timed)]
            seconds.append(seconds_overlapped(self._worker, run, batches))
        return np.array(seconds[::-1]).T

    def _run(self, batch: Any, plan: CyclePlan) -> None:
        self._worker.run_cycle(batch, plan, self._worker.copies.look_up(batch))


class VerifyTimer(CycleTimer):
    """Times verifies without drafts, for which the draft needs no graphs yet."""

    def _run(self, batch: Any, plan: CyclePlan) -> None:
        drafter, size = self._worker.drafter, plan.verify_len
        cycle = Cycle.begin(batch, self.runner, drafter.mask_token_id, size)
        tokens = torch.zeros_like(cycle.tokens)
        verify(self._worker.target_worker, batch, cycle.with_layout(plan.layout), DraftBlock(tokens))


def seconds_overlapped(worker: Any, run: Callable[[Any], Any], batches: Sequence[Any]) -> tuple[float, float]:
    """Return the seconds of a cycle, and of its draft, without those of the first batch.

    On a GPU the host prepares a cycle while the one before runs, as it does while serving.
    """
    clock, draft_clock = CycleClock(worker.device), _DraftClock(worker.device)
    run(batches[0])
    worker.observers = [draft_clock]
    clock.start()
    for batch in batches[1:]:
        draft_clock.start()
        run(batch)
    clock.stop()
    worker.observers = []
    if worker.device == "cuda":
        torch.cuda.synchronize()
    [(_, of_cycles)] = clock.finished()
    of_drafts = sum(seconds for _, seconds in draft_clock.finished())
    return of_cycles / len(batches[1:]), of_drafts / len(batches[1:])


def make_batch(worker: Any, num_requests: int, context: int, **sampling: Any) -> ScheduleBatch:
    """Make a decode batch of requests with `context` committed tokens each.

    Args:
        worker: the `DFlashWorker`.
        num_requests: number of requests, in the first rows of the request table.
        context: committed tokens of each.
        **sampling: SGLang's sampling parameters. None: greedy.
    """
    runner = worker.target_worker.model_runner
    params = SamplingParams(**(sampling or {"temperature": 0}))
    params.normalize(None)
    reqs = [Req(str(i), "", array("q", [0]), params) for i in range(num_requests)]
    lengths = torch.full((num_requests,), context, dtype=torch.int64)
    on_device = lengths.to(runner.device)
    batch = ScheduleBatch(
        reqs=reqs,
        model_config=runner.model_config,
        device=runner.device,
        req_to_token_pool=runner.req_to_token_pool,
        req_pool_indices=torch.arange(num_requests, device=runner.device),
        req_pool_indices_cpu=torch.arange(num_requests),
        seq_lens=on_device,
        seq_lens_cpu=lengths,
        multimodal_inputs=[None] * num_requests,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=DFlashDraftInput(bonus_tokens=torch.zeros_like(on_device), new_seq_lens=on_device),
        can_run_decode_cuda_graph=True,
    )
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, runner.model_config.vocab_size)
    return batch
