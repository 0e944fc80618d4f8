"""SGLang's prefill graphs: its runner and its breakable graphs, whose segments our recorder captures.

A breakable graph is a row of segments. Between two of them SGLang calls attention, which is not captured. A
segment reads what earlier ones and these calls have left, so all are overwritten with NaN before the first.
"""

import contextlib
import types
from typing import Any

import torch
from support.rehearsal import graphs, report
from torch.utils._pytree import tree_leaves

# The first sizes of SGLang's own list, which ends far beyond the prompts of a rehearsal.
SIZES = (4, 8, 16, 32, 64, 128, 256)
# An operator's kernel lives as long as the library object that registered it.
_LIBRARY = torch.library.Library("sglang", "FRAGMENT")


class Segment:
    """Replacement for torch.cuda.CUDAGraph."""

    def __init__(self):
        self.recorder = graphs.Recorder()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
        graphs.begin(self.recorder)

    def capture_end(self) -> None:
        graphs.end(self.recorder)

    def replay(self) -> None:
        self.recorder.run("prefill")


def install() -> None:
    """Let SGLang capture and replay prefill graphs with CPU tensors, as it does by default on CUDA."""
    import sglang.srt.model_executor.runner.prefill_cuda_graph_runner as runner
    import sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend as backend
    import sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph as module
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_exec

    _give_attention_a_cpu_kernel()
    prefill = get_exec().graph.cuda_graph_config.prefill
    prefill.backend, prefill.bs = Backend.BREAKABLE, list(SIZES)
    runner.get_or_create_global_graph_capture_stream = lambda: None
    runner.graph_capture = lambda stream: contextlib.nullcontext(types.SimpleNamespace(stream=None))
    backend.get_or_create_global_graph_memory_pool = backend.set_graph_pool_id = lambda *_: None
    backend.BreakableCudaGraphBackend.build_deduped_cuda_graph = lambda self: None
    torch.cuda.CUDAGraph = Segment
    module.get_device_module = lambda: torch.cpu
    replay = backend.BreakableCudaGraphBackend.replay

    def replay_anew(self, shape_key, *args, **kwargs):
        graphs.forget_all([segment.recorder for segment in self._graphs[shape_key]._segments])
        for output in tree_leaves(self._shared_output_buffer):
            output.fill_(torch.nan)  # nobody may still read the last prefill's
        report.note("prefill replay", tokens=shape_key.size)
        return replay(self, shape_key, *args, **kwargs)

    backend.BreakableCudaGraphBackend.replay = replay_anew


def _give_attention_a_cpu_kernel() -> None:
    """Let SGLang 0.5.22 call attention on CPU tensors: 0.5.23 has no such operator."""
    from sglang.srt.layers import radix_attention

    attend = getattr(radix_attention, "_unified_attention_with_output_impl", None)
    if attend is None:
        return

    def run(*args: Any, use_mha_companion: bool = False, **kwargs: Any) -> None:
        attend(*args, use_mha_companion, False, **kwargs)

    _LIBRARY.impl("unified_attention_with_output", run, "CPU")
