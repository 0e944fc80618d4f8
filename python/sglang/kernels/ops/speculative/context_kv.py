"""Context into the draft's KV pool: k-norm, RoPE and the scatter to all layers, fused.

The GEMM over the stacked K/V weights of all layers comes before it (`models/dflash.py`). The rest is bound by
memory, and would otherwise be a dozen launches that each read and write all keys.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_dflash.kernels.ops.speculative._twin import with_twin

_TRITON_DTYPE = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class KVPoolPointers:
    """Addresses of a KV pool for one kernel, copied to the device. Made once, after the pool."""

    k_buffers: tuple[torch.Tensor, ...]  # per layer [slots, kv_heads, head_dim] of `dtype`
    v_buffers: tuple[torch.Tensor, ...]
    k_addresses: torch.Tensor  # [layers] int64 on the pool's device, the start of each buffer
    v_addresses: torch.Tensor
    dtype: torch.dtype
    slot_stride: int  # elements from one slot to the next
    slot_alignment: int  # bytes, at most 16, that divide every slot's address: the most to write at once

    @classmethod
    def from_pools(
        cls,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        dtype: torch.dtype | None = None,
    ) -> "KVPoolPointers":
        """Collect a pool's per-layer buffers.

        `dtype` is that of the buffers' bytes; SGLang keeps an fp8 pool as uint8. None: the tensors' dtype.

        Raises:
            ValueError: buffers differ, have a dtype that the kernel does not write, or do not hold one
                contiguous [kv_heads, head_dim] row per slot (SGLang's "nhd" layout).
        """
        buffers = [*k_buffers, *v_buffers]
        dtype = dtype or buffers[0].dtype
        layouts = {(b.dtype, tuple(b.shape), b.stride(), b.device) for b in buffers}
        if len(layouts) > 1:
            raise ValueError(f"the layers of a KV pool must be alike, got {sorted(map(str, layouts))}")
        first = buffers[0]
        if first.dim() != 3 or first.stride()[1:] != (first.shape[2], 1):
            raise ValueError(
                "a KV pool must have one contiguous [kv_heads, head_dim] row per slot, "
                f"got shape {tuple(first.shape)}, strides {first.stride()}"
            )
        kept_as = (dtype, torch.uint8) if dtype in _FP8 else (dtype,)
        if dtype not in _TRITON_DTYPE or first.dtype not in kept_as:
            raise ValueError(f"cannot write {dtype} into a KV pool of {first.dtype}")
        k_addresses, v_addresses = ([b.data_ptr() for b in side] for side in (k_buffers, v_buffers))
        return cls(
            k_buffers=tuple(b.view(dtype) for b in k_buffers),
            v_buffers=tuple(b.view(dtype) for b in v_buffers),
            k_addresses=torch.tensor(k_addresses, dtype=torch.int64, device=first.device),
            v_addresses=torch.tensor(v_addresses, dtype=torch.int64, device=first.device),
            dtype=dtype,
            slot_stride=first.stride(0),
            slot_alignment=math.gcd(16, first.stride(0) * first.itemsize, *k_addresses, *v_addresses),
        )


def write_context_kv_torch(
    kv, k_norm_weight, eps, cos_sin_cache, positions, cache_loc, pool, accept_len=None, block_size=1
):
    """`write_context_kv` in PyTorch, on any device; synchronises with `accept_len`."""
    if accept_len is not None:
        kept = torch.arange(block_size, device=kv.device) <= accept_len[:, None]
        rows = kept.flatten().nonzero().squeeze(1)
        # On a CPU, index_select and index_copy_ are up to four times as fast as x[rows].
        kv, positions, cache_loc = (x.index_select(0, rows) for x in (kv, positions, cache_loc))
    keys, values = kv.unbind(2)
    keys = rotate(rms_norm(keys, k_norm_weight[:, None], eps), positions, cos_sin_cache)
    for states, buffers in ((keys, pool.k_buffers), (values, pool.v_buffers)):
        if pool.dtype in _FP8:
            largest = torch.finfo(pool.dtype).max
            states = states.clamp(-largest, largest)
        states = _make_indexable(states.to(pool.dtype))
        for layer, buffer in enumerate(buffers):
            _make_indexable(buffer).index_copy_(0, cache_loc, states[:, layer])


@with_twin(write_context_kv_torch)
def write_context_kv(
    kv: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor,
    cache_loc: torch.Tensor,
    pool: KVPoolPointers,
    accept_len: torch.Tensor | None = None,
    block_size: int = 1,
) -> None:
    """Norm and rotate keys of n context rows; write keys and values to all layers' pools.

    Computes `rms_norm` and `rotate`, then SGLang's `set_kv_buffer`. The norm is float32. The normed key,
    cosine, sine and both products are each rounded to kv's dtype. fp8 saturates. e4m3 on CUDA needs sm_89.

    One launch on CUDA, without host synchronisation. Moves rows * layers * 2 * kv_heads * head_dim * (kv
    itemsize + pool itemsize) bytes for the rows written. Other reads come once from memory and then from
    cache: per row a cosine row and 16 bytes of position and slot, per layer a norm weight.

    Args:
        kv: [n, layers, 2, kv_heads, head_dim] float, the stacked projection; K at index 0 of dim 2, V at 1.
        k_norm_weight: [layers, head_dim] float.
        eps: of the norm.
        cos_sin_cache: [max_position, head_dim] float, cosines then sines; neox rotation over all of head_dim.
        positions: [n] int64.
        cache_loc: [n] int64. Each slot at most once among the rows written.
        pool: the pools to write to.
        accept_len: [bs] int32 with n = bs * block_size. Of block i only rows 0 .. accept_len[i] are written,
            the anchor and the kept tokens; nothing for -1. None: every row is written, as in prefill.
        block_size: rows of a block.
    """
    rows, layers, _, heads, head_dim = kv.shape
    assert kv.is_contiguous() and k_norm_weight.is_contiguous() and cos_sin_cache.stride(1) == 1
    assert positions.is_contiguous() and cache_loc.is_contiguous()
    assert k_norm_weight.shape == (layers, head_dim)
    assert cos_sin_cache.shape[1] == head_dim and head_dim % 2 == 0
    assert len(pool.k_buffers) == layers and pool.k_buffers[0].shape[1:] == (heads, head_dim)
    if accept_len is None:
        grid = (rows, 1, layers)
    else:
        assert accept_len.is_contiguous() and rows == accept_len.numel() * block_size
        grid = (block_size, accept_len.numel(), layers)
    if not rows:
        return
    block_heads, block_half = triton.next_power_of_2(heads), triton.next_power_of_2(head_dim // 2)
    write_context_kv_kernel[grid](
        kv=kv,
        k_norm_weight=k_norm_weight,
        cos_sin_cache=cos_sin_cache,
        positions=positions,
        cache_loc=cache_loc,
        accept_len=accept_len,
        k_addresses=pool.k_addresses,
        v_addresses=pool.v_addresses,
        cos_sin_stride=cos_sin_cache.stride(0),
        slot_stride=pool.slot_stride,
        eps=eps,
        HEADS=heads,
        HALF=head_dim // 2,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        POOL_DTYPE=_TRITON_DTYPE[pool.dtype],
        SLOT_ALIGNMENT=pool.slot_alignment,
        FP8_MAX=torch.finfo(pool.dtype).max if pool.dtype in _FP8 else None,
        # Eight elements of each tile per thread: 16 bytes, the widest access there is, for 16-bit states.
        num_warps=min(8, max(1, block_heads * block_half // (32 * 8))),
        # A fused multiply-add would skip a product's rounding: on an H100 every sixth key was a step off.
        enable_fp_fusion=False,
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise over the last dim in float32, as SGLang's RMSNorm; weight broadcasts."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * weight).to(x.dtype)


def rotate(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """Rotate x [n, ..., dim] by RoPE at `positions` [n]; scalings are in the table."""
    cos_sin = cos_sin_cache.index_select(0, positions).to(x.dtype)
    cos, sin = cos_sin.view(-1, *[1] * (x.dim() - 2), x.shape[-1]).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _make_indexable(x: torch.Tensor) -> torch.Tensor:
    """View fp8 as bytes: PyTorch cannot write fp8 elements by index on every device."""
    return x.view(torch.uint8) if x.dtype in _FP8 else x


@triton.jit
def write_context_kv_kernel(
    kv,
    k_norm_weight,
    cos_sin_cache,
    positions,
    cache_loc,
    accept_len,
    k_addresses,
    v_addresses,
    cos_sin_stride,
    slot_stride,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    POOL_DTYPE: tl.constexpr,
    SLOT_ALIGNMENT: tl.constexpr,
    FP8_MAX: tl.constexpr,
):
    """One program per row and layer. Grid: slots, blocks, layers; prefill rows, 1, layers."""
    slot_in_block = tl.program_id(0)
    block = tl.program_id(1)
    layer = tl.program_id(2)
    if accept_len is not None:
        if slot_in_block > tl.load(accept_len + block):
            return
    row = block.to(tl.int64) * tl.num_programs(0) + slot_in_block
    slot = tl.load(cache_loc + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)

    head = tl.arange(0, BLOCK_HEADS)[:, None]
    col = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (head < HEADS) & (col < HALF)
    first = head * (2 * HALF) + col  # the elements that rotate together: column c and c + HALF of a head
    second = first + HALF
    k_in = kv + (row * tl.num_programs(2) + layer) * (4 * HEADS * HALF)
    v_in = k_in + 2 * HEADS * HALF
    k1 = tl.load(k_in + first, mask=inside, other=0.0)
    k2 = tl.load(k_in + second, mask=inside, other=0.0)
    v1 = tl.load(v_in + first, mask=inside)
    v2 = tl.load(v_in + second, mask=inside)
    # Values are written first, which frees their registers for the keys.
    v_out = tl.load(v_addresses + layer).to(tl.pointer_type(POOL_DTYPE)) + slot * slot_stride
    # The compiler knows nothing of a loaded address: without the hint it writes element by element.
    v_out = tl.multiple_of(v_out, SLOT_ALIGNMENT)
    tl.store(v_out + first, _as_stored(v1, FP8_MAX, POOL_DTYPE), mask=inside)
    tl.store(v_out + second, _as_stored(v2, FP8_MAX, POOL_DTYPE), mask=inside)
    # Factors that the heads share are read once per head (from cache). Each thread then holds what it
    # needs, without an exchange through shared memory.
    cols = tl.broadcast_to(col, (BLOCK_HEADS, BLOCK_HALF))
    weight = k_norm_weight + layer * (2 * HALF) + cols
    w1 = tl.load(weight, mask=inside).to(tl.float32)
    w2 = tl.load(weight + HALF, mask=inside).to(tl.float32)
    angle = cos_sin_cache + position * cos_sin_stride + cols
    dtype: tl.constexpr = kv.dtype.element_ty
    cos = tl.load(angle, mask=inside).to(dtype).to(tl.float32)
    sin = tl.load(angle + HALF, mask=inside).to(dtype).to(tl.float32)

    wide1 = k1.to(tl.float32)
    wide2 = k2.to(tl.float32)
    mean_square = (tl.sum(wide1 * wide1, axis=1) + tl.sum(wide2 * wide2, axis=1)) / (2 * HALF)
    inverse = tl.rsqrt(mean_square + eps)[:, None]
    wide1 = (wide1 * inverse * w1).to(dtype).to(tl.float32)
    wide2 = (wide2 * inverse * w2).to(dtype).to(tl.float32)
    k1 = ((wide1 * cos).to(dtype).to(tl.float32) - (wide2 * sin).to(dtype).to(tl.float32)).to(dtype)
    k2 = ((wide2 * cos).to(dtype).to(tl.float32) + (wide1 * sin).to(dtype).to(tl.float32)).to(dtype)

    k_out = tl.load(k_addresses + layer).to(tl.pointer_type(POOL_DTYPE)) + slot * slot_stride
    k_out = tl.multiple_of(k_out, SLOT_ALIGNMENT)
    tl.store(k_out + first, _as_stored(k1, FP8_MAX, POOL_DTYPE), mask=inside)
    tl.store(k_out + second, _as_stored(k2, FP8_MAX, POOL_DTYPE), mask=inside)


@triton.jit
def _as_stored(x, FP8_MAX: tl.constexpr, POOL_DTYPE: tl.constexpr):
    """Cast to the pool's dtype; fp8 saturates."""
    if FP8_MAX is not None:
        x = tl.clamp(x.to(tl.float32), -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(POOL_DTYPE)
