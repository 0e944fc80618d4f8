"""Start of `--speculative-adaptive`: backends, graphs, and the measured costs of cycles."""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_lora, get_observability

from sglang_dflash.srt.layers.attention import ragged_rows
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle.measured import feasible_context, make_batch
from sglang_dflash.srt.speculative.cycle.observer import CycleObserver
from sglang_dflash.srt.speculative.cycle.plan import CyclePlan
from sglang_dflash.srt.speculative.cycle.ragged_graphs import (
    AnyRows,
    RowBackends,
    captured_sizes,
    reason_for_one_width,
)
from sglang_dflash.srt.speculative.width.controller import (
    AdaptiveLengths,
    Backends,
    CycleClock,
    LengthChooser,
    WholeBlocks,
    plan_lengths,
)
from sglang_dflash.srt.speculative.width.policy import Costs, Policy
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings

logger = logging.getLogger(__name__)

_CONTEXT = 128  # committed tokens of a request in the measurement
_NUM_LOADS = 4
# Seconds that the cycles may take; larger loads are left out. The cost of contexts comes on top. Ignored with
# several ranks: one rank cannot decide that alone.
_BUDGET_S = {"cpu": 4.0, "cuda": 8.0}
_FEW_REQUESTS = 8  # of long contexts, with which the cost of a committed token is measured
_MANY_TOKENS = {"cpu": 8192, "cuda": 131072}  # of these requests: enough that the cost shows


def settings_of_adaptive_lengths(worker: Any) -> AdaptiveSettings | None:
    """Return settings of adaptive lengths. None: all blocks are verified whole.

    `worker` is the `DFlashWorker`, whose target has its pools, backends and graphs.
    """
    settings, block_size = AdaptiveSettings.from_environment(), worker.block_size
    if settings is None or settings.verify_lens(block_size) == (block_size,):
        return None
    if reason := reason_for_whole_blocks(worker.target_worker.model_runner):
        logger.info("DFLASH verifies whole blocks: %s.", reason)
        return None
    return settings


def make_chooser(
    worker: Any, settings: AdaptiveSettings | None, tp_group: Any, metrics: DFlashMetrics
) -> LengthChooser:
    """Make what chooses verify lengths: without settings, whole blocks.

    Args:
        worker: the `DFlashWorker`, whose runners have their pools, backends and graphs.
        settings: of adaptive lengths.
        tp_group: rank 0 chooses for all of it.
        metrics: counts verify lengths.
    """
    block_size = worker.block_size
    if settings is None:
        return WholeBlocks(block_size)
    runner = worker.target_worker.model_runner
    if runner.decode_cuda_graph_runner is None:
        backends: Backends = AnyRows(has_layouts=worker.target_states.are_recurrent)
    else:
        backends = RowBackends.capture(runner, block_size)
    budget = math.inf if tp_group.world_size > 1 else _BUDGET_S[worker.device]
    costs = _measure(worker, backends, settings.verify_lens(block_size), budget)
    backends.select(np.array([block_size - 1]))
    num_rows = runner.req_to_token_pool.req_to_token.shape[0]
    policy = Policy(costs, num_rows, worker.drafter.writes_context_apart)
    return AdaptiveLengths(
        policy,
        backends=backends,
        clock=CycleClock(runner.device),
        tp_group=tp_group,
        metrics=metrics,
        log_every=get_observability().decode_log_interval,
    )


def reason_for_whole_blocks(runner: Any) -> str:
    """Return why all requests of a batch verify equally many tokens, or an empty text."""
    if getattr(runner.token_to_kv_pool, "post_capture_active", False):
        return (
            "with SGLANG_ENABLE_POST_CAPTURE_KV_SIZING the KV slots have no memory yet when cycles of other "
            "lengths would be measured"
        )
    backend = ragged_rows.full_attention(runner.attn_backend)
    if not isinstance(backend, ragged_rows.AnyRowsBackend) and (
        reason := reason_for_one_width(runner, backend)
    ):
        return reason
    if mambaish_config(runner.model_config) is not None and not ragged_rows.verifies_ragged_rows(
        runner.attn_backend
    ):
        return "the target's recurrent states are of blocks of one width"
    return "SGLang applies adapters to blocks of one width" if get_lora().enable_lora else ""


def _measure(worker: Any, backends: Backends, verify_lens: tuple[int, ...], budget: float) -> Costs:
    timer, start = CycleTimer(worker, backends), time.perf_counter()
    context, loads = feasible_context(worker, _CONTEXT), _loads(timer.runner)
    drafted = np.array(verify_lens) - 1
    cycles = [*((length,) for length in drafted.tolist()), (int(drafted[-1]), 0)]
    seconds, drafts = timer.time_loads(cycles, loads, context, budget)
    draft = drafts[:, :-1][:, drafted > 0].min(axis=1)
    verify = seconds[:, :-1] - np.where(drafted > 0, draft[:, None], 0.0)
    if drafted[0] == 0 and not worker.drafter.writes_context_apart:
        # The draft's forward writes the context of as many anchor-only cycles as a block has rows.
        verify[:, 0] += draft / worker.block_size
    measured = loads[: len(verify)]
    few = max(n for n in measured if n <= max(_FEW_REQUESTS, loads[0]))
    per_token = timer.time_context(few, context, int(drafted[-1]))
    costs = Costs(
        measured,
        verify_lens=verify_lens,
        verify=verify,
        draft=draft,
        mixed=seconds[:, -1],
        sizes=getattr(backends, "sizes", ()),  # of graphs keyed by rows
        context=context,
        seconds_per_token=per_token,
    )
    logger.info(
        "DFLASH adaptive: widths %s measured for %s requests in %.1f s; ms a cycle without its draft: %s; ms "
        "of drafting for all: %s; us for each further committed token: %.3f; ms of lengths that differ: %s.",
        list(verify_lens),
        measured,
        time.perf_counter() - start,
        (1e3 * verify).round(2).tolist(),
        (1e3 * draft).round(2).tolist(),
        1e6 * per_token,
        [round(1e3 * costs.of_load(n)[2], 2) for n in measured],
    )
    return costs


def _loads(runner: Any) -> list[int]:
    """Return the numbers of requests to measure, about equal factors apart."""
    most = runner.max_running_requests
    captured = [n for n in captured_sizes(runner) if n <= most] or range(1, most + 1)
    spread = np.geomspace(1, captured[-1], _NUM_LOADS).round().astype(int).tolist()
    return sorted({next(n for n in captured if n >= load) for load in spread})


class _DraftClock(CycleClock, CycleObserver):
    """Times the drafts of cycles, from `start` on."""

    def on_drafted(self, batch: Any, cycle: Any, block: Any) -> None:
        self.stop()


class CycleTimer:
    """Times the worker's cycles. n: requests. context: committed tokens of each."""

    def __init__(self, worker: Any, backends: Backends):
        self._worker, self._backends = worker, backends
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
        self, cycles: Sequence[tuple[int, ...]], loads: Sequence[int], context: int, budget: float
    ) -> np.ndarray:
        """Return the seconds of each cycle, and of its draft. [2, first loads, cycles]

        A cycle is given by the drafted tokens that its requests verify, in turn. Its seconds are the least of
        two. The second is timed when all loads have had their first, so that other work spoils one of them.
        Loads that the budget has no time for are left out, but for the first.
        """
        samples: dict[int, np.ndarray] = {}
        deadline = time.perf_counter() + budget
        with self._own_kv_slots(loads[-1], context):
            for n in loads:
                start = time.perf_counter()
                samples[n] = self._time_cycles(cycles, n, context)
                if 2 * time.perf_counter() - start >= deadline:  # a larger load takes at least as long
                    break
            for n in samples:
                if time.perf_counter() < deadline:
                    samples[n] = np.minimum(samples[n], self._time_cycles(cycles, n, context))
        return np.stack([*samples.values()], axis=1)

    def time_context(self, n: int, context: int, length: int) -> float:
        """Return the seconds that a committed token beyond `context` adds to a verify.

        The draft of the measured cycle, with `length` verified tokens each, reads its context too. 0 if
        contexts can hardly be longer.
        """
        longer = feasible_context(self._worker, _MANY_TOKENS[self._worker.device] // n)
        if longer < 2 * context:
            return 0.0
        with self._own_kv_slots(n, longer):
            pairs = [
                [self._time_cycles([(length,)], n, c)[0, 0] for c in (context, longer)] for _ in range(2)
            ]
        short, long = np.min(pairs, axis=0)
        draft_pool = self._worker.draft_worker.model_runner.token_to_kv_pool
        num_reads = 1 + draft_pool.mem_usage / self.runner.token_to_kv_pool.mem_usage
        return max(float(long - short), 0.0) / (n * (longer - context)) / num_reads

    @torch.no_grad()
    def _time_cycles(self, cycles: Sequence[tuple[int, ...]], n: int, context: int) -> np.ndarray:
        """Return the seconds of each cycle, and of its draft. [2, cycles]

        The longest is the last and comes first: leftovers of the cycle before it then weigh least.
        """
        seconds = []
        for in_turn in reversed(cycles):
            plan = plan_lengths(self._backends, np.resize(in_turn, n), np.zeros(n, dtype=bool))
            seconds.append(self._time(plan, n, context))
        return np.array(seconds[::-1]).T

    def _time(self, plan: CyclePlan, n: int, context: int) -> tuple[float, float]:
        """Return the seconds of a cycle, and of its draft.

        A cycle that is not timed runs before it: the first finds memory laid out for another length. On a GPU
        the host prepares the timed one meanwhile, as it does while serving.
        """
        worker = self._worker
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
        return clock.finished()[-1][1], draft_clock.finished()[-1][1]
