"""SGLang's own DFLASH worker in a rehearsed server, to count its launches too.

The rules are the same. The server has our CPU runtime and our rules for the arguments. The worker, the
draft's model and everything that a step calls are SGLang's, on the branches that they take on CUDA.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from support.patching import patch_around
from support.rehearsal import launches

from sglang_dflash.srt import patching


def take_the_stage(algorithm: ModuleType, attention: Callable[[], None], buckets: tuple[int, ...]) -> None:
    """Change nothing but the attention, and run SGLang's worker and its relay between steps."""

    def prepare_scheduler():
        from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

        attention()
        return _on_stage(DFlashWorkerV2, buckets)

    algorithm.prepare_scheduler = prepare_scheduler
    algorithm.DFlashAlgorithm.create_future_map = algorithm.SpeculativeAlgorithm.create_future_map


def follow_the_fallback(attention: Callable[[], None], buckets: tuple[int, ...]) -> None:
    """Leave the decision to our argument steps. If it is the fallback, the worker is SGLang's."""

    def create(original, self, server_args):
        attention()
        return _on_stage(original(self, server_args), buckets)

    target = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
    patching.install((patch_around(target, create),))


class PlatformWithDFlash:
    """SGLang's platform, on which its DFLASH runs."""

    def __init__(self, platform: Any):
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == "torch_native"  # what the arguments call it here


def _on_stage(worker: type, buckets: tuple[int, ...]) -> type:
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    module = sys.modules[worker.__module__]
    module.is_hip = lambda: True  # all that it asks this for is whether its Triton kernels run
    module.build_draft_tp_worker = functools.partial(
        module.build_draft_tp_worker, attention_backend_override="torch_native"
    )
    decode = SimpleNamespace(backend="rehearsed", bs=buckets)
    module.get_exec = lambda: SimpleNamespace(
        graph=SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=decode))
    )
    torch.Tensor.record_stream = lambda *_: None
    # One kernel each on CUDA, and several operations on a CPU.
    _count_once(RMSNorm, "forward", "rms_norm")
    _count_once(MHATokenToKVPool, "set_kv_buffer_prefix_valid", "set_kv_buffer_prefix_valid")

    class Worker(worker):
        def forward_batch_generation(self, batch, *args, **kwargs):
            is_prefill = batch.forward_mode.is_extend() or batch.is_extend_in_batch
            step = super().forward_batch_generation if is_prefill else self.decode
            return step(batch, *args, **kwargs)

        def decode(self, batch, *args, **kwargs):
            return super().forward_batch_generation(batch, *args, **kwargs)

    launches.watch_decode_steps(Worker)
    return Worker


def _count_once(owner: type, method: str, name: str) -> None:
    body = getattr(owner, method)

    def once(*args, **kwargs):
        with launches.one_operation(name):
            return body(*args, **kwargs)

    setattr(owner, method, once)
