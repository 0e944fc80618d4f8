"""Cycles at start-up, which compile kernels outside CUDA graphs and allocate memory.

Triton and FlashInfer compile a kernel when it is first launched. All requests would wait for it.
"""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_disagg, get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.acceptance.constraints import Penalties
from sglang_dflash.srt.speculative.acceptance.rejection import draw_final_tokens
from sglang_dflash.srt.speculative.acceptance.target_sampling import (
    SamplingMasks,
    draw_target_tokens,
    slices_of_rows,
    target_probs,
)
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks
from sglang_dflash.srt.speculative.width.controller import LengthPlanner
from sglang_dflash.srt.speculative.width.timers import feasible_context, make_batch

logger = logging.getLogger(__name__)

_SAMPLED = dict(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, frequency_penalty=0.1)
# Requests of the cycles: sampling parameters, whether no drafted token may be accepted, and the least length.
_REQUESTS: tuple[tuple[dict[str, Any], bool, int], ...] = (
    ({}, False, 0),
    ({}, True, 0),
    (_SAMPLED, False, 0),
    (_SAMPLED, False, 1),
)


def runs_cycles_alone(layout: Any) -> bool:
    """Return whether a rank runs cycles, and without asking ranks with other requests.

    `layout` is that of the draft's ranks.
    """
    return not layout.local_dp and get_disagg().disaggregation_mode != "prefill"


def warm_up(worker: Any, planner: LengthPlanner) -> None:
    """Run start-up's cycles, and warn if they fail. Basic mode does without them.

    The start still ends if serving could not go on: without memory, with a device that an error has left
    unusable, and with several ranks, where another one may wait in a collective.

    Args:
        worker: the `DFlashWorker`, before it serves.
        planner: plans its cycles.
    """
    if DFlashOptions.BASIC_MODE.get():
        return
    synchronize = torch.get_device_module(worker.device).synchronize
    penalties, observers = worker.penalties, worker.observers
    worker.observers = []
    try:
        _run_cycles(worker, planner)
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


@torch.no_grad()
def _run_cycles(worker: Any, planner: LengthPlanner) -> None:
    """Run cycles, greedy, capped, sampled with penalties and a least length, of every layout.

    The requests' rows of SGLang's table are empty: their KV goes to SGLang's padding slot.
    """
    # P-EAGLE runs the rows of the last cycle again, at positions before these.
    context = feasible_context(worker, worker.block_size)
    target_runner = worker.target_worker.model_runner
    for plan in planner.plans_of_each_layout(target_runner.max_running_requests):
        bs = plan.layout.bs
        # Its table of counts has a row per request and a column per token, which most servers never need.
        worker.penalties = Penalties(bs, target_runner.model_config.vocab_size, worker.device)
        for sampling, is_capped, min_new_tokens in _REQUESTS:
            batch = make_batch(worker, bs, context, **sampling)
            if sampling:
                batch.sampling_info.acc_additive_penalties = torch.empty(0)  # SGLang's sign of penalties
                batch.reqs[0].sampling_params.min_new_tokens = min_new_tokens
            draws = worker.acceptor.draws_drafts(batch.sampling_info)
            caps = np.full(bs, 0 if is_capped else worker.block_size - 1)
            matches = worker.copies.look_up(batch)
            # A plan with matches compares them, by kernels that no other cycle here would compile.
            planned = plan._replace(caps=caps, draws=draws, matches=matches.lengths)
            worker.run_cycle(batch, planned, matches)


def _sampled_requests(bs: int, vocab_size: int, device: Any) -> SamplingBatchInfo:
    """Return bs sampled requests with every filter."""
    return SamplingBatchInfo(
        temperatures=torch.ones(bs, 1, device=device),
        top_ps=torch.full((bs,), 0.9, device=device),
        top_ks=torch.full((bs,), 50, dtype=torch.int32, device=device),
        min_ps=torch.zeros(bs, device=device),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
        vocab_size=vocab_size,
        device=device,
    )


@torch.no_grad()
def sampling_headroom(worker: Any) -> int:
    """Return the peak bytes of a sampled step of all requests, its logits included.

    The step has zeros in place of the two models' outputs. Runs on CUDA.
    """
    runner, block_size = worker.target_worker.model_runner, worker.block_size
    bs, vocab_size, device = runner.max_running_requests, runner.model_config.vocab_size, runner.device
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    info = _sampled_requests(bs, vocab_size, device)
    logits = torch.zeros(bs * block_size, vocab_size, device=device)
    if worker.acceptor.can_draw:
        prewarm_probabilistic_step(worker.drafter.fill, runner, block_size)
    positions = torch.zeros(bs, block_size, dtype=torch.int64, device=device)
    layout, masks = whole_blocks(bs, block_size), SamplingMasks(info, block_size)
    draw_target_tokens(
        logits,
        sampling_info=info,
        positions=positions,
        layout=layout,
        sampler=runner.sampler,
        masks=masks,
    )
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@torch.no_grad()
def prewarm_probabilistic_step(
    fill: Callable[[torch.Tensor, VerifyLayout, torch.Tensor, Any], tuple[torch.Tensor, DraftProbs | None]],
    target_runner: Any,
    block_size: int,
) -> None:
    """Run a step of bs sampled requests without the two models, on zeros, with every filter.

    Its memory then belongs to PyTorch's allocator. If it is too much for the GPU, the server fails now and
    not under load. The verify logits are not part of it: they exist anyway.

    Args:
        fill: `Drafter.fill`.
        target_runner: gives the number of requests, and the type and size of hidden states.
        block_size: B.
    """
    bs, device = target_runner.max_running_requests, target_runner.device
    config = target_runner.model_config
    vocab_size = config.vocab_size
    info = _sampled_requests(bs, vocab_size, device)
    slots = whole_blocks(bs, block_size - 1)
    hidden = torch.zeros(slots.num_rows, config.hidden_size, dtype=config.dtype, device=device)
    anchors = torch.zeros(bs, dtype=torch.int64, device=device)
    drafted, draft = fill(hidden, slots, anchors, info)
    assert draft is not None, "drawn tokens have distributions"
    # As many requests as fit into one slice of logits stand for all of them.
    at_once = min(bs, -(-slices_of_rows(bs * block_size, vocab_size)[0].stop // block_size))
    some = {name: value[:at_once] if torch.is_tensor(value) else value for name, value in vars(info).items()}
    logits = torch.zeros(at_once * block_size, vocab_size, device=device)
    target_probs(logits, SimpleNamespace(**some), whole_blocks(at_once, block_size))
    # Every row of the target is the same memory. The rows that are drawn from take their own.
    target = torch.zeros(1, vocab_size, device=device).expand(bs * block_size, -1)
    zeros = torch.zeros(bs, device=device)
    block = torch.cat((anchors[:, None], drafted), dim=1)
    weight, layout = torch.ones_like(zeros, dtype=torch.float64), whole_blocks(bs, block_size)
    draw_final_tokens(
        block,
        accept_len=zeros.int(),
        target_probs=target,
        weight=weight,
        draft=draft,
        final_uniforms=zeros,
        layout=layout,
    )
