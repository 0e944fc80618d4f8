"""Proposals copied from a request's own text, after a match of its last tokens.

A history [rows, columns] int32 holds the text of each request by position, a row per row of the request
table. -1 marks places that no block may contain (nothing written, an image): it matches nothing and ends a
copy.
"""

import torch
import triton
import triton.language as tl

from sglang_dflash.kernels.ops.speculative._twin import with_twin
from sglang_dflash.kernels.ops.speculative.block import lanes

TILE = 2048  # positions per program of the lookup
PARTS = 64  # tiles reduced in one step
LONGEST_MATCH = 16  # most last tokens of a text that are compared. A copy itself fills its block
# Least tokens of a match. 5 or 8 lose a seventh to a quarter of the acceptance on edits
# (benchmark/results/copy-rules.md).
SHORTEST_MATCH = 3


def _look_back(history, requests, ends, back):
    """Gather the tokens up to `ends`, the last first; -1 before a text's beginning."""
    positions = ends[:, None] - back
    return torch.where(positions >= 0, history[requests[:, None], positions.clamp(min=0)], -1)


def find_match_torch(history, requests, seq_lens, bound):
    """`find_match` in PyTorch, for a CPU: on a GPU it waits for the device."""
    back, bound = torch.arange(LONGEST_MATCH, device=history.device), min(bound, history.shape[1])
    suffix = _look_back(history, requests, seq_lens, back)
    text = history[requests, :bound]
    is_earlier = torch.arange(bound, device=history.device) < seq_lens[:, None]
    rows, ends = ((text == suffix[:, :1]) & is_earlier).nonzero(as_tuple=True)
    found = _look_back(history, requests[rows], ends, back)
    same = (found == suffix[rows]) & (found >= 0)
    length = same.cumprod(dim=1).sum(dim=1)
    keys = torch.where(length >= SHORTEST_MATCH, (length << 32) + ends, 0)
    return torch.zeros_like(seq_lens).scatter_reduce_(0, rows, keys, "amax")[:, None]


@with_twin(find_match_torch)
def find_match(
    history: torch.Tensor, requests: torch.Tensor, seq_lens: torch.Tensor, bound: int
) -> torch.Tensor:
    """Find the longest (then latest) earlier occurrence of each request's last tokens.

    Occurrences may overlap the text's end. One launch on CUDA, without host synchronisation. Reads 4 bytes
    per token of text.

    In the text [5, 6, 7, 8, 9, 5, 6, 7, 8, 6, 7, 8], n = 11, the last tokens [6, 7, 8] stand before at
    positions 1 to 3 and 6 to 8. Neither is longer, so the later one counts: its key is (3 << 32) + 8.

    Args:
        history: [rows, columns] int32.
        requests: [bs] int64, rows of `history`.
        seq_lens: [bs] int64, n: the last token is at position n.
        bound: at least the largest n + 1, on the host.

    Returns:
        Keys [bs, parts] int64. The maximum of a row is (length of the match << 32) + the position of its last
        token, which is below n; 0 if no match has `SHORTEST_MATCH` tokens.
    """
    assert requests.is_contiguous() and seq_lens.is_contiguous() and history.stride(1) == 1
    bs, tiles = seq_lens.numel(), max(1, triton.cdiv(min(bound, history.shape[1]), TILE))
    keys = seq_lens.new_empty((bs, tiles))
    if bs:
        find_match_kernel[(bs, tiles)](
            history=history,
            requests=requests,
            seq_lens=seq_lens,
            keys=keys,
            stride=history.stride(0),
            tiles=tiles,
            LONGEST=LONGEST_MATCH,
            SHORTEST=SHORTEST_MATCH,
            TILE=TILE,
            num_warps=8,
        )
    return keys


def copy_matches_torch(history, requests, seq_lens, keys, block_size):
    """`copy_matches` in PyTorch, for a CPU: on a GPU it waits for the device."""
    copied = keys.new_full((len(keys), block_size), -1)
    if not keys.any():
        return copied, torch.zeros_like(seq_lens, dtype=torch.int32)
    best_match = keys.amax(dim=1)
    length, end = best_match >> 32, best_match & 0xFFFFFFFF
    step = torch.arange(block_size - 1, device=history.device)
    positions = end[:, None] + 1 + step % (seq_lens - end).clamp(min=1)[:, None]
    tokens = history[requests[:, None], positions].long()
    is_valid = (tokens >= 0).cumprod(dim=1).bool()
    copied[:, 1:] = torch.where(is_valid & (length > 0)[:, None], tokens, -1)
    return copied, torch.where(is_valid[:, 0], length, 0).int()


@with_twin(copy_matches_torch)
def copy_matches(
    history: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    keys: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the continuation of each match.

    A continuation that reaches the end of the text goes on with its own beginning: after "a b c a b c" comes
    "a b c a b c". One launch on CUDA, without host synchronisation.

    Args:
        history: that of `find_match`, as are `requests` and `seq_lens`.
        requests: [bs] int64.
        seq_lens: [bs] int64.
        keys: the result of `find_match`.
        block_size: B.

    Returns:
        Copied tokens [bs, B] int64, -1 where nothing is copied and in column 0, the anchor's; and match
        lengths [bs] int32, 0 without a match.
    """
    inputs = requests, seq_lens, keys
    assert all(t.is_contiguous() for t in inputs) and history.stride(1) == 1
    bs, tiles = keys.shape
    copied = keys.new_empty((bs, block_size))
    lengths = keys.new_empty((bs,), dtype=torch.int32)
    if bs:
        copy_matches_kernel[(bs,)](
            history=history,
            requests=requests,
            seq_lens=seq_lens,
            keys=keys,
            copied=copied,
            lengths=lengths,
            stride=history.stride(0),
            tiles=tiles,
            block_size=block_size,
            PARTS=PARTS,
            BLOCK=lanes(block_size),
            num_warps=1,
        )
    return copied, lengths


def append_tokens_torch(history, requests, seq_lens, out_tokens):
    """`append_tokens` in PyTorch, on any device."""
    positions = seq_lens[:, None] + 1 + torch.arange(out_tokens.shape[1], device=history.device)
    history[requests[:, None], positions] = out_tokens.int()


@with_twin(append_tokens_torch)
def append_tokens(
    history: torch.Tensor, requests: torch.Tensor, seq_lens: torch.Tensor, out_tokens: torch.Tensor
) -> None:
    """Write a verified block's output [bs, B] int64 from position n + 1 on.

    Tokens beyond the accepted ones are written too, without a meaning; the history has columns for them. One
    launch on CUDA, without host synchronisation.
    """
    assert all(t.is_contiguous() for t in (requests, seq_lens, out_tokens)) and history.stride(1) == 1
    bs, verify_len = out_tokens.shape
    if bs:
        append_tokens_kernel[(bs,)](
            history=history,
            requests=requests,
            seq_lens=seq_lens,
            out_tokens=out_tokens,
            stride=history.stride(0),
            verify_len=verify_len,
            BLOCK=lanes(verify_len),
            num_warps=1,
        )


@triton.jit(do_not_specialize=["tiles"])
def find_match_kernel(
    history,
    requests,
    seq_lens,
    keys,
    stride,
    tiles,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per request and tile of text. A lane whose tokens differ stops reading."""
    number, tile = tl.program_id(0), tl.program_id(1)
    last = tl.load(seq_lens + number)
    row = history + tl.load(requests + number).to(tl.int64) * stride
    end = tile * TILE + tl.arange(0, TILE).to(tl.int64)
    is_same = end < last
    length = tl.zeros((TILE,), tl.int64)
    for back in tl.static_range(LONGEST):
        wanted = tl.load(row + last - back, mask=last >= back, other=-1)
        token = tl.load(row + end - back, mask=is_same & (end >= back), other=-1)
        is_same = is_same & (token == wanted) & (token >= 0)
        length += is_same.to(tl.int64)
    key = tl.where(length >= SHORTEST, (length << 32) + end, 0)
    tl.store(keys + number * tiles + tile, tl.max(key, axis=0))


@triton.jit(do_not_specialize=["tiles", "block_size"])
def copy_matches_kernel(
    history,
    requests,
    seq_lens,
    keys,
    copied,
    lengths,
    stride,
    tiles,
    block_size,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per request."""
    number = tl.program_id(0)
    part = tl.arange(0, PARTS)
    best_match = tl.zeros((PARTS,), tl.int64)
    for first in range(0, tiles, PARTS):
        key = tl.load(keys + number * tiles + first + part, mask=first + part < tiles, other=0)
        best_match = tl.maximum(best_match, key)
    key = tl.max(best_match, axis=0)
    length = (key >> 32).to(tl.int32)
    end = key & 0xFFFFFFFF
    row = history + tl.load(requests + number).to(tl.int64) * stride
    slot = tl.arange(0, BLOCK)
    is_copied = (slot > 0) & (slot < block_size) & (length > 0)
    period = tl.maximum(tl.load(seq_lens + number) - end, 1)
    position = end + 1 + tl.where(is_copied, slot - 1, 0) % period
    token = tl.load(row + position, mask=is_copied, other=0)
    # The first slot that nothing can be copied to.
    stop = tl.min(tl.where(is_copied & (token < 0), slot, BLOCK), axis=0)
    token = tl.where(is_copied & (slot < stop), token, -1)
    tl.store(copied + number * block_size + slot, token.to(tl.int64), mask=slot < block_size)
    tl.store(lengths + number, tl.where(stop > 1, length, 0))


@triton.jit(do_not_specialize=["verify_len"])
def append_tokens_kernel(history, requests, seq_lens, out_tokens, stride, verify_len, BLOCK: tl.constexpr):
    """One program per request."""
    number = tl.program_id(0)
    request = tl.load(requests + number).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    token = tl.load(out_tokens + number * verify_len + slot, mask=slot < verify_len)
    position = request * stride + tl.load(seq_lens + number) + 1 + slot
    tl.store(history + position, token.to(tl.int32), mask=slot < verify_len)
