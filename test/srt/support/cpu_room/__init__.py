"""What no user deploys on a CPU, for tests alone.

They prove on a CPU what is served on CUDA: disaggregation and the hierarchical cache, Qwen3-Next and LFM2.
A server loads either table by a patch of its name (server_patches/sitecustomize.py).
"""

from typing import Any

from support.cpu_room import recurrent_targets, transfer
from support.patching import patch_around, patch_with

from sglang_dflash.srt.hardware_backend.cpu import arguments
from sglang_dflash.srt.patching import LOAD, Patch

_HOST_POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
_NIXL = "sglang.srt.disaggregation.nixl.conn"
_MAMBA = "sglang.kernels.ops.mamba"

TRANSFER = (
    patch_with("sglang.srt.mem_cache.pool_host.common._cuda_host_register", transfer.host_register),
    patch_with(f"{_HOST_POOL}.backup_from_device_all_layer", transfer.back_up_all_layers),
    patch_with(f"{_HOST_POOL}.load_to_device_per_layer", transfer.restore_layer),
    patch_with(f"{_HOST_POOL}.get_dummy_flat_data_page", transfer.empty_flat_page),
    patch_with(f"{_NIXL}._normalize_kv_mem_kinds", transfer.normalize_kv_mem_kinds),
    patch_around(f"{_NIXL}.NixlKVManager.register_buffer_to_engine", transfer.register_host_memory),
    patch_around(f"{_NIXL}.NixlKVManager._prepare_payload_xfer", transfer.prepare_targets_layers),
)
RECURRENT_TARGETS = (
    *(
        patch_with(f"{module}.{ours.__name__}", ours)
        for module, ours in (
            (f"{_MAMBA}.causal_conv1d_triton", recurrent_targets.causal_conv1d_fn),
            (f"{_MAMBA}.causal_conv1d_triton", recurrent_targets.causal_conv1d_update),
            (f"{_MAMBA}.mamba_state_scatter_triton", recurrent_targets.track_mamba_states_if_needed),
            (f"{_MAMBA}.mamba_state_scatter_triton", recurrent_targets.fused_conv_window_scatter_with_mask),
            ("sglang.kernels.ops.attention.fla.fused_norm_gate", recurrent_targets.rms_norm_gated),
        )
    ),
    patch_around("torch.get_device_module", recurrent_targets.get_device_module),
)


def _make_at_load(patches: Any, table: tuple[Patch, ...]) -> None:
    ours = patches.patches_at
    patches.patches_at = lambda time: [*ours(time), *(table if time == LOAD else ())]


def serve_transfer(patches: Any) -> None:
    """Let a server send its KV to another one or to the host."""
    _make_at_load(patches, TRANSFER)
    arguments.FEATURES = ()


def serve_recurrent_targets(patches: Any) -> None:
    """Let a server run Qwen3-Next, LFM2 and LFM2-MoE, and ReplaySSM with interpreted kernels."""
    _make_at_load(patches, RECURRENT_TARGETS)
    arguments.RECURRENT_TARGETS = (*arguments.RECURRENT_TARGETS, "qwen3_next", "lfm2", "lfm2_moe")
