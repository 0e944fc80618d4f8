"""`--speculative-adaptive` at the end of start-up: backends and graphs per width, and what each width
costs."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_observability
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.kernels.ops.speculative.accept import accept_greedy
from sglang_dflash.srt.speculative.acceptance.greedy import Verdict
from sglang_dflash.srt.speculative.dflash_info import Cycle, DFlashDraftInput, DFlashVerifyInput
from sglang_dflash.srt.speculative.drafters.base import DraftBlock
from sglang_dflash.srt.speculative.width.adaptive import AdaptiveWidth, FixedWidth
from sglang_dflash.srt.speculative.width.chooser import WidthChooser
from sglang_dflash.srt.speculative.width.clock import CycleClock
from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import SurvivalEstimate
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings
from sglang_dflash.srt.speculative.width.states import WidthStates, captured_sizes

logger = logging.getLogger(__name__)

_CONTEXT = 128  # committed tokens of a request that costs are measured with
_REPEATS = 5
_BUDGET_S = 8.0  # after which each load is measured once, and the larger ones are left out; one rank cannot decide that alone
# What a committed token more costs is measured with few requests of long contexts, so many tokens in all that
# it shows.
_FEW_REQUESTS = 8
_MANY_TOKENS = {"cpu": 8192, "cuda": 131072}


def start_adaptive(worker, settings: AdaptiveSettings, tp_group, metrics) -> AdaptiveWidth | FixedWidth:
    """Once the worker's runners have their pools, backends and graphs. worker: the `DFlashWorker`."""
    runner, block_size = worker.target_worker.model_runner, worker.verify_width
    widths = settings.widths(block_size)
    if widths == (block_size,):
        return FixedWidth(block_size)
    states = WidthStates(runner, widths, block_size)
    states.begin()
    loads = _loads(runner)
    began = time.perf_counter()
    context = _longest(runner, block_size, _CONTEXT)
    budget = _BUDGET_S if tp_group.world_size == 1 else float("inf")
    with _slots_of_their_own(runner, loads[-1], context + 2 * block_size):
        seconds = _measure(worker, states, loads, context, widths, budget)
    measured = loads[: len(seconds)]
    few = max(n for n in measured if n <= max(_FEW_REQUESTS, measured[0]))
    reads = _measure_reads(worker, states, few, context, widths, budget / 4)
    states.apply(block_size, 1)
    logger.info(
        "DFLASH adaptive: widths %s measured for %s requests in %.1f s; ms a cycle: %s; us more for each committed token: %s.",
        list(widths),
        measured,
        time.perf_counter() - began,
        (1e3 * seconds).round(2).tolist(),
        (1e6 * reads).round(3).tolist(),
    )
    padded = bool(captured_sizes(runner))
    waits = worker.device != "cpu" and any(
        backend.needs_cpu_seq_lens for backend in worker.spec_v2_attn_backends
    )
    costs = CostTable(np.array(measured), np.array(widths), seconds, padded, reads, context, waits)
    rows = runner.req_to_token_pool.req_to_token.shape[0]
    chooser = WidthChooser(costs, SurvivalEstimate(rows, block_size - 1), settings.constants)
    clock = CycleClock(runner.device)
    log_every = get_observability().decode_log_interval
    return AdaptiveWidth(chooser, states, clock, rows, tp_group, settings.schedule, log_every, metrics)


def _loads(runner) -> list[int]:
    """Numbers of running requests to measure: captured ones where there are any, about a factor of two
    apart."""
    most = runner.max_running_requests
    known = [n for n in captured_sizes(runner) if n <= most] or [
        n for n in (1, 4, 16, 64, 256) if n < most
    ] + [most]
    loads: list[int] = []
    for n in known:
        if not loads or n >= 2 * loads[-1] or n == known[-1]:
            loads.append(n)
    return loads


def _longest(runner, block_size: int, wanted: int) -> int:
    """So many committed tokens of a request, or as many as there may be."""
    return min(
        wanted, runner.model_config.context_len - 2 * block_size, runner.max_total_num_tokens - 2 * block_size
    )


@contextmanager
def _slots_of_their_own(runner, requests: int, length: int) -> Iterator[None]:
    """Has the first rows of the request table name slots of the pool that nobody has yet, as many as there
    are: requests that all read one slot are cheaper than they will be."""
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
    worker, states: WidthStates, loads: list[int], context: int, widths: tuple[int, ...], budget: float
) -> np.ndarray:
    """Seconds of a cycle with so many committed tokens of each request, the least of some, [loads, widths].
    Loads take turns, so that a second in which the machine does something else spoils one sample of each and
    not all of one."""
    deadline = time.perf_counter() + budget
    samples: list[list[list[float]]] = []  # of each load, [repeats][widths]
    for n in loads:
        _turn(worker, states, n, context, widths)  # warms up
        samples.append([_turn(worker, states, n, context, widths)])
        if time.perf_counter() >= deadline:
            break
    for n, of_load in [*zip(loads, samples, strict=False)] * (_REPEATS - 1):
        if time.perf_counter() >= deadline:
            break
        of_load.append(_turn(worker, states, n, context, widths))
    return np.array([np.min(of_load, axis=0) for of_load in samples])


def _measure_reads(
    worker, states: WidthStates, n: int, context: int, widths: tuple[int, ...], budget: float
) -> np.ndarray:
    """Seconds that a cycle takes longer for each committed token more of its n requests than `context`,
    [widths]. Zeros where there can be hardly more.

    Attention reads a context once, however many rows ask; a cycle that drafts reads the draft's too. So what
    is measured is what a byte costs, at all widths together: what memory costs one width at one moment says
    little where others use it."""
    runner, block_size = worker.target_worker.model_runner, worker.verify_width
    longer = _longest(runner, block_size, _MANY_TOKENS[worker.device] // n)
    if longer < 2 * context:
        return np.zeros(len(widths))
    deadline = time.perf_counter() + budget
    more: list[float] = []  # a turn through all widths
    with _slots_of_their_own(runner, n, longer + 2 * block_size):
        for repeat in range(1 + _REPEATS):
            short, long = (_turn(worker, states, n, length, widths) for length in (context, longer))
            if repeat > 0:  # the first warms up
                more.append(sum(long) - sum(short))
                if time.perf_counter() >= deadline:
                    break
    target, draft = (
        runner.token_to_kv_pool.mem_usage for runner in (runner, worker.draft_worker.model_runner)
    )
    reads = np.where(np.array(widths) > 1, 1 + draft / target, 1.0)
    return max(np.median(more), 0.0) / (n * (longer - context)) * reads / reads.sum()


@torch.no_grad()
def _turn(worker, states: WidthStates, n: int, context: int, widths: tuple[int, ...]) -> list[float]:
    """Seconds of a cycle at each width, from the widest on: what a narrow cycle leaves to the next costs that
    one least."""
    return [_timed(worker, states, n, context, width) for width in reversed(widths)][::-1]


def _timed(worker, states: WidthStates, n: int, context: int, width: int) -> float:
    """Of the second of two cycles: the first may have to run what the one before left, and finds memory laid
    out for another width."""
    states.apply(width, n)
    _run_cycle(worker, n, context, width)
    _wait(worker.device)
    began = time.perf_counter()
    _run_cycle(worker, n, context, width)
    _wait(worker.device)
    return time.perf_counter() - began


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _run_cycle(worker, n: int, context: int, width: int) -> None:
    """Draft, verify, accept and commit for n requests with so many committed tokens that say nothing."""
    device = worker.device
    lengths = torch.full((n,), context, dtype=torch.int64)
    on_device = lengths.to(device)
    draft_input = DFlashDraftInput(bonus_tokens=torch.zeros_like(on_device), new_seq_lens=on_device)
    batch = SimpleNamespace(
        seq_lens=on_device,
        seq_lens_cpu=lengths,
        req_pool_indices=torch.arange(n, device=device),
        spec_info=draft_input,
        can_run_decode_cuda_graph=True,
    )
    cycle, block = worker.draft_block(batch, width, None)
    runner = worker.target_worker.model_runner
    target_out = _forward(runner, cycle, block)
    best, target_tokens = target_out.logits_output.next_token_logits.view(n, width, -1).max(dim=-1)
    accepted = accept_greedy(
        block.tokens, target_tokens, best, cycle.seq_lens, runner.model_config.vocab_size
    )
    verdict = Verdict(accepted.accept_len, target_tokens, accepted.bonus)
    worker.drafter.commit(cycle, worker.verify_tail.left_to_commit(target_out), verdict)


def _forward(runner, cycle: Cycle, block: DraftBlock) -> GenerationBatchResult:
    """The verify forward, without the scheduler's batch that the worker makes its own from."""
    tokens, positions = block.tokens.flatten(), cycle.positions.flatten()
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=cycle.bs,
        input_ids=tokens,
        req_pool_indices=cycle.req_pool_indices,
        seq_lens=cycle.seq_lens,
        out_cache_loc=cycle.cache_loc,
        seq_lens_sum=int(cycle.host_lens.sum()),
        seq_lens_cpu=cycle.host_lens,
        positions=positions,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=DFlashVerifyInput(
            cycle.width, CaptureHiddenMode.FULL, draft_token=tokens, positions=positions
        ),
        capture_hidden_mode=CaptureHiddenMode.FULL,
        global_num_token_non_padded_cpu=tokens.numel(),
        can_run_decode_cuda_graph=True,
    )
    cycle.kv_loc_plan.bind(forward_batch, runner.kv_index_translator, cols=cycle.write_cols)
    out = runner.forward(forward_batch)
    return GenerationBatchResult(logits_output=out.logits_output, can_run_cuda_graph=out.can_run_graph)
