"""What no user deploys on a CPU, for tests alone.

They prove on a CPU what is served on CUDA: disaggregation and the hierarchical cache, Qwen3-Next and LFM2.
A server loads either table by a patch of its name (server_patches/sitecustomize.py).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from support.cpu_room import recurrent_targets, transfer

from sglang_dflash.srt.hardware_backend.cpu import arguments
from sglang_dflash.srt.plugins.patch import Patch, resolve
from sglang_dflash.srt.plugins.patches import CpuPatch


def _patch(target: str, ours: Callable[..., Any], is_around: bool = False) -> Patch:
    """Patch a target whose parameters are ours. A function around it takes the original before them."""
    parameters = list(inspect.signature(ours).parameters)[is_around:]

    def build():
        if not is_around:
            return ours
        _, original = resolve(target)

        @functools.wraps(original)
        def wrapped(*args, **kwargs):
            return ours(original, *args, **kwargs)

        return wrapped

    return CpuPatch(
        target=target,
        signature=f"({', '.join(parameters)})",
        build=build,
        why="SGLang's needs a GPU",
        upstream="docs/dev/upstream/cpu-operators.md",
    )


_HOST_POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
_NIXL = "sglang.srt.disaggregation.nixl.conn"
_MAMBA = "sglang.kernels.ops.mamba"

TRANSFER = (
    _patch("sglang.srt.mem_cache.pool_host.common._cuda_host_register", transfer.host_register),
    _patch(f"{_HOST_POOL}.backup_from_device_all_layer", transfer.back_up_all_layers),
    _patch(f"{_HOST_POOL}.load_to_device_per_layer", transfer.restore_layer),
    _patch(f"{_HOST_POOL}.get_dummy_flat_data_page", transfer.empty_flat_page),
    _patch(f"{_NIXL}._normalize_kv_mem_kinds", transfer.normalize_kv_mem_kinds),
    _patch(f"{_NIXL}.NixlKVManager.register_buffer_to_engine", transfer.register_host_memory, is_around=True),
    _patch(f"{_NIXL}.NixlKVManager._prepare_payload_xfer", transfer.prepare_targets_layers, is_around=True),
)
RECURRENT_TARGETS = (
    *(
        _patch(f"{_MAMBA}.{module}.{ours.__name__}", ours)
        for module, ours in (
            ("causal_conv1d_triton", recurrent_targets.causal_conv1d_fn),
            ("causal_conv1d_triton", recurrent_targets.causal_conv1d_update),
            ("mamba_state_scatter_triton", recurrent_targets.track_mamba_states_if_needed),
            ("mamba_state_scatter_triton", recurrent_targets.fused_conv_window_scatter_with_mask),
        )
    ),
    _patch(
        "sglang.kernels.ops.attention.fla.fused_norm_gate.rms_norm_gated", recurrent_targets.rms_norm_gated
    ),
    _patch("torch.get_device_module", recurrent_targets.get_device_module, is_around=True),
)


def serve_transfer(patches: Any) -> None:
    """Let a server send its KV to another one or to the host."""
    patches.AT_LOAD = (*patches.AT_LOAD, *TRANSFER)
    arguments.FEATURES = ()


def serve_recurrent_targets(patches: Any) -> None:
    """Let a server run Qwen3-Next, LFM2 and LFM2-MoE, and ReplaySSM with interpreted kernels."""
    patches.AT_LOAD = (*patches.AT_LOAD, *RECURRENT_TARGETS)
    arguments.RECURRENT_TARGETS = (*arguments.RECURRENT_TARGETS, "qwen3_next", "lfm2", "lfm2_moe")
