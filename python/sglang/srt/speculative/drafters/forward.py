"""One forward of the draft, with as little as possible around its CUDA graph."""

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def run_draft(runner: Any, forward_batch: ForwardBatch) -> Any:
    """Run a forward of the draft's model runner, and return the model's output.

    Around a replay `ModelRunner.forward` serves the target: statistics of experts, dumps, a span of the
    profiler. Without a profiler a draft needs none of it, so its graph is replayed directly.
    """
    graphs, mode = runner.decode_cuda_graph_runner, forward_batch.forward_mode
    has_graphs = graphs and (mode.is_cpu_graph() if runner.device == "cpu" else mode.is_cuda_graph())
    if not has_graphs or torch.autograd._profiler_enabled() or not graphs.can_run_graph(forward_batch):
        return runner.forward(forward_batch).logits_output
    return graphs.execute(forward_batch)
