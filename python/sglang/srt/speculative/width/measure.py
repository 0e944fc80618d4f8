"""Start of `--speculative-adaptive`: backends, graphs, and costs of verify lengths."""

import functools
import logging
import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.runtime_context import get_lora, get_observability
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.srt.hardware_backend.cpu.attention import TorchNativeSpecAttnBackend, full_attention
from sglang_dflash.srt.layers.attention.packed_rows import verifies_packed_rows
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.observer import CycleObserver
from sglang_dflash.srt.speculative.cycle.plan import CyclePlan
from sglang_dflash.srt.speculative.cycle.ragged_graphs import (
    AnyRows,
    RowBackends,
    captured_sizes,
    reason_for_one_width,
)
from sglang_dflash.srt.speculative.cycle.verify import verify
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput
from sglang_dflash.srt.speculative.width.break_even import AdaptiveFromBreakEven, break_even
from sglang_dflash.srt.speculative.width.controller import (
    AdaptiveLengths,
    Backends,
    LengthPlanner,
    WholeBlocks,
    plan_lengths,
)
from sglang_dflash.srt.speculative.width.estimates import KNOWN, CostTable, CycleClock
from sglang_dflash.srt.speculative.width.policy import LengthChooser
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings

logger = logging.getLogger(__name__)


_CONTEXT = 128  # committed tokens of a request in the measurement
_REPEATS = 5
_STEADY = 1.2  # samples of a quiet machine, over the least of them
_OVERLAPPED_CYCLES = 2  # timed together on a GPU
# Seconds that the cycles may take; larger loads are left out. The reads of contexts come on top. Ignored with
# several ranks: one rank cannot decide that alone.
_BUDGET_S = {"cpu": 1.6, "cuda": 8.0}
# The cost of a committed token is measured with few requests of long contexts, so many tokens in all that it
# shows.
_FEW_REQUESTS = 8
_MANY_TOKENS = {"cpu": 8192, "cuda": 131072}


def settings_of_adaptive_lengths(worker: Any) -> AdaptiveSettings | None:
    """Return settings of adaptive lengths. None: all blocks are verified whole.

    `worker` is the `DFlashWorker`, whose target has its pools, backends and graphs.
    """
    settings, block_size = AdaptiveSettings.from_environment(), worker.block_size
    if settings is None or settings.verify_lens(block_size, worker.device) == (block_size,):
        return None
    if reason := reason_for_whole_blocks(worker.target_worker.model_runner):
        logger.info("DFLASH verifies whole blocks: %s.", reason)
        return None
    return settings


def least_adaptive_load(worker: Any, settings: AdaptiveSettings | None, tp_group: Any) -> float:
    """Return the number of requests from which verify lengths are adaptive.

    Infinity: all blocks are whole. It is 1 on a CPU, whose rows always cost, and where the settings name
    candidates. Otherwise verifies of whole blocks are measured. A batch is padded to a captured size, so it
    is adaptive if that costs.

    Args:
        worker: the `DFlashWorker`, before the draft's graphs are captured.
        settings: of adaptive lengths.
        tp_group: rank 0 decides for all of it.
    """
    runner = worker.target_worker.model_runner
    if settings is None:
        return math.inf
    if runner.decode_cuda_graph_runner is None or settings.candidate_steps is not None:
        return 1
    loads = _loads(runner)
    seconds = torch.tensor(_seconds_of_whole_blocks(worker, loads))
    if tp_group.world_size > 1:
        torch.distributed.broadcast(seconds, src=tp_group.ranks[0], group=tp_group.cpu_group)
    found, free = break_even(loads, seconds.tolist()), runner.max_running_requests
    if found is not None:
        free = max((n for n in captured_sizes(runner) if n < found), default=0)
    logger.info(
        "DFLASH: rows are free up to %d requests, whose blocks are verified whole. Ms a verify of whole "
        "blocks of %s requests: %s.",
        free,
        loads,
        [round(1e3 * of_load, 2) for of_load in seconds.tolist()],
    )
    return math.inf if found is None else free + 1


def _seconds_of_whole_blocks(worker: Any, loads: list[int]) -> np.ndarray:
    """Return the seconds of a verify of whole blocks at each load. [L]"""
    timer, whole = _VerifyTimer(worker, AnyRows(), (worker.block_size,)), (worker.block_size - 1,)
    return timer.time_loads([whole], loads, feasible_context(worker, _CONTEXT), math.inf)[0][:, 0]


def make_planner(
    worker: Any, settings: AdaptiveSettings | None, least: float, tp_group: Any, metrics: DFlashMetrics
) -> LengthPlanner:
    """Make what chooses verify lengths: without settings, whole blocks.

    Args:
        worker: the `DFlashWorker`, whose runners have their pools, backends and graphs.
        settings: of adaptive lengths.
        least: requests from which lengths are adaptive.
        tp_group: rank 0 chooses for all of it.
        metrics: counts verify lengths.
    """
    block_size = worker.block_size
    if settings is None or math.isinf(least):
        return WholeBlocks(block_size)
    least = int(least)
    runner, verify_lens = worker.target_worker.model_runner, settings.verify_lens(block_size, worker.device)
    is_recurrent = mambaish_config(runner.model_config) is not None
    backends: Backends
    if runner.decode_cuda_graph_runner is None:
        backends = AnyRows(has_layouts=is_recurrent)
    else:
        backends = RowBackends.capture(runner, block_size, least)
    loads = [n for n in _loads(runner) if n >= least]
    budget = math.inf if tp_group.world_size > 1 else _BUDGET_S[worker.device]
    costs = _measure(worker, backends=backends, verify_lens=verify_lens, loads=loads, budget=budget)
    backends.follow(np.array([block_size - 1]))
    num_rows = runner.req_to_token_pool.req_to_token.shape[0]
    arguments: dict[str, Any] = dict(
        chooser=LengthChooser(costs, num_rows, settings.probe_share, worker.drafter.writes_context_apart),
        backends=backends,
        clock=CycleClock(runner.device),
        tp_group=tp_group,
        metrics=metrics,
        log_every=get_observability().decode_log_interval,
    )
    if least == 1:
        return AdaptiveLengths(**arguments)
    return AdaptiveFromBreakEven(least, WholeBlocks(block_size), **arguments)


def reason_for_whole_blocks(runner: Any) -> str:
    """Say why requests of one batch cannot verify different numbers of tokens, if so."""
    if getattr(runner.token_to_kv_pool, "post_capture_active", False):
        return (
            "with SGLANG_ENABLE_POST_CAPTURE_KV_SIZING the KV slots have no memory yet when cycles of other "
            "lengths would be measured"
        )
    backend = full_attention(runner.attn_backend)
    if not isinstance(backend, TorchNativeSpecAttnBackend) and (
        reason := reason_for_one_width(runner, backend)
    ):
        return reason
    if mambaish_config(runner.model_config) is not None and not verifies_packed_rows(runner.attn_backend):
        return "the target's recurrent states are of blocks of one width"
    return "SGLang applies adapters to blocks of one width" if get_lora().enable_lora else ""


def _measure(
    worker: Any, backends: Backends, verify_lens: tuple[int, ...], loads: list[int], budget: float
) -> CostTable:
    draft_slots = _draft_widths(worker, verify_lens)
    timer, start = _CycleTimer(worker, backends, verify_lens, draft_slots), time.perf_counter()
    context = feasible_context(worker, _CONTEXT)
    longest = verify_lens[-1] - 1
    cycles = [*((verify_len - 1,) for verify_len in verify_lens), (longest, 0)]
    seconds, drafts, is_steady = timer.time_loads(cycles, loads, context, budget)
    measured = len(seconds)
    # A load that was left out begins as the largest one measured, in proportion.
    factors = (np.array(loads) / loads[measured - 1])[measured:, None]
    seconds = np.concatenate((seconds, factors * seconds[-1]))
    drafts = np.concatenate((drafts, factors * drafts[-1]))
    tries = np.zeros(len(loads))
    tries[:measured] = KNOWN * is_steady
    drafted = np.array(verify_lens) - 1
    widths = np.searchsorted(draft_slots, drafted)
    of_widths = [
        np.where((drafted > 0) & (widths == width), drafts[:, :-1], np.inf).min(axis=1)
        for width in range(len(draft_slots))
    ]
    draft = np.stack(of_widths, axis=1)
    verify = seconds[:, :-1] - np.where(drafted > 0, draft[:, widths], 0.0)
    if verify_lens[0] == 1 and not worker.drafter.writes_context_apart:
        # The draft's forward writes the context of as many plain cycles as a block has rows.
        verify[:, 0] += draft[:, -1] / worker.block_size
    few = max(n for n in loads[:measured] if n <= max(_FEW_REQUESTS, loads[0]))
    reads = timer.time_reads(few, context, budget / 4)
    sizes = getattr(backends, "sizes", ())  # of graphs keyed by rows
    costs = CostTable(
        loads=np.array(loads),
        verify_lens=np.array(verify_lens),
        verify=verify,
        draft=draft,
        padded=not sizes and bool(captured_sizes(timer.runner)),
        reads=reads,
        context=context,
        sizes=sizes,
        mixed_sample=seconds[:, -1],
        tries=tries,
        draft_slots=draft_slots,
    )
    logger.info(
        "DFLASH adaptive: widths %s measured for %s requests in %.1f s; ms a cycle without its draft: %s; ms "
        "of drafting %s tokens for all: %s; us for each further committed token: %.3f; ms of lengths that "
        "differ: %s.",
        list(verify_lens),
        loads[:measured],
        time.perf_counter() - start,
        (1e3 * verify[:measured]).round(2).tolist(),
        draft_slots,
        (1e3 * draft[:measured]).round(2).tolist(),
        1e6 * reads,
        [round(1e3 * costs.ragged_overhead(n), 2) for n in loads[:measured]],
    )
    return costs


def _draft_widths(worker: Any, verify_lens: tuple[int, ...]) -> list[int]:
    """Return the drafted slots of blocks to choose from, ascending: about half of a block, and all.

    The half is a verify length, so that one cycle measures both.
    """
    drafted = [verify_len - 1 for verify_len in verify_lens]
    halves = [slots for slots in drafted if 0 < slots <= drafted[-1] // 2]
    return [*(halves[-1:] if worker.drafter.narrows_blocks else ()), drafted[-1]]


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


def feasible_context(worker: Any, wanted: int) -> int:
    """Return `wanted` committed tokens, or fewer if two blocks would have no room behind them."""
    runner = worker.target_worker.model_runner
    longest = min(runner.model_config.context_len, runner.max_total_num_tokens)
    return max(1, min(wanted, longest - 2 * worker.block_size))


class _DraftClock(CycleClock, CycleObserver):
    """Times the drafts of cycles, from `start` on."""

    def on_drafted(self, batch: Any, cycle: Any, block: Any) -> None:
        self.stop()


class _CycleTimer:
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

    def time_reads(self, n: int, context: int, budget: float) -> float:
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
        reads = len(cycles) + draft_share * sum(map(any, cycles))
        return max(float(np.median(added)), 0.0) / (n * (longer - context)) / reads

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
            draft_slots = min((slots for slots in self._draft_slots if slots >= max(in_turn)), default=None)
            plan = plan._replace(draft_slots=draft_slots)
            run = functools.partial(self._run, plan=plan)
            timed = _OVERLAPPED_CYCLES if self._worker.device == "cuda" else 1
            batches = [make_batch(self._worker, n, context) for _ in range(1 + timed)]
            seconds.append(seconds_overlapped(self._worker, run, batches))
        return np.array(seconds[::-1]).T

    def _run(self, batch: Any, plan: CyclePlan) -> None:
        self._worker.run_cycle(batch, plan)


class _VerifyTimer(_CycleTimer):
    """Times verifies without drafts, for which the draft needs no graphs yet."""

    def _run(self, batch: Any, plan: CyclePlan) -> None:
        drafter, size = self._worker.drafter, plan.verify_len
        cycle = Cycle.begin(batch, self.runner, drafter.mask_token_id, size)
        tokens = torch.zeros_like(cycle.tokens)
        verify(self._worker.target_worker, batch, cycle.packed(plan.layout), DraftBlock(tokens))


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
