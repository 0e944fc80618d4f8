"""Start of `--speculative-adaptive`: backends, graphs and measured costs per width."""

import logging
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_observability
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput
from sglang_dflash.srt.speculative.width.adaptive import AdaptiveWidth, FixedWidth
from sglang_dflash.srt.speculative.width.chooser import WidthChooser
from sglang_dflash.srt.speculative.width.clock import CycleClock
from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import SurvivalEstimate
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings
from sglang_dflash.srt.speculative.width.states import WidthStates, captured_sizes

logger = logging.getLogger(__name__)

_CONTEXT = 128  # committed tokens of a request in the measurement
_REPEATS = 5
# Seconds after which each load is measured once and the larger ones are left out. Ignored with several ranks:
# one rank cannot decide that alone.
_BUDGET_S = 8.0
# The cost of a committed token is measured with few requests of long contexts, so many tokens in all that it
# shows.
_FEW_REQUESTS = 8
_MANY_TOKENS = {"cpu": 8192, "cuda": 131072}


def make_width(worker: Any, tp_group: Any, metrics: Any) -> AdaptiveWidth | FixedWidth:
    """Choose verify lengths by the server's options: measured and adaptive, or whole blocks."""
    settings = AdaptiveSettings.from_environment()
    if settings is None:
        return FixedWidth(worker.block_size)
    return start_adaptive(worker, settings, tp_group, metrics)


def start_adaptive(
    worker: Any, settings: AdaptiveSettings, tp_group: Any, metrics: Any
) -> AdaptiveWidth | FixedWidth:
    """Measure all widths once the runners have their pools, backends and graphs.

    worker: the `DFlashWorker`.
    """
    runner, block_size = worker.target_worker.model_runner, worker.block_size
    widths = settings.widths(block_size)
    if widths == (block_size,):
        return FixedWidth(block_size)
    states = WidthStates(runner, widths, block_size)
    states.begin()
    loads = _loads(runner)
    start = time.perf_counter()
    context = _feasible_context(runner, block_size, _CONTEXT)
    budget = _BUDGET_S if tp_group.world_size == 1 else float("inf")
    with _own_kv_slots(runner, loads[-1], context + 2 * block_size):
        seconds = _measure(worker, states, loads, context, widths, budget)
    measured = loads[: len(seconds)]
    few = max(n for n in measured if n <= max(_FEW_REQUESTS, measured[0]))
    reads = _measure_reads(worker, states, few, context, widths, budget / 4)
    states.apply(block_size, 1)
    logger.info(
        "DFLASH adaptive: widths %s measured for %s requests in %.1f s; ms a cycle: %s; us for each further "
        "committed token: %s.",
        list(widths),
        measured,
        time.perf_counter() - start,
        (1e3 * seconds).round(2).tolist(),
        (1e6 * reads).round(3).tolist(),
    )
    padded = bool(captured_sizes(runner))
    waits = worker.device != "cpu" and any(
        backend.needs_cpu_seq_lens for backend in worker.spec_v2_attn_backends
    )
    costs = CostTable(np.array(measured), np.array(widths), seconds, padded, reads, context, waits)
    num_rows = runner.req_to_token_pool.req_to_token.shape[0]
    chooser = WidthChooser(costs, SurvivalEstimate(num_rows, block_size - 1), settings)
    clock = CycleClock(runner.device)
    log_every = get_observability().decode_log_interval
    return AdaptiveWidth(chooser, states, clock, num_rows, tp_group, settings.schedule, log_every, metrics)


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


def _feasible_context(runner: Any, block_size: int, wanted: int) -> int:
    """Return so many committed tokens of a request, or as many as there may be."""
    longest = min(runner.model_config.context_len, runner.max_total_num_tokens)
    return min(wanted, longest - 2 * block_size)


@contextmanager
def _own_kv_slots(runner: Any, requests: int, length: int) -> Iterator[None]:
    """Point the first rows of the request table at unused slots of the pool.

    There may be fewer slots than needed. Requests that all read one slot are cheaper than they will be.
    """
    table, page = runner.req_to_token_pool.req_to_token, runner.page_size or 1
    whole_pool = runner.max_total_num_tokens // page * page
    length = min(-(-length // page) * page, table.shape[1], whole_pool)
    places = whole_pool // length
    starts = page + torch.arange(requests, device=table.device) % places * length
    before = table[:requests, :length].clone()
    table[:requests, :length] = starts[:, None] + torch.arange(length, device=table.device)
    yield
    table[:requests, :length] = before


def _measure(
    worker: Any, states: WidthStates, loads: list[int], context: int, widths: tuple[int, ...], budget: float
) -> np.ndarray:
    """Return the seconds of a cycle, the least of some samples. [loads, widths]

    Loads take turns, so that a second in which the machine does something else spoils one sample of each and
    not all samples of one.
    """
    deadline = time.perf_counter() + budget
    samples: list[list[list[float]]] = []  # of each load, [repeats][widths]
    for n in loads:
        _time_widths(worker, states, n, context, widths)  # warms up
        samples.append([_time_widths(worker, states, n, context, widths)])
        if time.perf_counter() >= deadline:
            break
    for n, of_load in [*zip(loads, samples, strict=False)] * (_REPEATS - 1):
        if time.perf_counter() >= deadline:
            break
        of_load.append(_time_widths(worker, states, n, context, widths))
    return np.array([np.min(of_load, axis=0) for of_load in samples])


def _measure_reads(
    worker: Any, states: WidthStates, n: int, context: int, widths: tuple[int, ...], budget: float
) -> np.ndarray:
    """Return the seconds that a committed token beyond `context` adds. [widths]

    Zeros if contexts can hardly be longer. Attention reads a context once, however many rows query it, and a
    cycle that drafts also reads the draft's. So the cost of a byte is measured at all widths together: at one
    width and moment, memory time says little if other processes use it.
    """
    runner, block_size = worker.target_worker.model_runner, worker.block_size
    longer = _feasible_context(runner, block_size, _MANY_TOKENS[worker.device] // n)
    if longer < 2 * context:
        return np.zeros(len(widths))
    deadline = time.perf_counter() + budget
    added: list[float] = []  # seconds of all widths together
    with _own_kv_slots(runner, n, longer + 2 * block_size):
        for repeat in range(1 + _REPEATS):
            short, long = (
                sum(_time_widths(worker, states, n, length, widths)) for length in (context, longer)
            )
            if repeat > 0:  # the first warms up
                added.append(long - short)
                if time.perf_counter() >= deadline:
                    break
    draft_runner = worker.draft_worker.model_runner
    draft_share = draft_runner.token_to_kv_pool.mem_usage / runner.token_to_kv_pool.mem_usage
    reads = np.where(np.array(widths) > 1, 1 + draft_share, 1.0)
    return max(float(np.median(added)), 0.0) / (n * (longer - context)) * reads / reads.sum()


@torch.no_grad()
def _time_widths(
    worker: Any, states: WidthStates, n: int, context: int, widths: tuple[int, ...]
) -> list[float]:
    """Return the seconds of a cycle at each width.

    The widest comes first: what a narrow cycle leaves to the next costs that one least. Of two cycles the
    second is timed: the first may have to run what the previous one left, and finds memory laid out for
    another width.
    """
    seconds = []
    for width in reversed(widths):
        states.apply(width, n)
        for _ in range(2):
            batch = _make_batch(worker, n, context)
            start = time.perf_counter()
            worker.run_cycle(batch, width, draws=False)
            _wait(worker.device)
        seconds.append(time.perf_counter() - start)
    return seconds[::-1]


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


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
