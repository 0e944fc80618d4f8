"""What verified blocks leave behind, in one launch: what is kept, what of it counts, and what the next cycle
needs of it."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflash.srt.speculative.acceptance.greedy import Verdict, accept_matching_prefix


class Acceptance(NamedTuple):
    """What bs verified blocks leave behind.

    accept_len: [bs] int32, drafted tokens kept; the bonus token is not counted.
    commit_lens: [bs] int32, accept_len + 1.
    bonus: [bs] int64, the target's token after the kept ones; the anchor of the next block.
    new_seq_lens: [bs] int64, seq_lens + commit_lens.
    said: [bs, B] int64, what the scheduler is told: the output tokens, or, where one of a request's new ones
        rests on broken logits, nothing but `broken_token`.
    """

    accept_len: torch.Tensor
    commit_lens: torch.Tensor
    bonus: torch.Tensor
    new_seq_lens: torch.Tensor
    said: torch.Tensor


def accept_greedy(
    tokens: torch.Tensor,
    target_tokens: torch.Tensor,
    best: torch.Tensor,
    seq_lens: torch.Tensor,
    broken_token: int,
) -> Acceptance:
    """Keep drafted tokens while they are what the target says itself: `acceptance.accept_matching_prefix`.

    tokens: [bs, B] int64, column 0 the anchor, columns 1.. the drafted tokens.
    target_tokens: [bs, B] int64, entry k the target's token after block position k.
    best: [bs, B] float, the largest logit that each of them was chosen by: NaN or infinite, the logits were
    broken. seq_lens: [bs] int64, committed lengths before the block.
    broken_token: outside the vocabulary; SGLang ends a request at it.

    One launch on CUDA, without host synchronisation. Moves bs * (28 B + 24) bytes with float32 logits: per
    request B - 1 drafted tokens, B of the target's, B logits and one length read, B + 2 int64 and two int32
    written."""
    run = accept_greedy_triton if tokens.is_cuda else accept_greedy_torch
    return run(tokens, target_tokens, best, seq_lens, broken_token)


def settle(verdict: Verdict, best: torch.Tensor, seq_lens: torch.Tensor, broken_token: int) -> Acceptance:
    """The same of blocks that were accepted by another rule. best: of every position of the verify forward,
    [bs, B]."""
    run = settle_triton if best.is_cuda else settle_torch
    return run(verdict, best, seq_lens, broken_token)


def accept_greedy_torch(tokens, target_tokens, best, seq_lens, broken_token):
    """`accept_greedy` in PyTorch, on any device."""
    return settle_torch(accept_matching_prefix(tokens, target_tokens), best, seq_lens, broken_token)


def settle_torch(verdict, best, seq_lens, broken_token):
    """`settle` in PyTorch, on any device, with a look at whether anything is broken."""
    commit_lens = verdict.accept_len + 1
    said = verdict.out_tokens
    is_broken = ~best.isfinite()
    if bool(is_broken.any()):
        said = said.masked_fill((is_broken & verdict.is_output).any(dim=1, keepdim=True), broken_token)
    return Acceptance(verdict.accept_len, commit_lens, verdict.bonus, seq_lens + commit_lens, said)


def accept_greedy_triton(tokens, target_tokens, best, seq_lens, broken_token):
    """`accept_greedy` as a Triton kernel. Tensors contiguous."""
    accept_len = seq_lens.new_empty((seq_lens.numel(),), dtype=torch.int32)
    bonus = torch.empty_like(seq_lens)
    return _launch(tokens, target_tokens, best, seq_lens, broken_token, accept_len, bonus, is_settled=False)


def settle_triton(verdict, best, seq_lens, broken_token):
    """`settle` as a Triton kernel. Tensors contiguous."""
    accept_len, out_tokens, bonus = verdict.accept_len, verdict.out_tokens, verdict.bonus
    return _launch(out_tokens, out_tokens, best, seq_lens, broken_token, accept_len, bonus, is_settled=True)


def _launch(
    tokens, target_tokens, best, seq_lens, broken_token, accept_len, bonus, is_settled: bool
) -> Acceptance:
    """accept_len is read where the verdict is settled; else it is written, and so is bonus."""
    assert all(t.is_contiguous() for t in (tokens, target_tokens, best, seq_lens, accept_len))
    bs, block_size = tokens.shape
    out = Acceptance(
        accept_len, torch.empty_like(accept_len), bonus, torch.empty_like(seq_lens), torch.empty_like(tokens)
    )
    if bs:
        _accept_kernel[(bs,)](
            tokens,
            target_tokens,
            best,
            seq_lens,
            *out,
            block_size,
            broken_token,
            IS_SETTLED=is_settled,
            BLOCK=triton.next_power_of_2(block_size),
            num_warps=1,
        )
    return out


@triton.jit
def _accept_kernel(
    tokens,
    target_tokens,
    best,
    seq_lens,
    accept_len,
    commit_lens,
    bonus,
    new_seq_lens,
    said,
    block_size,
    broken_token,
    IS_SETTLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per request."""
    request = tl.program_id(0)
    slot = tl.arange(0, BLOCK)
    inside = slot < block_size
    at = request * block_size + slot
    wanted = tl.load(target_tokens + at, mask=inside)
    if IS_SETTLED:
        kept = tl.load(accept_len + request)
    else:
        drafted = tl.load(tokens + at + 1, mask=slot < block_size - 1)
        # The first slot whose successor was not drafted as the target has it. The last slot has no successor.
        stops = (drafted != wanted) | (slot >= block_size - 1)
        kept = tl.min(tl.where(stops, slot, BLOCK), axis=0)
        tl.store(accept_len + request, kept)
        tl.store(bonus + request, tl.sum(tl.where(slot == kept, wanted, 0), axis=0))
    # Also false for NaN.
    is_finite = tl.abs(tl.load(best + at, mask=inside, other=0.0).to(tl.float32)) < float("inf")
    num_broken = tl.sum(((slot <= kept) & ~is_finite).to(tl.int32), axis=0)
    tl.store(said + at, tl.where(num_broken > 0, broken_token, wanted), mask=inside)
    tl.store(commit_lens + request, kept + 1)
    tl.store(new_seq_lens + request, tl.load(seq_lens + request) + kept + 1)
