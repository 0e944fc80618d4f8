"""Forwards of both models, with as little as possible around their CUDA graphs.

Around a replay, `ModelRunner.forward` serves statistics, dumps and profilers. If nothing of that is on, the
graph is replayed directly, which spares the host about a tenth of a millisecond in each cycle.
"""

from typing import Any

import torch
from sglang.srt.debug_utils.dumper import dumper
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_exec
from sglang.srt.state_capturer.indexer_topk import get_global_indexer_capturer
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

from sglang_dflash.srt.environ import DFlashOptions


def run_draft(runner: Any, forward_batch: ForwardBatch) -> Any:
    """Run a forward of the draft's model runner, and return the model's output."""
    if torch.autograd._profiler_enabled() or not _can_replay(runner, forward_batch):
        return runner.forward(forward_batch).logits_output
    return runner.decode_cuda_graph_runner.execute(forward_batch)


def run_target(worker: TpModelWorker, forward_batch: ForwardBatch) -> GenerationBatchResult:
    """Run a verify forward of the target."""
    runner = worker.model_runner
    if _is_watched(runner) or not _can_replay(runner, forward_batch):
        return worker.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
    output = runner.decode_cuda_graph_runner.execute(forward_batch)
    return GenerationBatchResult(logits_output=output, can_run_cuda_graph=True)


def hold_request_rows(target_runner: Any) -> None:
    """Let SGLang wait for the whole step before it gives a row of a request to another one.

    SGLang otherwise rewrites rows as soon as the target's forward has read them. Call this after that
    forward, before work that reads or writes a table of SGLang's by request row.
    """
    target_runner.shared_read_done_event = None


def _can_replay(runner: Any, forward_batch: ForwardBatch) -> bool:
    if DFlashOptions.PLAIN_CYCLE.get():
        return False  # SGLang replays it
    graphs, mode = runner.decode_cuda_graph_runner, forward_batch.forward_mode
    runs_graphs = graphs and (mode.is_cpu_graph() if runner.device == "cpu" else mode.is_cuda_graph())
    return bool(runs_graphs and graphs.can_run_graph(forward_batch))


def _is_watched(runner: Any) -> bool:
    """Tell whether `ModelRunner.forward` has work to do around a replay of the target's graph."""
    moe = get_exec().moe
    watching = (
        torch.autograd._profiler_enabled(),
        dumper.may_enable,
        runner.msprobe_debugger,
        runner.canary_manager,
        runner.eplb_manager,
        moe.expert_distribution_recorder_mode,
        moe.elastic_ep_backend,
        get_global_experts_capturer(),
        get_global_indexer_capturer(),
        hasattr(runner.model, "prepare_for_forward"),
    )
    return any(watching)
