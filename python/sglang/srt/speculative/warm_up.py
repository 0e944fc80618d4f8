"""Cycles at start-up, which compile kernels outside CUDA graphs and allocate memory.

Triton and FlashInfer compile a kernel when it is first launched. All requests would wait for it.
"""

import logging
from typing import Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_disagg, get_parallel

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.speculative.acceptance.constraints import Penalties
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks
from sglang_dflash.srt.speculative.cycle.measured import feasible_context, make_batch
from sglang_dflash.srt.speculative.cycle.plan import CyclePlan
from sglang_dflash.srt.speculative.width.controller import LengthChooser

logger = logging.getLogger(__name__)

_SAMPLED = dict(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01)
_PENALIZED = dict(**_SAMPLED, frequency_penalty=0.1)
# Requests of the cycles: sampling parameters, whether no drafted token may be accepted, and the least length.
_REQUESTS: tuple[tuple[dict[str, Any], bool, int], ...] = (
    ({}, False, 0),
    ({}, True, 0),
    (_PENALIZED, False, 0),
    (_PENALIZED, False, 1),
)


def warm_up(worker: Any, lengths: LengthChooser) -> int:
    """Run the cycles of `worker`, the `DFlashWorker`, and warn if they fail.

    The start still ends if serving could not go on: without memory, with a device that an error has left
    unusable, and with several ranks, where another one may wait in a collective.

    Returns:
        The peak bytes of a sampled cycle of all requests, or a bound of it if no cycle could run.
    """
    runner = worker.target_worker.model_runner
    # The logits, the target's probabilities, and as much again for what is sorted of them.
    peak = 3 * runner.max_running_requests * worker.block_size * runner.model_config.vocab_size * 4
    runs_none = DFlashOptions.BASIC_MODE.get() or get_disagg().disaggregation_mode == "prefill"
    if runs_none or worker.draft_parallel_layout.local_dp:  # which asks ranks with other requests
        return peak
    synchronize = torch.get_device_module(worker.device).synchronize
    penalties, observers = worker.penalties, worker.observers
    worker.observers = []
    try:
        _run_cycles(worker, lengths)
        peak = _run_largest_cycle(worker)
        synchronize()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if get_parallel().tp_size > 1:
            raise
        synchronize()  # raises again if the device is unusable
        logger.warning(
            "DFLASH: the cycles at start-up failed, so kernels are compiled while requests wait: %s: %s",
            type(error).__name__,
            error,
            exc_info=error,
        )
    finally:
        worker.penalties, worker.observers = penalties, observers
    return peak


@torch.no_grad()
def _run_cycles(worker: Any, lengths: LengthChooser) -> None:
    """Run cycles, greedy, capped, sampled with penalties and a least length, of every layout.

    The requests' rows of SGLang's table are empty: their KV goes to SGLang's padding slot.
    """
    # P-EAGLE runs the rows of the last cycle again, at positions before these.
    context = feasible_context(worker, worker.block_size)
    target_runner = worker.target_worker.model_runner
    for plan in lengths.warm_up_plans(target_runner.max_running_requests):
        bs = plan.layout.bs
        # Its table of counts has a row per request and a column per token, which most servers never need.
        worker.penalties = Penalties(bs, target_runner.model_config.vocab_size, worker.device)
        for sampling, is_capped, min_new_tokens in _REQUESTS:
            batch = make_batch(worker, bs, context, **sampling)
            if sampling:
                batch.sampling_info.acc_additive_penalties = torch.empty(0)  # SGLang's sign of penalties
                batch.reqs[0].sampling_params.min_new_tokens = min_new_tokens
            caps = np.full(bs, 0 if is_capped else worker.block_size - 1)
            _run_cycle(worker, batch, plan._replace(caps=caps))


def _run_cycle(worker: Any, batch: Any, plan: CyclePlan) -> None:
    matches = worker.copies.look_up(batch)
    draws = worker.acceptor.draws_drafts(batch.sampling_info)
    worker.run_cycle(batch, plan._replace(draws=draws), matches)


@torch.no_grad()
def _run_largest_cycle(worker: Any) -> int:
    """Run a sampled cycle of all requests, and return its peak bytes.

    Its memory then belongs to PyTorch's allocator. If it is too much for the GPU, the server fails now and
    not under load. Whole blocks are the last layout of `_run_cycles`.
    """
    bs = worker.target_worker.model_runner.max_running_requests
    batch = make_batch(worker, bs, feasible_context(worker, worker.block_size), **_SAMPLED)
    plan = CyclePlan(whole_blocks(bs, worker.block_size), caps=np.full(bs, worker.block_size - 1))
    before = 0
    if worker.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    _run_cycle(worker, batch, plan)
    return int(torch.cuda.max_memory_allocated() - before)
