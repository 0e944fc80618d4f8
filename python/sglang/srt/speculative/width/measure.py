"""Start of `--speculative-adaptive`: backends, graphs, and costs of verify lengths."""

import logging
import math
import time
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_lora, get_observability

from sglang_dflash.srt.layers.attention.ragged_rows import (
    AnyRowsBackend,
    full_attention,
    verifies_ragged_rows,
)
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle.ragged_graphs import (
    AnyRows,
    RowBackends,
    captured_sizes,
    reason_for_one_width,
)
from sglang_dflash.srt.speculative.width.break_even import AdaptiveFromBreakEven, break_even
from sglang_dflash.srt.speculative.width.controller import (
    AdaptiveLengths,
    Backends,
    LengthPlanner,
    WholeBlocks,
)
from sglang_dflash.srt.speculative.width.estimates import KNOWN, CostTable, CycleClock
from sglang_dflash.srt.speculative.width.extrapolation import extrapolate
from sglang_dflash.srt.speculative.width.policy import LengthChooser
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings
from sglang_dflash.srt.speculative.width.timers import CycleTimer, VerifyTimer, feasible_context

logger = logging.getLogger(__name__)


_CONTEXT = 128  # committed tokens of a request in the measurement
# Seconds that the cycles may take; larger loads are left out. The cost of contexts comes on top. Ignored with
# several ranks: one rank cannot decide that alone.
_BUDGET_S = {"cpu": 4.0, "cuda": 8.0}
_FEW_REQUESTS = 8  # of long contexts, with which the cost of a committed token is measured


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
    if found < math.inf:
        free = max((n for n in captured_sizes(runner) if n < found), default=0)
    logger.info(
        "DFLASH: rows are free up to %d requests, whose blocks are verified whole. Ms a verify of whole "
        "blocks of %s requests: %s.",
        free,
        loads,
        [round(1e3 * of_load, 2) for of_load in seconds.tolist()],
    )
    return math.inf if math.isinf(found) else free + 1


def _seconds_of_whole_blocks(worker: Any, loads: list[int]) -> np.ndarray:
    """Return the seconds of a verify of whole blocks at each load. [L]"""
    timer, whole = VerifyTimer(worker, AnyRows(), (worker.block_size,)), (worker.block_size - 1,)
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
    is_recurrent = worker.target_states.are_recurrent
    backends: Backends
    if runner.decode_cuda_graph_runner is None:
        backends = AnyRows(has_layouts=is_recurrent)
    else:
        backends = RowBackends.capture(runner, block_size, least)
    loads = [n for n in _loads(runner) if n >= least]
    budget = math.inf if tp_group.world_size > 1 else _BUDGET_S[worker.device]
    costs = _measure(worker, backends=backends, verify_lens=verify_lens, loads=loads, budget=budget)
    backends.select(np.array([block_size - 1]))
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
    """Return why all requests of a batch verify equally many tokens, or an empty text."""
    if getattr(runner.token_to_kv_pool, "post_capture_active", False):
        return (
            "with SGLANG_ENABLE_POST_CAPTURE_KV_SIZING the KV slots have no memory yet when cycles of other "
            "lengths would be measured"
        )
    backend = full_attention(runner.attn_backend)
    if not isinstance(backend, AnyRowsBackend) and (reason := reason_for_one_width(runner, backend)):
        return reason
    if mambaish_config(runner.model_config) is not None and not verifies_ragged_rows(runner.attn_backend):
        return "the target's recurrent states are of blocks of one width"
    return "SGLang applies adapters to blocks of one width" if get_lora().enable_lora else ""


def _measure(
    worker: Any, backends: Backends, verify_lens: tuple[int, ...], loads: list[int], budget: float
) -> CostTable:
    draft_slots = _draft_widths(worker, verify_lens)
    timer, start = CycleTimer(worker, backends, verify_lens, draft_slots), time.perf_counter()
    context = feasible_context(worker, _CONTEXT)
    longest = verify_lens[-1] - 1
    cycles = [*((verify_len - 1,) for verify_len in verify_lens), (longest, 0)]
    seconds, drafts, is_steady = timer.time_loads(cycles, loads, context, budget)
    measured = len(seconds)
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
        # The draft's forward writes the context of as many anchor-only cycles as a block has rows.
        verify[:, 0] += draft[:, -1] / worker.block_size
    few = max(n for n in loads[:measured] if n <= max(_FEW_REQUESTS, loads[0]))
    per_context_token = timer.time_context(few, context, budget / 4)
    sizes = getattr(backends, "sizes", ())  # of graphs keyed by rows
    costs = CostTable(
        loads=np.array(loads),
        verify_lens=np.array(verify_lens),
        verify=extrapolate(verify, loads, np.array(verify_lens)),
        draft=extrapolate(draft, loads, np.array(draft_slots) + 1),
        padded=not sizes and bool(captured_sizes(timer.runner)),
        seconds_per_context_token=per_context_token,
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
        1e6 * per_context_token,
        [round(1e3 * costs.ragged_overhead(n), 2) for n in loads[:measured]],
    )
    return costs


def _draft_widths(worker: Any, verify_lens: tuple[int, ...]) -> list[int]:
    """Return the drafted slots of the blocks to choose from: about half, and all.

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
