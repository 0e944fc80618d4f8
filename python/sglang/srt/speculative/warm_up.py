"""Cycles at start-up, which compile the kernels that run outside CUDA graphs.

Triton and FlashInfer compile a kernel when it is first launched. All requests would wait for it.
"""

from typing import Any

import numpy as np
import torch
from sglang.srt.runtime_context import get_disagg

from sglang_dflash.srt.speculative.acceptance.penalties import Penalties
from sglang_dflash.srt.speculative.scale_out.dp_attention import DraftRanks
from sglang_dflash.srt.speculative.width.plan import PlannedCycle
from sglang_dflash.srt.speculative.width.start_up import make_batch

_SAMPLED = dict(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, frequency_penalty=0.1)


def runs_cycles_alone(ranks: DraftRanks) -> bool:
    """Tell whether a rank runs cycles, and without asking ranks that have other requests."""
    return not ranks.layout.local_dp and get_disagg().disaggregation_mode != "prefill"


@torch.no_grad()
def warm_up(worker: Any) -> None:
    """Run cycles of one request: greedy, capped, sampled with penalties and a least length.

    The request's row of SGLang's table is empty: its KV goes to SGLang's padding slot.

    Args:
        worker: the `DFlashWorker`, before it serves.
    """
    plan, penalties, observers = PlannedCycle(worker.block_size), worker.penalties, worker.observers
    worker.observers = []
    # Its table of counts has a row per request and a column per token, which most servers never need.
    worker.penalties = Penalties(1, worker.target_worker.model_runner.model_config.vocab_size, worker.device)
    for sampling, cap, min_new_tokens in ({}, None, 0), ({}, 0, 0), (_SAMPLED, None, 0), (_SAMPLED, None, 1):
        batch = make_batch(worker, 1, 1, **sampling)
        if sampling:
            batch.sampling_info.acc_additive_penalties = torch.empty(0)  # SGLang's sign of penalties
            batch.reqs[0].sampling_params.min_new_tokens = min_new_tokens
        caps = None if cap is None else np.array([cap])
        draws = worker.acceptor.draws_drafts(batch.sampling_info)
        worker.run_cycle(batch, plan._replace(caps=caps), draws)
    worker.penalties, worker.observers = penalties, observers
