"""Causal convolutions with a state per request, as LFM2's layers call them.

Names and parameters are those of SGLang's Triton kernels. The computation is that of GatedDeltaNet's
convolution.
"""

import torch

from sglang_dflash.srt.hardware_backend.cpu.gated_delta_rule import (
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
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
