"""Greedy acceptance, and everything the next cycle needs of it, in one launch."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflash.srt.speculative.acceptance import accept_matching_prefix


class Acceptance(NamedTuple):
    """What bs verified blocks leave behind.

    accept_len: [bs] int32, drafted tokens kept; the bonus token is not counted.
    commit_lens: [bs] int32, accept_len + 1.
    bonus: [bs] int64, the target's token after the kept ones; the anchor of the next block.
    new_seq_lens: [bs] int64, seq_lens + commit_lens.
    """

    accept_len: torch.Tensor
    commit_lens: torch.Tensor
    bonus: torch.Tensor
    new_seq_lens: torch.Tensor


def accept_greedy(tokens: torch.Tensor, target_tokens: torch.Tensor, seq_lens: torch.Tensor) -> Acceptance:
    """Keep drafted tokens while they are what the target says itself: `acceptance.accept_matching_prefix`.

    tokens: [bs, B] int64, column 0 the anchor, columns 1.. the drafted tokens.
    target_tokens: [bs, B] int64, entry k the target's token after block position k.
    seq_lens: [bs] int64, committed lengths before the block.

    One launch on CUDA, without host synchronisation. Moves bs * (16 B + 24) bytes: per request B - 1 drafted
    tokens, B of the target's and one length read, two int64 and two int32 written.
    """
    run = accept_greedy_triton if tokens.is_cuda else accept_greedy_torch
    return run(tokens, target_tokens, seq_lens)


def accept_greedy_torch(tokens, target_tokens, seq_lens):
    """`accept_greedy` in PyTorch, on any device."""
    verdict = accept_matching_prefix(tokens, target_tokens)
    commit_lens = verdict.accept_len + 1
    return Acceptance(verdict.accept_len, commit_lens, verdict.bonus, seq_lens + commit_lens)


def accept_greedy_triton(tokens, target_tokens, seq_lens):
    """`accept_greedy` as a Triton kernel. Tensors contiguous."""
    assert tokens.is_contiguous() and target_tokens.is_contiguous() and seq_lens.is_contiguous()
    bs, block_size = tokens.shape
    out = Acceptance(
        accept_len=seq_lens.new_empty((bs,), dtype=torch.int32),
        commit_lens=seq_lens.new_empty((bs,), dtype=torch.int32),
        bonus=torch.empty_like(seq_lens),
        new_seq_lens=torch.empty_like(seq_lens),
    )
    if bs:
        width = triton.next_power_of_2(block_size)
        _accept_greedy_kernel[(bs,)](
            tokens, target_tokens, seq_lens, *out, block_size, BLOCK=width, num_warps=1
        )
    return out


@triton.jit
def _accept_greedy_kernel(
    tokens,
    target_tokens,
    seq_lens,
    accept_len,
    commit_lens,
    bonus,
    new_seq_lens,
    block_size,
    BLOCK: tl.constexpr,
):
    """One program per request."""
    request = tl.program_id(0)
    slot = tl.arange(0, BLOCK)
    wanted = tl.load(target_tokens + request * block_size + slot, mask=slot < block_size)
    drafted = tl.load(tokens + request * block_size + slot + 1, mask=slot < block_size - 1)
    # The first slot whose successor was not drafted as the target has it. The last slot has no successor.
    stops = (drafted != wanted) | (slot >= block_size - 1)
    kept = tl.min(tl.where(stops, slot, BLOCK), axis=0)
    tl.store(accept_len + request, kept)
    tl.store(commit_lens + request, kept + 1)
    tl.store(bonus + request, tl.sum(tl.where(slot == kept, wanted, 0), axis=0))
    tl.store(new_seq_lens + request, tl.load(seq_lens + request) + kept + 1)
