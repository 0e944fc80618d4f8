"""The verify forward of a cycle."""

from typing import Any

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.host import on_device
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout
from sglang_dflash.srt.speculative.dflash_info import DFlashVerifyInput


def multimodal_positions(
    runner: Any, batch: Any, layout: VerifyLayout, positions: torch.Tensor
) -> torch.Tensor | None:
    """Return the M-RoPE positions [3, T] int64 of ragged rows with positions [T] int64.

    None: SGLang computes them, or the target has none. SGLang computes them for blocks of one width. All rows
    follow the prompt, so the three are one: the row's position, and what the request's pictures add to it.
    """
    if layout.is_rectangle or not runner.model_config.model_is_mrope:
        return None
    added = [int(getattr(inputs, "mrope_position_delta", 0)) for inputs in batch.multimodal_inputs]
    if any(added):
        positions = positions + layout.repeat(on_device(added, torch.int64, positions.device))
    return positions.repeat(3, 1)


def verify(
    target_worker: TpModelWorker, batch: Any, cycle: Cycle, block: DraftBlock
) -> GenerationBatchResult:
    """Run one causal target forward over the verified slots of all blocks.

    Overwrites fields of the batch, which the scheduler restores after the step. The result has logits
    [T, vocab] and the aux hidden states of every row.
    """
    rows = cycle.layout
    tokens = rows.to_rows(block.tokens)
    seq_lens_cpu = cycle.committed_host + cycle.verify_len
    batch.input_ids = tokens
    batch.out_cache_loc = cycle.cache_loc
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.seq_lens_cpu = seq_lens_cpu
    batch.seq_lens_sum = sum(seq_lens_cpu.tolist())
    positions = rows.to_rows(cycle.positions)
    batch.spec_info = DFlashVerifyInput(
        rows.verify_len,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        draft_token=tokens,
        positions=positions,
        ragged_verify_layout=rows.for_graph,
        ragged=None if rows.is_rectangle else rows,
    )
    forward_batch = ForwardBatch.init_new(
        batch,
        model_runner=target_worker.model_runner,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        return_hidden_states_before_norm=False,
        kv_loc_plan=cycle.kv_loc_plan,
        write_cols=cycle.write_cols,
        spec_mrope_positions=multimodal_positions(target_worker.model_runner, batch, rows, positions),
    )
    disable_graphs_if_any_rank_idle(forward_batch)
    return target_worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)


def disable_graphs_if_any_rank_idle(forward_batch: ForwardBatch) -> None:
    """Keep all ranks from replaying a CUDA graph of the target if one of them is idle.

    A graph's rows are padded and an idle rank's are not, so each would look for the other's rows elsewhere.
    """
    if 0 in (forward_batch.original_global_num_tokens_cpu or ()):
        forward_batch.can_run_decode_cuda_graph = False
