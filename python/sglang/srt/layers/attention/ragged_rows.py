"""SGLang's attention for ragged rows: requests of one verify have different numbers.

S: requests, those that pad a CUDA graph included. W: slots of a block. T: ragged rows of all requests.
"""

from collections.abc import Callable
from typing import Any

import torch

from sglang_dflash.srt.patching import WORKER, patches


def full_attention(backend: Any) -> Any:
    """Return a target's attention backend without that of its recurrent layers."""
    return getattr(backend, "full_attn_backend", backend)


def map_rows(starts: torch.Tensor, num_rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Map between ragged rows and blocks, without a host read: a CUDA graph can record it.

    Args:
        starts: [S + 1] int32, the first row of each request. Its last entry is `num_rows`.
        num_rows: T.
        width: W.

    Returns:
        Row of each slot [S, W] int64, where slots past a request's rows have its last row; slot of each row
        among the flattened blocks [T] int64.
    """
    first, lengths = starts[:-1].long(), starts.diff().long()
    column = torch.arange(width, device=starts.device)
    rows = first[:, None] + torch.minimum(column, (lengths[:, None] - 1).clamp(min=0))
    row = torch.arange(num_rows, device=starts.device)
    request = torch.searchsorted(starts[1:].long(), row, right=True)
    return rows.clamp(max=num_rows - 1), request * width + row - first[request]


@patches(
    "sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
    at=WORKER,
    signature="(self, layer, forward_batch, mixed_qkv, a, b, kwargs)",
    feature="adaptive width for targets with recurrent states",
    upstream="https://github.com/sgl-project/sglang/issues/38897",
)
def gdn_forward_extend(
    original: Callable[..., torch.Tensor],
    self: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    **kwargs: Any,
) -> torch.Tensor:
    """Verify another number of rows of each request with GatedDeltaNet.

    The recurrence's Triton kernel takes requests of any length. The convolution's takes blocks, so rows are
    copied into blocks and back. That is little beside the states: a row of a 27B target writes 151 MB.
    """
    from sglang.srt.layers.attention.linear import gdn_backend
    from sglang.srt.layers.attention.linear.utils import select_verify_intermediate_state_indices

    layout = getattr(forward_batch.spec_info, "ragged_verify_layout", None)
    if layout is None or not forward_batch.forward_mode.is_target_verify():
        return original(
            self, layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **kwargs
        )
    pool, num_rows = self.req_to_token_pool, mixed_qkv.shape[0]
    cache = pool.mamba2_layer_cache(layer.layer_id)
    starts = self.forward_metadata.query_start_loc
    num_requests, block_size = starts.shape[0] - 1, cache.intermediate_ssm.shape[1]
    if layer.layer_id == min(pool.mamba_map):  # a graph records the map once, for all layers
        self.rows_of_slots, self.slots_of_rows = map_rows(starts, num_rows, block_size)
    states = self.forward_metadata.mamba_cache_indices[:num_requests]
    scratch = select_verify_intermediate_state_indices(
        self.verify_intermediate_state_indices, forward_batch.req_pool_indices, states >= 0, pool.size
    )[:num_requests]
    convolved = gdn_backend.causal_conv1d_update(
        mixed_qkv[self.rows_of_slots].transpose(1, 2),
        cache.conv[0],
        layer.conv_weights,
        layer.bias,
        layer.activation,
        conv_state_indices=states,
        intermediate_conv_window=cache.intermediate_conv_window[0],
        intermediate_state_indices=scratch,
    )
    rows = convolved.transpose(1, 2).flatten(0, 1)[self.slots_of_rows]
    query, key, value = rows.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    return self.kernel_dispatcher.tree_verify_kernel.target_verify(  # Triton's, also beside FlashInfer's
        A_log=layer.A_log,
        dt_bias=layer.dt_bias,
        q=query.view(1, num_rows, layer.num_q_heads, layer.head_q_dim),
        k=key.view(1, num_rows, layer.num_k_heads, layer.head_k_dim),
        v=value.view(1, num_rows, layer.num_v_heads, layer.head_v_dim),
        a=a,
        b=b,
        ssm_states=cache.temporal,
        cache_indices=states,
        query_start_loc=starts,
        intermediate_states_buffer=cache.intermediate_ssm,
        intermediate_state_indices=scratch,
        cache_steps=block_size,
        retrieve_parent_token=None,
    )


def verifies_ragged_rows(attention: Any) -> bool:
    """Return whether a hybrid attention backend's recurrent half takes ragged rows."""
    linear: Any = getattr(attention, "linear_attn_backend", None)
    if getattr(getattr(type(linear), "forward_extend", None), "wrapper", None) is not gdn_forward_extend:
        return False
    # None: the states are in ReplaySSM's ring instead.
    return linear.req_to_token_pool.mamba_pool.mamba_cache.intermediate_ssm is not None


def supports_ragged_rows(backend: Any) -> bool:
    """Return whether `install_ragged_layouts` fits a backend.

    The kernel of deterministic inference has its own preparation, which divides rows evenly.
    """
    return type(backend).__name__ == "TritonAttnBackend" and not backend.enable_deterministic


def install_ragged_layouts(backend: Any) -> None:
    """Have one `TritonAttnBackend` verify the rows of `spec_info.ragged_verify_layout`.

    Its kernel reads each request's first row from `qo_indptr`, so it takes any layout. Only the preparation
    of a verify forward assumes blocks of one width.
    """
    block_size = backend.target_verify_num_tokens_per_req
    fill_buffers, prepare = backend._update_target_verify_buffers, backend.init_forward_metadata

    def fill_graph_buffers(plan, bs, seq_lens, spec_info, req_pool_indices):
        arguments = dict(seq_lens=seq_lens, spec_info=spec_info, req_pool_indices=req_pool_indices)
        filled = fill_buffers(plan, bs, **arguments)
        filled[0].copy_(spec_info.ragged_verify_layout.qo_indptr_device)
        return filled

    def prepare_without_graph(forward_batch: Any) -> None:
        prepare(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            layout = forward_batch.spec_info.ragged_verify_layout
            backend.forward_metadata.qo_indptr = layout.qo_indptr_device

    # The kernel is launched for so many rows of each request.
    backend._target_verify_num_tokens_per_req = lambda spec_info: block_size
    backend._update_target_verify_buffers = fill_graph_buffers
    backend.init_forward_metadata = prepare_without_graph
