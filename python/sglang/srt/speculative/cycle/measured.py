"""Batches for cycles that start-up runs, to measure them or to compile their kernels."""

from array import array
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput


def feasible_context(worker: Any, wanted: int) -> int:
    """Return `wanted` committed tokens, or fewer if two blocks would have no room behind them."""
    runner = worker.target_worker.model_runner
    longest = min(runner.model_config.context_len, runner.max_total_num_tokens)
    return max(1, min(wanted, longest - 2 * worker.block_size))


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
