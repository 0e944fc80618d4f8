"""The verify forward of a cycle, and the work that its CUDA graph does for the drafter."""

import logging
import weakref
from typing import Any

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from sglang_dflash.srt.speculative.cycle.prompts import on_device
from sglang_dflash.srt.speculative.cycle.replay import run_target
from sglang_dflash.srt.speculative.cycle.verify_rows import VerifyRows
from sglang_dflash.srt.speculative.dflash_info import Cycle, DFlashVerifyInput, DraftBlock
from sglang_dflash.srt.speculative.drafters.base import Drafter
from sglang_dflash.srt.speculative.scale_out.dp_attention import disable_graphs_if_any_rank_idle
from sglang_dflash.srt.speculative.targets.states import TargetStates

logger = logging.getLogger(__name__)


class VerifyTail:
    """Absorb the target's states for the drafter inside the target's CUDA graphs.

    This spares launches after verify (SGLang's `capture_tail_hooks`). If a forward replays no such graph,
    `Drafter.commit` absorbs them. Make the tail when both runners have their pools, before the target
    captures."""

    def __init__(self, drafter: Drafter, target_runner: Any, draft_runner: Any):
        self._drafter = drafter
        self._runner = target_runner
        # With adaptive width a target has several graph runners, and swaps them.
        self._graph_runners: weakref.WeakSet[Any] = weakref.WeakSet()
        spaces = [
            runner.kv_index_translator.space(IdSpaceKind.FULL) for runner in (target_runner, draft_runner)
        ]
        # A graph holds the slots under the names of the target's pool.
        if all(space.write is None for space in spaces):
            target_runner.capture_tail_hooks.append(self._capture)
        else:
            logger.info(
                "DFLASH: the draft's context is written outside the verify graphs: its pool renames slots."
            )

    def _capture(self, graph_runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """Absorb states. SGLang calls this at the end of each warm-up and capture of a forward."""
        # In a graph that is keyed by rows, as many rows as requests may be the block of one.
        is_plain = num_tokens == forward_batch.batch_size and not graph_runner.ragged_verify_mode
        if is_plain and self._drafter.defers_plain_cycles:
            return
        self._drafter.absorb(
            out.hidden_states[:num_tokens], forward_batch.positions, forward_batch.out_cache_loc
        )
        self._graph_runners.add(graph_runner)

    def states_to_commit(self, target_out: Any) -> torch.Tensor | None:
        """Return the aux hidden states of a verify forward. None: its graph has absorbed them."""
        is_absorbed = (
            target_out.can_run_cuda_graph and self._runner.decode_cuda_graph_runner in self._graph_runners
        )
        return None if is_absorbed else target_out.logits_output.hidden_states


def multimodal_positions(
    runner: Any, batch: Any, rows: VerifyRows, positions: torch.Tensor
) -> torch.Tensor | None:
    """Return the M-RoPE positions [3, T] int64 of packed rows with positions [T] int64.

    None: SGLang computes them, or the target has none. SGLang computes them for blocks of one width. All rows
    follow the prompt, so the three are one: the row's position, and what the request's pictures add to it.
    """
    if rows.lengths is None or not runner.model_config.model_is_mrope:
        return None
    media = batch.multimodal_inputs
    if any(inputs is not None for inputs in media):
        added = [0 if inputs is None else int(inputs.mrope_position_delta) for inputs in media]
        positions = positions + rows.repeat(on_device(added, torch.int64, positions.device))
    return positions.repeat(3, 1)


def verify(
    target_worker: TpModelWorker, states: TargetStates, batch: Any, cycle: Cycle, block: DraftBlock
) -> GenerationBatchResult:
    """Run one causal target forward over the verified slots of all blocks.

    Overwrites fields of the batch, which the scheduler restores after the step. The result has logits
    [T, vocab] and the aux hidden states of every row.
    """
    rows = cycle.rows
    tokens = rows.pack(block.tokens)
    seq_lens_cpu = cycle.committed_host + cycle.verify_len
    batch.input_ids = tokens
    batch.out_cache_loc = cycle.cache_loc
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.seq_lens_cpu = seq_lens_cpu
    batch.seq_lens_sum = sum(seq_lens_cpu.tolist())
    positions = rows.pack(cycle.positions)
    batch.spec_info = DFlashVerifyInput.for_target(rows, tokens, positions, cycle.spread)
    states.begin_verify(batch)
    forward_batch = ForwardBatch.init_new(
        batch,
        target_worker.model_runner,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        return_hidden_states_before_norm=False,
        kv_loc_plan=cycle.kv_loc_plan,
        write_cols=cycle.write_cols,
        spec_mrope_positions=multimodal_positions(target_worker.model_runner, batch, rows, positions),
    )
    disable_graphs_if_any_rank_idle(forward_batch)
    return run_target(target_worker, forward_batch)
