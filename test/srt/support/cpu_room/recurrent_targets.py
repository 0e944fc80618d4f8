"""The layers of LFM2 and Qwen3-Next, and ReplaySSM's copies, in PyTorch.

Names and parameters are those of SGLang's Triton kernels; what no caller here gives is left out.
"""

import torch

from sglang_dflash.srt.hardware_backend.cpu.gated_delta_rule import (
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
)
from sglang_dflash.srt.hardware_backend.cpu.operators import (
    copy_step,
    layernorm_fn,
    track_mamba_states_all_layers,
)


def causal_conv1d_fn(
    x, weight, bias, conv_states, query_start_loc, seq_lens_cpu, cache_indices, has_initial_state=None, **rest
):
    """Convolve joined prompts x [channels, tokens] and advance `conv_states`.

    conv_states: [slots, channels, width - 1].
    """
    if has_initial_state is None:
        has_initial_state = torch.zeros(cache_indices.numel(), dtype=torch.bool)
    states = conv_states, has_initial_state, cache_indices
    return causal_conv1d_fn_cpu(x, weight, bias, rest["activation"], *states, query_start_loc, seq_lens_cpu)


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, *, conv_state_indices, pad_slot_id=-1, **block
):
    """Convolve the next token [bs, channels] or block [bs, channels, tokens] of each request.

    block: where the states after each token of a block go, as `causal_conv1d_update_cpu` takes it.
    """
    block = {name: given for name, given in block.items() if given is not None}
    return causal_conv1d_update_cpu(x, conv_state, weight, bias, activation, conv_state_indices, **block)


def track_mamba_states_if_needed(conv_states, ssm_states, *requests, check_freed_slots=False):
    """Do as `track_mamba_states_all_layers` for one layer's pools, [slots, ...]."""
    track_mamba_states_all_layers(conv_states[None], ssm_states[None], *requests)


def fused_conv_window_scatter_with_mask(dst, src, dst_indices_raw, step_indices_raw, src_indices_raw=None):
    """Copy one step of each request's convolution windows.

    Args:
        dst: [layers, slots, channels, kernel - 1].
        src: [layers, rows, tokens, channels, kernel - 1], what the verify forward wrote.
        dst_indices_raw: [bs] slots.
        step_indices_raw: [bs] tokens of the block.
        src_indices_raw: [bs] rows; None: request i has row i.
    """
    if not dst.numel():  # a target without convolutions
        return
    steps = step_indices_raw.long()
    rows = torch.arange(len(steps)) if src_indices_raw is None else src_indices_raw.long()
    copy_step(dst, src, rows, dst_indices_raw.long(), steps)


def rms_norm_gated(x, g, weight, bias, activation="swish", *, eps=1e-6, **_):
    """Compute norm(x) * activation(g). x, g: [.., features]."""
    return layernorm_fn(x, weight, bias, z=g, eps=eps, is_rms_norm=True, activation=activation)


def get_device_module(original, device=None):
    """Name the CPU's module: a CUDA build of PyTorch names CUDA's, and Qwen3-Next's norms are built there."""
    return torch.cpu if device is None else original(device)
