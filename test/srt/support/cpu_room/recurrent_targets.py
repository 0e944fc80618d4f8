"""The layers of LFM2 and Qwen3-Next, and ReplaySSM's copies, in PyTorch.

Names and parameters are those of SGLang's Triton kernels.
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
    x,
    weight,
    bias,
    conv_states,
    query_start_loc,
    seq_lens_cpu,
    cache_indices=None,
    has_initial_state=None,
    activation="silu",
    pad_slot_id=-1,
    validate_data=False,
    block_table=None,
    **kwargs,
):
    """Convolve packed prompts x [channels, tokens] and advance `conv_states`.

    conv_states: [slots, channels, width - 1].
    """
    if cache_indices is None or block_table is not None:
        raise NotImplementedError("causal_conv1d_fn on a CPU: states without slots, or in blocks")
    if has_initial_state is None:
        has_initial_state = torch.zeros(cache_indices.numel(), dtype=torch.bool)
    return causal_conv1d_fn_cpu(
        x,
        weight,
        bias,
        activation,
        conv_states,
        has_initial_state,
        cache_indices,
        query_start_loc,
        seq_lens_cpu,
    )


def causal_conv1d_update(
    x,
    conv_state,
    weight,
    bias=None,
    activation=None,
    cache_seqlens=None,
    conv_state_indices=None,
    num_accept_tokens=None,
    intermediate_conv_window=None,
    intermediate_state_indices=None,
    retrieve_next_token=None,
    retrieve_next_sibling=None,
    retrieve_parent_token=None,
    pad_slot_id=-1,
    metadata=None,
    validate_data=False,
):
    """Convolve the next token [bs, channels] or block [bs, channels, tokens] of each request.

    intermediate_conv_window: [rows, tokens, channels, width - 1]. If given, the states after each token go
        there, and `conv_state` stays as it is.
    """
    if conv_state_indices is None or cache_seqlens is not None or num_accept_tokens is not None:
        raise NotImplementedError("causal_conv1d_update on a CPU: states without slots, or circular ones")
    return causal_conv1d_update_cpu(
        x,
        conv_state,
        weight,
        bias,
        activation,
        conv_state_indices,
        intermediate_conv_window,
        intermediate_state_indices,
        retrieve_next_token,
        retrieve_next_sibling,
        retrieve_parent_token,
    )


def track_mamba_states_if_needed(
    conv_states,
    ssm_states,
    cache_indices,
    mamba_track_mask,
    mamba_track_indices,
    batch_size,
    check_freed_slots=False,
):
    """Do as `track_mamba_states_all_layers` for one layer's pools, [slots, ...]."""
    pools = conv_states[None], ssm_states[None]
    track_mamba_states_all_layers(*pools, cache_indices, mamba_track_mask, mamba_track_indices, batch_size)


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


def rms_norm_gated(
    x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False, eps=1e-6
):
    """Compute norm(x) * activation(g). x, g: [.., features]."""
    if residual is not None or prenorm:
        raise NotImplementedError("rms_norm_gated on a CPU: a residual")
    return layernorm_fn(x, weight, bias, z=g, eps=eps, is_rms_norm=True, activation=activation)


def get_device_module(original, device=None):
    """Name the CPU's module: a CUDA build of PyTorch names CUDA's, and Qwen3-Next's norms are built there."""
    return torch.cpu if device is None else original(device)
