"""Start of `--speculative-adaptive`: backends, graphs, and the measured costs of cycles."""

import logging
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_observability

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.attention import ragged_rows
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle import ragged_graphs
from sglang_dflash.srt.speculative.cycle.measured import feasible_context, make_batch
from sglang_dflash.srt.speculative.cycle.observer import CycleObserver
from sglang_dflash.srt.speculative.width import controller
from sglang_dflash.srt.speculative.width.controller import CycleClock, LengthChooser, plan_lengths
from sglang_dflash.srt.speculative.width.policy import Costs, Policy

logger = logging.getLogger(__name__)

_CONTEXT, _NUM_LOADS = 128, 4  # committed tokens of a request in the measurement, and loads of it
# Seconds that cycles may take, or larger loads are left out. Several ranks would disagree, and have no limit.
_BUDGET_S = 8.0
_FEW_REQUESTS = 8  # of long contexts, with which the cost of a committed token is measured
_MANY_TOKENS = {"cpu": 8192, "cuda": 131072}  # of these requests: enough that the cost shows


def lens_to_measure(worker: Any) -> tuple[int, ...]:
    """Return the numbers of slots to measure; none if all blocks are verified whole."""
    verify_lens = DFlashOptions.ADAPTIVE.get()
    if verify_lens in ((), (worker.block_size,)):
        return ()
    if reason := _reason_for_whole_blocks(worker.target_worker.model_runner):
        logger.info("DFLASH verifies whole blocks: %s.", reason)
        return ()
    return verify_lens


def _reason_for_whole_blocks(runner: Any) -> str | None:
    if getattr(runner.token_to_kv_pool, "post_capture_active", False):
        return "KV slots have no memory yet to measure on, with SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
    attention, backend = ragged_rows.full_attention(runner.attn_backend), runner.attn_backend
    is_any = getattr(attention, "takes_any_rows", False)
    if not is_any and (reason := ragged_graphs.reason_for_one_width(runner, attention)):
        return reason
    if mambaish_config(runner.model_config) is not None and not ragged_rows.verifies_ragged_rows(backend):
        return "the target's recurrent states are of blocks of one width"
    return None


def make_chooser(
    worker: Any, verify_lens: tuple[int, ...], tp_group: Any, metrics: DFlashMetrics
) -> LengthChooser:
    """Make what chooses verify lengths, by the costs of `verify_lens`: of none, whole blocks.

    The runners of `worker`, the `DFlashWorker`, have their pools, backends and graphs. Rank 0 of `tp_group`
    chooses for all of it.
    """
    block_size, runner = worker.block_size, worker.target_worker.model_runner
    if not verify_lens:
        return controller.WholeBlocks(block_size)
    if runner.decode_cuda_graph_runner is None:
        backends: Any = ragged_graphs.AnyRows(reads_counts=worker.target_states.are_recurrent)
    else:
        backends = ragged_graphs.RowBackends.capture(runner, block_size)
    budget = math.inf if tp_group.world_size > 1 else _BUDGET_S
    costs = _measure(worker, backends, verify_lens, budget)
    backends.select(np.array([block_size - 1]))
    return controller.AdaptiveLengths(
        Policy(costs, runner.req_to_token_pool.req_to_token.shape[0], worker.drafter.writes_context_apart),
        backends=backends,
        clock=CycleClock(runner.device),
        tp_group=tp_group,
        metrics=metrics,
        log_every=get_observability().decode_log_interval,
    )


def _measure(worker: Any, backends: Any, verify_lens: tuple[int, ...], budget: float) -> Costs:
    timer, start = CycleTimer(worker, backends), time.perf_counter()
    target, context = worker.target_worker.model_runner, feasible_context(worker, _CONTEXT)
    loads, drafted = _loads(target), np.array(verify_lens) - 1
    cycles = [*((length,) for length in drafted.tolist()), (int(drafted[-1]), 0)]
    seconds, drafts = timer.time_loads(cycles, loads, context, budget)
    draft = drafts[:, :-1][:, drafted > 0].min(axis=1)
    verify = seconds[:, :-1] - np.where(drafted > 0, draft[:, None], 0.0)
    if drafted[0] == 0 and not worker.drafter.writes_context_apart:
        # The draft's forward writes the context of as many anchor-only cycles as a block has rows.
        verify[:, 0] += draft / worker.block_size
    loads = loads[: len(verify)]
    few, per_token = max(n for n in loads if n <= max(_FEW_REQUESTS, loads[0])), 0.0
    longer = feasible_context(worker, _MANY_TOKENS[worker.device] // few)
    if longer >= 2 * context:  # else contexts can hardly be longer
        [[[long]], _] = timer.time_loads(cycles[-2:-1], [few], longer, math.inf)
        draft_pool = worker.draft_worker.model_runner.token_to_kv_pool
        num_reads = 1 + draft_pool.mem_usage / target.token_to_kv_pool.mem_usage  # the draft reads it too
        further = max(0.0, float(long - seconds[loads.index(few), -2]))
        per_token = further / (few * (longer - context) * num_reads)
    costs = Costs(
        loads,
        verify_lens=verify_lens,
        verify=verify,
        draft=draft,
        mixed=seconds[:, -1],
        sizes=getattr(backends, "sizes", ()),  # of graphs keyed by rows
        context=context,
        seconds_per_token=per_token,
    )
    ragged = np.array([costs.of_load(n)[2] for n in loads])
    ms = [(1e3 * part).round(2).tolist() for part in (verify, draft, ragged)]
    said = (
        "DFLASH adaptive: widths %s measured for %s requests in %.1f s; us for each further committed token: "
        "%.3f; ms a cycle without its draft: %s; ms of drafting for all: %s; ms of lengths that differ: %s."
    )
    logger.info(said, list(verify_lens), loads, time.perf_counter() - start, 1e6 * per_token, *ms)
    return costs


def _loads(runner: Any) -> list[int]:
    """Return the numbers of requests to measure, about equal factors apart."""
    most = runner.max_running_requests
    captured = [n for n in ragged_graphs.captured_sizes(runner) if n <= most] or range(1, most + 1)
    spread = np.geomspace(1, captured[-1], _NUM_LOADS).round().astype(int).tolist()
    return sorted({next(n for n in captured if n >= load) for load in spread})


class _DraftClock(CycleClock, CycleObserver):
    """Times the drafts of cycles, from `start` on."""

    def on_drafted(self, batch: Any, cycle: Any, block: Any) -> None:
        self.stop()


class CycleTimer:
    """Times the worker's cycles. n: requests. context: committed tokens of each."""

    def __init__(self, worker: Any, backends: Any):
        self._worker, self._backends = worker, backends

    def time_loads(
        self, cycles: Sequence[tuple[int, ...]], loads: Sequence[int], context: int, budget: float
    ) -> np.ndarray:
        """Return the seconds of each cycle, and of its draft. [2, first loads, cycles]

        A cycle is given by the drafted tokens that its requests verify, in turn. Its seconds are the least of
        two, timed with all loads in between, so that other work spoils one of them. Loads that the budget
        has no time for are left out, but for the first two, from which those of the others follow.
        """
        runner, most = self._worker.target_worker.model_runner, loads[-1]
        table, page = runner.req_to_token_pool.req_to_token, runner.page_size or 1
        # The first rows get unused slots of the pool, as far as there are: to read one slot is cheaper.
        whole_pool = runner.max_total_num_tokens // page * page
        length = min(-(-(context + 2 * self._worker.block_size) // page) * page, table.shape[1], whole_pool)
        starts = page + torch.arange(most, device=table.device) % (whole_pool // length) * length
        before = table[:most, :length].clone()
        table[:most, :length] = starts[:, None] + torch.arange(length, device=table.device)
        samples: dict[int, np.ndarray] = {}
        deadline, took = time.perf_counter() + budget, 0.0
        for n in (*loads, *loads):
            start, is_new = time.perf_counter(), n not in samples
            if len(samples) < 2 or start + took * is_new < deadline:  # a larger load takes at least as long
                samples[n] = np.minimum(samples.get(n, math.inf), self._time(cycles, n, context))
                took = time.perf_counter() - start
        table[:most, :length] = before
        return np.stack([*samples.values()], axis=1)

    @torch.no_grad()
    def _time(self, cycles: Sequence[tuple[int, ...]], n: int, context: int) -> np.ndarray:
        """Return the seconds of each cycle, and of its draft. [2, cycles]

        Each runs twice, as the first time finds memory laid out for another length. On a GPU the host
        prepares the second meanwhile, as it does while serving. The longest is the last and comes first:
        leftovers of the cycle before it then weigh least.
        """
        worker, seconds = self._worker, []
        for lengths in reversed(cycles):
            plan = plan_lengths(self._backends, np.resize(lengths, n))
            clock, draft_clock = CycleClock(worker.device), _DraftClock(worker.device)
            worker.observers = [draft_clock]
            for batch in [make_batch(worker, n, context) for _ in range(2)]:
                clock.start()
                draft_clock.start()
                worker.run_cycle(batch, plan, worker.copies.look_up(batch))
                clock.stop()
            worker.observers = []
            if worker.device == "cuda":
                torch.cuda.synchronize()
            seconds.append([each.finished()[-1][1] for each in (clock, draft_clock)])
        return np.array(seconds[::-1]).T
