"""SGLang's CUDA attention and graphs on CPU tensors, in a rehearsed server's scheduler.

The arguments still say `torch_native`, which lets a server run on a CPU. Our scheduler's
registrations (`plugins/algorithm.py`) put the rehearsal's backend under that name.
"""

import contextlib
import json
import os
import sys
import types
from dataclasses import dataclass

import torch
from support.rehearsal import (
    built_in,
    compiled,
    crossings,
    faults,
    flashinfer_kernels,
    graphs,
    late_reads,
    launches,
    prefill_graphs,
    report,
    steps,
    trtllm_kernels,
)
from support.rehearsal.attention import merge
from support.rehearsal.fa3_kernels import flash_attn_with_kvcache

VARIABLE = "REHEARSAL"


@dataclass(frozen=True)
class Scene:
    """A server to rehearse.

    Attributes:
        backend: flashinfer, fa3, triton or trtllm_mha, of the target.
        draft: the draft's. None: the target's, or FlashInfer beside trtllm_mha.
        buckets: Batch sizes to capture graphs for.
        fault: One of `faults.AT_START`.
        interprets_context_kv: Interpret also the kernel with a program per token and layer, which takes a
            third of a second per step. Its twin runs otherwise.
        waits_under_draft: Whether a cycle waits for its lengths while the draft runs, off by default.
        is_built_in: SGLang's own worker instead of ours.
        is_fallback: The same, because our decision leaves the server to it.
    """

    backend: str
    draft: str | None = None
    buckets: tuple[int, ...] = (1, 2, 4)
    fault: str | None = None
    interprets_context_kv: bool = False
    waits_under_draft: bool = False
    is_built_in: bool = False
    is_fallback: bool = False

    @classmethod
    def from_environment(cls) -> "Scene":
        return cls(**json.loads(os.environ[VARIABLE]))


class TorchOnCPU:
    """The torch module for code that says device="cuda": tensors are in plain host memory."""

    _MAKERS = ("empty", "zeros", "ones", "full", "arange", "tensor", "empty_like", "zeros_like")

    def __getattr__(self, name):
        value = getattr(torch, name)
        if name not in self._MAKERS:
            return value

        def make(*args, **kwargs):
            kwargs.pop("pin_memory", None)
            if "cuda" in str(kwargs.get("device", "")):
                kwargs["device"] = "cpu"
            return value(*args, **kwargs)

        return make


def set_the_stage(algorithm) -> None:
    """Replace the CPU's attention and everything else when the worker is built."""
    scene = Scene.from_environment()

    def build():
        _interpret_triton()
        makers = {"flashinfer": _flashinfer, "fa3": _fa3, "triton": _triton, "trtllm_mha": _trtllm_mha}
        of_draft = scene.draft or {"trtllm_mha": "flashinfer"}.get(scene.backend, scene.backend)
        base = {"flashinfer"} if scene.backend == "trtllm_mha" else set()  # its class has this one's buffers
        made = {name: makers[name]() for name in {of_draft, scene.backend} | base}
        draft_backend, backend = made[of_draft], made[scene.backend]
        steps.watch()
        _record_layers_of_the_cpu()
        _capture_graphs(scene.buckets)
        prefill_graphs.install()
        if not (scene.is_built_in or scene.is_fallback):
            _prepare_our_worker(scene)

        def create(runner):
            of_role = draft_backend if runner.is_draft_worker else backend
            report.note(
                "backend", role="draft" if runner.is_draft_worker else "target", name=of_role.__name__
            )
            return of_role(runner)

        return create

    def attention() -> None:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend("torch_native")(build())

    if scene.is_built_in:
        built_in.take_the_stage(algorithm, attention, scene.buckets)
    elif scene.is_fallback:
        built_in.follow_the_fallback(attention, scene.buckets)
    else:
        register = algorithm.register_in_scheduler
        algorithm.register_in_scheduler = lambda: (register(), attention())


def pretend_support(speculative_hook) -> None:
    """Let SGLang's own DFLASH get the server and accept the CPU, if a server is to fall back to it."""
    if Scene.from_environment().is_fallback:
        from sglang_dflash.srt.arg_groups import fallback

        fallback._reasons_to_refuse = lambda *_: []
        speculative_hook.current_platform = built_in.PlatformWithDFlash(speculative_hook.current_platform)


def _prepare_our_worker(scene: Scene) -> None:
    if not scene.interprets_context_kv:
        from sglang_dflash.kernels.ops.speculative import context_kv

        context_kv.write_context_kv.__wrapped__ = _operation(
            "triton:write_context_kv_kernel", context_kv.write_context_kv_torch
        )
    from sglang_dflash.srt.speculative.cycle.lengths import ArrivingLengths

    ArrivingLengths.wait = steps.waiting("lengths", ArrivingLengths.wait)
    faults.plant_all()
    if scene.fault is not None:
        faults.AT_START[scene.fault]()
    from sglang_dflash.srt.speculative.dflash_worker import DFlashWorker

    crossings.watch(DFlashWorker)
    launches.watch_decode_steps(DFlashWorker)
    late_reads.watch_steps(DFlashWorker)


def _operation(name: str, body):
    """Wrap `body` as one operation, in a graph and outside."""
    node = graphs.kernel(name, body)

    def launch(*args, **kwargs):
        late_reads.on_kernel(name, (args, kwargs))
        with launches.one_operation(name):
            return node(*args, **kwargs)

    return launch


def _interpret_triton() -> None:
    """Make a launch in Triton's interpreter one operation of a graph."""
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    call, run = GridExecutor.__call__, InterpretedFunction.run

    def launch(self, *args, **kwargs):
        return _operation(f"triton:{self.fn.__name__}", lambda *a, **k: call(self, *a, **k))(*args, **kwargs)

    def noted_run(self, *args, grid, warmup, **kwargs):
        compiled.on_launch(self, args, kwargs)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    GridExecutor.__call__, InterpretedFunction.run = launch, noted_run
    # The arguments are where they were: copying them back would copy whole KV pools onto themselves.
    GridExecutor._restore_args_dev = lambda *_: None


def _flashinfer():
    import flashinfer.prefill
    import sglang.srt.layers.attention.flashinfer_backend as module

    flashinfer.prefill.get_batch_prefill_module = flashinfer_kernels.PrefillModule
    flashinfer.prefill.torch = module.torch = TorchOnCPU()
    wrapper = flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper
    wrapper.plan = wrapper.begin_forward = steps.waiting("FlashInfer's own plan", wrapper.plan)
    module.BatchPrefillWithPagedKVCacheWrapper = flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper
    module.BatchPrefillWithRaggedKVCacheWrapper = flashinfer_kernels.Ragged
    module.BatchDecodeWithPagedKVCacheWrapper = flashinfer_kernels.Decode
    module.fast_decode_plan = None
    module.merge_state = module._safe_merge_state = merge
    return module.FlashInferAttnBackend


def _trtllm_mha():
    import sglang.srt.layers.attention.trtllm_mha_backend as module

    module.make_persistent_multi_ctas_kv_counter_buffer = lambda *_, **__: None
    kernels = {
        name: graphs.kernel(name, getattr(trtllm_kernels, name))
        for name in ("trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache")
    }
    library = types.SimpleNamespace(**kernels)
    module.flashinfer = types.SimpleNamespace(decode=library, prefill=library)
    return module.TRTLLMHAAttnBackend


def _fa3():
    library = types.ModuleType("sgl_kernel.flash_attn")
    library.flash_attn_with_kvcache = graphs.kernel("flash_attn_with_kvcache", flash_attn_with_kvcache)
    library.flash_attn_varlen_func = library.get_scheduler_metadata = None
    sys.modules[library.__name__] = library
    import sglang.srt.layers.attention.flashattention_backend as module

    module.flash_attn_with_kvcache = library.flash_attn_with_kvcache
    module.get_device_capability = lambda *_: (9, 0)
    from sglang_dflash.srt.speculative.drafters import dflash

    dflash.PAGED_BACKENDS = ("torch_native",)  # what the arguments call it here
    return module.FlashAttentionBackend


def _record_layers_of_the_cpu() -> None:
    """Make layers that read on the host what they compute one operation of a graph each.

    They are the convolution and the recurrence of GatedDeltaNet, and experts.
    """
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.kernels import gdn_triton
    from sglang.srt.layers.moe import fused_moe_native

    for module, name in (
        (gdn_backend, "causal_conv1d_update"),
        (gdn_triton, "fused_sigmoid_gating_delta_rule_update"),
        (fused_moe_native, "moe_forward_native"),
    ):
        setattr(module, name, graphs.kernel(name, getattr(module, name)))


def _triton():
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    return TritonAttnBackend


def _capture_graphs(buckets: tuple[int, ...]) -> None:
    import msgspec
    import sglang.srt.model_executor.model_runner as model_runner_module
    import sglang.srt.model_executor.runner.decode_cuda_graph_runner as graph_runner
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
    from sglang.srt.model_executor.model_runner_components.cuda_graph_setup import GraphCapture
    from sglang.srt.runtime_context import get_exec

    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph
    graph_runner.resolve_decode_backend = graphs.GraphBackend
    for module in (graph_runner, model_runner_module):
        module.get_batch_sizes_to_capture = lambda *_, **__: (list(buckets), [])
    graph_runner.get_or_create_global_graph_capture_stream = lambda: None
    graph_runner.graph_capture = lambda stream: contextlib.nullcontext(types.SimpleNamespace(stream=None))
    graph_runner.DecodeCudaGraphRunner._record_in_graph_metadata_prep_done = lambda self: None
    original = model_runner_module.capture_cuda_graphs

    def capture(*, model_runner, capture_decode_cuda_graph=True, **rest):
        captured = original(model_runner=model_runner, capture_decode_cuda_graph=False, **rest)
        if not capture_decode_cuda_graph:
            return captured
        # SGLang makes none while the arguments say that there are no graphs.
        decode_config = get_exec().graph.cuda_graph_config.decode
        backend, decode_config.backend, decode_config.bs = decode_config.backend, Backend.FULL, list(buckets)
        model_runner.graph_shared_output = GraphSharedOutput.create_for_model_runner(model_runner)
        decode_config.backend = backend
        runner = graph_runner.DecodeCudaGraphRunner(model_runner)
        role = "draft" if model_runner.is_draft_worker else "target"
        rows = sum(map(len, model_runner.graph_shared_output._logits_buffers.values()))
        report.note("logits", role=role, rows=rows)
        decode = GraphCapture(runner=runner, memory_phase="decode", memory_usage_gb=0, capture_time=0)
        return msgspec.structs.replace(captured, decode=decode)

    model_runner_module.capture_cuda_graphs = capture
