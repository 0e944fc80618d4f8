"""Steps of a rank without requests, with DP attention.

Each rank of a model has requests of its own, and the target's layers exchange rows between all ranks. So
every rank takes part in every forward of the target, with no rows if it has no requests. The draft is on the
ranks that share requests. It exchanges nothing with others, and a rank without requests does not run it.
SGLang gives all ranks the same kind of step: while one prefills, ranks with nothing to prefill are idle.
"""

from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

from sglang_dflash.srt.speculative.cycle.verify import disable_graphs_if_any_rank_idle
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput, DFlashVerifyInput


def run_idle(batch: Any, target_worker: Any, block_size: int) -> GenerationBatchResult:
    """Take part in the target's forward, prefill or verify, on a rank without requests."""
    nothing = torch.empty((0,), dtype=torch.int64, device=target_worker.device)
    if not batch.is_extend_in_batch:
        # SGLang reads from it how many rows each request of the other ranks has.
        batch.spec_info = DFlashVerifyInput(block_size, CaptureHiddenMode.FULL, nothing, nothing)
    forward_batch = ForwardBatch.init_new(
        batch,
        target_worker.model_runner,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        return_hidden_states_before_norm=False,
    )
    disable_graphs_if_any_rank_idle(forward_batch)
    target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
    return GenerationBatchResult(
        next_token_ids=nothing,
        accept_lens=nothing.int(),
        next_draft_input=DFlashDraftInput(nothing, nothing),
        new_seq_lens=nothing,
        can_run_cuda_graph=False,
        speculative_num_draft_tokens=block_size,
    )
