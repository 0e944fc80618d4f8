"""Start of `--speculative-adaptive`: backends, graphs and measured costs per width."""

import functools
import logging
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_observability
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.srt.layers.attention.flashinfer_plans import accepts_bounds
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput
from sglang_dflash.srt.speculative.width.adaptive import AdaptiveWidth, FixedWidth
from sglang_dflash.srt.speculative.width.backends import TargetBackends, captured_sizes, has_room_for_widths
from sglang_dflash.srt.speculative.width.chooser import WidthChooser
from sglang_dflash.srt.speculative.width.clock import CycleClock
from sglang_dflash.srt.speculative.width.copies import CopyWidths
from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import SurvivalEstimate
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings

logger = logging.getLogger(__name__)

_CONTEXT = 128  # committed tokens of a request in the measurement
_REPEATS = 5
_OVERLAPPED_CYCLES = 2  # timed together on a GPU
# Seconds after which each load is measured once and the larger ones are left out. Ignored with several ranks:
# one rank cannot decide that alone.
_BUDGET_S = 8.0
# The cost of a committed token is measured with few requests of long contexts, so many tokens in all that it
# shows.
_FEW_REQUESTS = 8
_MANY_TOKENS = {"cpu": 8192, "cuda": 131072}


def make_width(worker: Any, tp_group: Any, metrics: Any, has_copies: bool) -> AdaptiveWidth | FixedWidth:
    """Choose verify lengths by the server's options: measured and adaptive, or whole blocks.

    worker: the `DFlashWorker`, whose runners have their pools, backends and graphs. has_copies: whether it
    proposes copies.
    """
    settings, block_size = AdaptiveSettings.from_environment(), worker.block_size
    if settings is None or (widths := settings.widths(block_size, worker.device)) == (block_size,):
        return FixedWidth(block_size)
    runner = worker.target_worker.model_runner
    if not has_room_for_widths(runner, len(widths) - 1, tp_group):
        return FixedWidth(block_size)
    backends = TargetBackends(runner, widths, block_size)
    skips_draft = has_copies and worker.drafter.writes_context_apart
    budget = float("inf") if tp_group.world_size > 1 else _BUDGET_S
    costs = _measure(worker, backends, widths, skips_draft, budget)
    backends.apply(block_size)
    num_rows = runner.req_to_token_pool.req_to_token.shape[0]
    chooser = WidthChooser(costs, SurvivalEstimate(num_rows, block_size - 1), settings)
    clock = CycleClock(runner.device)
    log_every = get_observability().decode_log_interval
    copies = CopyWidths(costs, num_rows, block_size - 1, skips_draft) if has_copies else None
    return AdaptiveWidth(
        chooser, backends, clock, num_rows, tp_group, settings.schedule, log_every, metrics, copies
    )


def _measure(
    worker: Any, backends: TargetBackends, widths: tuple[int, ...], skips_draft: bool, budget: float
) -> CostTable:
    timer, start = _CycleTimer(worker, backends, widths), time.perf_counter()
    loads = _loads(timer.runner)
    context = timer.feasible_context(_CONTEXT)
    cycles = [(width, True) for width in widths]
    if skips_draft:
        cycles.append((widths[-1], False))
    seconds = timer.time_loads(cycles, loads, context, budget)
    loads = loads[: len(seconds)]
    draft = np.maximum(seconds[:, len(widths) - 1] - seconds[:, -1], 0.0)  # zeros if it is always run
    seconds = seconds[:, : len(widths)]
    few = max(n for n in loads if n <= max(_FEW_REQUESTS, loads[0]))
    reads = timer.time_reads(few, context, budget / 4)
    logger.info(
        "DFLASH adaptive: widths %s measured for %s requests in %.1f s; ms a cycle: %s; us for each further "
        "committed token: %s; ms of a draft that copies may replace: %s.",
        list(widths),
        loads,
        time.perf_counter() - start,
        (1e3 * seconds).round(2).tolist(),
        (1e6 * reads).round(3).tolist(),
        (1e3 * draft).round(2).tolist(),
    )
    waits = worker.device != "cpu" and not all(map(accepts_bounds, worker.spec_v2_attn_backends))
    padded = bool(captured_sizes(timer.runner))
    return CostTable(np.array(loads), np.array(widths), seconds, padded, reads, context, waits, draft)


def _loads(runner: Any) -> list[int]:
    """Return the numbers of requests to measure: captured ones, a factor of two apart."""
    most = runner.max_running_requests
    known = [n for n in captured_sizes(runner) if n <= most]
    known = known or [*(n for n in (1, 4, 16, 64, 256) if n < most), most]
    loads: list[int] = []
    for n in known:
        if not loads or n >= 2 * loads[-1] or n == known[-1]:
            loads.append(n)
    return loads


class _CycleTimer:
    """Times the worker's cycles. n: requests. context: committed tokens of each.

    A cycle is its width, and whether the draft runs.
    """

    def __init__(self, worker: Any, backends: TargetBackends, widths: tuple[int, ...]):
        self._worker, self._backends, self._widths = worker, backends, widths
        self.runner = worker.target_worker.model_runner

    def feasible_context(self, wanted: int) -> int:
        longest = min(self.runner.model_config.context_len, self.runner.max_total_num_tokens)
        return min(wanted, longest - 2 * self._worker.block_size)

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
        self, cycles: list[tuple[int, bool]], loads: list[int], context: int, budget: float
    ) -> np.ndarray:
        """Return the seconds of each cycle, the least of some samples. [loads, cycles]

        Loads take turns, so that a second in which the machine does something else spoils one sample of each
        and not all samples of one.
        """
        deadline = time.perf_counter() + budget
        samples: list[list[list[float]]] = []  # of each load, [repeats][cycles]
        with self._own_kv_slots(loads[-1], context):
            for n in loads:
                self._time_cycles(cycles, n, context)  # warms up
                samples.append([self._time_cycles(cycles, n, context)])
                if time.perf_counter() >= deadline:
                    break
            for n, of_load in [*zip(loads, samples, strict=False)] * (_REPEATS - 1):
                if time.perf_counter() >= deadline:
                    break
                of_load.append(self._time_cycles(cycles, n, context))
        return np.array([np.min(of_load, axis=0) for of_load in samples])

    def time_reads(self, n: int, context: int, budget: float) -> np.ndarray:
        """Return the seconds that a committed token beyond `context` adds. [widths]

        Zeros if contexts can hardly be longer. Attention reads a context once, however many rows query it,
        and a cycle that drafts also reads the draft's. So the cost of a byte is measured at all widths
        together: at one width and moment, memory time says little if other processes use it.
        """
        longer = self.feasible_context(_MANY_TOKENS[self._worker.device] // n)
        if longer < 2 * context:
            return np.zeros(len(self._widths))
        deadline = time.perf_counter() + budget
        added: list[float] = []  # seconds of all widths together
        cycles = [(width, True) for width in self._widths]
        with self._own_kv_slots(n, longer):
            for repeat in range(1 + _REPEATS):
                short, long = (sum(self._time_cycles(cycles, n, length)) for length in (context, longer))
                if repeat > 0:  # the first warms up
                    added.append(long - short)
                    if time.perf_counter() >= deadline:
                        break
        draft_pool = self._worker.draft_worker.model_runner.token_to_kv_pool
        draft_share = draft_pool.mem_usage / self.runner.token_to_kv_pool.mem_usage
        reads = np.where(np.array(self._widths) > 1, 1 + draft_share, 1.0)
        return max(float(np.median(added)), 0.0) / (n * (longer - context)) * reads / reads.sum()

    @torch.no_grad()
    def _time_cycles(self, cycles: list[tuple[int, bool]], n: int, context: int) -> list[float]:
        """Return the seconds of each cycle.

        The last, which is a widest, comes first: what a narrow cycle leaves to the next costs that one least.
        The first cycle of a width is not timed: it may have to run what the previous one left, and finds
        memory laid out for another width.
        """
        seconds = []
        for width, drafts in reversed(cycles):
            self._backends.apply(width)
            run = functools.partial(self._worker.run_cycle, verify_len=width, draws=False, drafts=drafts)
            if self._worker.device == "cpu":
                run(_make_batch(self._worker, n, context))
                batch = _make_batch(self._worker, n, context)
                start = time.perf_counter()
                run(batch)
                seconds.append(time.perf_counter() - start)
            else:
                batches = [_make_batch(self._worker, n, context) for _ in range(1 + _OVERLAPPED_CYCLES)]
                seconds.append(_seconds_overlapped(run, batches))
        return seconds[::-1]


def _seconds_overlapped(run: Callable[[Any], Any], batches: Sequence[Any]) -> float:
    """Return the seconds of a cycle on a GPU, without those of the first batch.

    The host prepares a cycle while the GPU runs the one before, as it does while serving.
    """
    clock = CycleClock("cuda")
    run(batches[0])
    clock.start()
    for batch in batches[1:]:
        run(batch)
    clock.stop(0, 0, 0)
    torch.cuda.synchronize()
    [timing] = clock.finished()
    return timing.seconds / len(batches[1:])


def _make_batch(worker: Any, num_requests: int, context: int) -> ScheduleBatch:
    """Make a decode batch of greedy requests with `context` committed tokens each."""
    runner = worker.target_worker.model_runner
    params = SamplingParams(temperature=0)
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
        seq_lens=on_device,
        seq_lens_cpu=lengths,
        multimodal_inputs=[None] * num_requests,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=DFlashDraftInput(bonus_tokens=torch.zeros_like(on_device), new_seq_lens=on_device),
        can_run_decode_cuda_graph=True,
    )
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, runner.model_config.vocab_size)
    return batch
