"""DFlash2's depthwise convolution along the rows of a block, and its PyTorch twin.

out[i, c] = sum over taps t of (base[t, c] + delta[i, t, c's group]) * x[i - t, c]. Rows before the block
count as zero.
"""

import torch
import triton
import triton.language as tl

from sglang_dflash.kernels.ops.speculative._twin import with_twin


def block_conv_torch(x: torch.Tensor, base: torch.Tensor, deltas: torch.Tensor, width: int) -> torch.Tensor:
    taps, groups = deltas.shape[1:]
    blocks = x.view(-1, width, groups, x.shape[1] // groups)
    kernel = base.view(taps, groups, -1) + deltas.unflatten(0, (-1, width))[..., None]
    out = kernel[:, :, 0] * blocks
    for tap in range(1, min(taps, width)):
        out[:, tap:].addcmul_(kernel[:, tap:, tap], blocks[:, :-tap])
    return out.view_as(x)


@with_twin(block_conv_torch)
def block_conv(x: torch.Tensor, base: torch.Tensor, deltas: torch.Tensor, width: int) -> torch.Tensor:
    """Convolve rows within their blocks.

    Args:
        x: [n, hidden], blocks of `width` rows.
        base: [taps, hidden].
        deltas: [n, taps, groups], last stride 1. A group is hidden / groups adjacent channels.
        width: rows of a block.
    """
    assert x.is_contiguous() and base.is_contiguous() and deltas.stride(2) == 1
    rows, hidden = x.shape
    taps, groups = deltas.shape[1:]
    out, tile = torch.empty_like(x), min(1024, triton.next_power_of_2(hidden))
    if rows:
        block_conv_kernel[(rows, triton.cdiv(hidden, tile))](
            x=x,
            base=base,
            deltas=deltas,
            out=out,
            width=width,
            hidden=hidden,
            group_size=hidden // groups,
            row_stride=deltas.stride(0),
            tap_stride=deltas.stride(1),
            TAPS=taps,
            TILE=tile,
            num_warps=max(1, min(4, tile // 256)),
        )
    return out


@triton.jit
def block_conv_kernel(
    x,
    base,
    deltas,
    out,
    width,
    hidden,
    group_size,
    row_stride,
    tap_stride,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < hidden
    group = channel // group_size
    total = tl.zeros((TILE,), tl.float32)
    for tap in tl.static_range(TAPS):
        seen = inside & (row % width >= tap)
        weight = tl.load(base + tap * hidden + channel, mask=seen, other=0).to(tl.float32)
        weight += tl.load(deltas + row * row_stride + tap * tap_stride + group, mask=seen, other=0).to(
            tl.float32
        )
        total += weight * tl.load(x + (row - tap) * hidden + channel, mask=seen, other=0).to(tl.float32)
    tl.store(out + row * hidden + channel, total, mask=inside)
