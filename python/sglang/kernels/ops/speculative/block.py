"""Inputs of a draft block, and the offsets of blocks for attention over ragged rows."""

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from sglang_dflash.kernels.ops.speculative._twin import with_twin

PADDING_SLOT = 0  # of SGLang's KV pools; nothing reads it


def lanes(slots: int) -> int:
    """Return the lanes for the slots of a block: a warp's, or the next power of two.

    Blocks of all verify lengths then share one compiled kernel.
    """
    return max(32, triton.next_power_of_2(slots))


def prepare_block_torch(bonus_tokens, seq_lens, req_pool_indices, req_to_token, mask_token_id, block_size):
    """`prepare_block` in PyTorch, on any device."""
    tokens = pad(bonus_tokens[:, None], (0, block_size - 1), value=mask_token_id)
    positions = seq_lens[:, None] + torch.arange(block_size, device=seq_lens.device)
    max_len = req_to_token.shape[1]
    cache_loc = req_to_token[req_pool_indices[:, None], positions.clamp(max=max_len - 1)].long()
    return tokens, positions, cache_loc.masked_fill_(positions >= max_len, PADDING_SLOT).flatten()


@with_twin(prepare_block_torch)
def prepare_block(
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    mask_token_id: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Build blocks of B slots: the anchor, then mask tokens (arXiv 2602.06036, section 3).

    One launch on CUDA, without host synchronisation. Moves bs * (24 + 28 B) bytes: per request three int64
    read; per slot one int32 read and three int64 written.

    Args:
        bonus_tokens: [bs] int64, the anchors.
        seq_lens: [bs] int64, committed lengths n. A block covers positions n .. n + B - 1.
        req_pool_indices: [bs] int64, the requests' rows of the request table.
        req_to_token: [rows, max_len] int32, the KV slot of each position. Positions past the table get
            SGLang's padding slot: copies may make blocks longer than what some requests verify.
        mask_token_id: token of the slots after the anchor.
        block_size: B.

    Returns:
        Tokens [bs, B], positions [bs, B] and their KV slots [bs * B], all int64.
    """
    per_request = bonus_tokens, seq_lens, req_pool_indices
    assert all(t.is_contiguous() for t in per_request) and req_to_token.stride(1) == 1
    bs = seq_lens.numel()
    tokens = seq_lens.new_empty((bs, block_size))
    positions = torch.empty_like(tokens)
    cache_loc = seq_lens.new_empty((bs * block_size,))
    if bs:
        prepare_block_kernel[(bs,)](
            bonus_tokens=bonus_tokens,
            seq_lens=seq_lens,
            req_pool_indices=req_pool_indices,
            req_to_token=req_to_token,
            tokens=tokens,
            positions=positions,
            cache_loc=cache_loc,
            table_stride=req_to_token.stride(0),
            max_len=req_to_token.shape[1],
            mask_token_id=mask_token_id,
            block_size=block_size,
            BLOCK=lanes(block_size),
            PADDING=PADDING_SLOT,
            num_warps=1,
        )
    return tokens, positions, cache_loc


@triton.jit(do_not_specialize=["block_size", "max_len"])
def prepare_block_kernel(
    bonus_tokens,
    seq_lens,
    req_pool_indices,
    req_to_token,
    tokens,
    positions,
    cache_loc,
    table_stride,
    max_len,
    mask_token_id,
    block_size,
    BLOCK: tl.constexpr,
    PADDING: tl.constexpr,
):
    """One program per request."""
    request = tl.program_id(0)
    slot = tl.arange(0, BLOCK)
    inside = slot < block_size
    out = request * block_size + slot
    position = tl.load(seq_lens + request) + slot
    row = tl.load(req_pool_indices + request).to(tl.int64)  # rows * max_len may exceed 2**31
    loc = tl.load(
        req_to_token + row * table_stride + position, mask=inside & (position < max_len), other=PADDING
    )
    tl.store(tokens + out, tl.where(slot == 0, tl.load(bonus_tokens + request), mask_token_id), mask=inside)
    tl.store(positions + out, position, mask=inside)
    tl.store(cache_loc + out, loc.to(tl.int64), mask=inside)


def block_offsets_torch(seq_lens, block_size, counts=None):
    """`block_offsets` in PyTorch, on any device."""
    counts = torch.full_like(seq_lens, block_size) if counts is None else counts
    lengths = seq_lens + counts
    keys, queries = (pad(part.cumsum(0, dtype=torch.int32), (1, 0)) for part in (lengths, counts))
    return lengths, keys, queries


@with_twin(block_offsets_torch)
def block_offsets(
    seq_lens: torch.Tensor, block_size: int, counts: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute where the keys and queries of each block begin and end, for FlashInfer.

    One launch on CUDA, without host synchronisation.

    Args:
        seq_lens: [bs] int, committed lengths. A request's keys are these tokens and its block's.
        block_size: slots of each block without `counts`.
        counts: [bs] int32, slots of each request's block. None: `block_size` slots each.

    Returns:
        Lengths with the block [bs], as seq_lens; key offsets [bs + 1] int32; query offsets [bs + 1] int32.
    """
    assert seq_lens.is_contiguous() and (counts is None or counts.is_contiguous())
    lengths, bs = torch.empty_like(seq_lens), seq_lens.numel()
    keys, queries = (seq_lens.new_empty(bs + 1, dtype=torch.int32) for _ in range(2))
    block_offsets_kernel[(1,)](
        seq_lens=seq_lens,
        counts=counts,
        lengths=lengths,
        keys=keys,
        queries=queries,
        bs=bs,
        block_size=block_size,
        BLOCK=max(128, triton.next_power_of_2(bs + 1)),  # one compiled kernel for most batches
    )
    return lengths, keys, queries


@triton.jit(do_not_specialize=["bs", "block_size"])
def block_offsets_kernel(
    seq_lens,
    counts,
    lengths,
    keys,
    queries,
    bs,
    block_size,
    BLOCK: tl.constexpr,
):
    """One program for all requests."""
    entry = tl.arange(0, BLOCK)
    inside = entry < bs
    if counts is not None:
        count = tl.load(counts + entry, mask=inside, other=0)
    else:
        count = tl.where(inside, block_size, 0)
    length = tl.load(seq_lens + entry, mask=inside, other=0) + count
    tl.store(lengths + entry, length, mask=inside)
    tl.store(keys + 1 + entry, tl.cumsum(length.to(tl.int32), axis=0), mask=inside)
    tl.store(keys + entry, 0, mask=entry == 0)
    tl.store(queries + 1 + entry, tl.cumsum(count.to(tl.int32), axis=0), mask=inside)
    tl.store(queries + entry, 0, mask=entry == 0)
