"""Accept drafted tokens, and compute the lengths that follow, in one launch.

Shapes: bs requests, blocks of B slots. Slot 0 is the anchor, which is committed already.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflash.kernels.ops.speculative._twin import with_twin
from sglang_dflash.kernels.ops.speculative.block import lanes

NO_LIMIT = 2**63 - 1


class AcceptedBlocks(NamedTuple):
    """Verified blocks and the lengths that follow from them."""

    accept_len: torch.Tensor  # [bs] int32, accepted drafted tokens, without the bonus token
    commit_lens: torch.Tensor  # [bs] int32, accept_len + 1
    bonus: torch.Tensor  # [bs] int64, the target's token after the accepted ones, the next block's anchor
    committed: torch.Tensor  # [bs] int64, tokens with committed KV after this block, at most `longest`
    tokens: torch.Tensor  # [bs, B] int64, of which the first commit_lens[i] of row i are its output
    # [bs, B] int64, `tokens` for the scheduler, or `broken_token` alone if logits of the output are broken.
    reported: torch.Tensor


class RelayTables(NamedTuple):
    """Tables by request row: the lengths and anchors of the next step."""

    rows: torch.Tensor  # [bs] int64, of the requests
    lengths: torch.Tensor  # [R] int64, takes `AcceptedBlocks.committed`
    anchors: torch.Tensor  # [R] int64, takes `AcceptedBlocks.bonus`


def accept_matching_prefix(block: torch.Tensor, target_tokens: torch.Tensor) -> torch.Tensor:
    """Count the drafted tokens up to the first that is not the target's: [bs] int32.

    Lossless for any draft. Greedy: every accepted token equals the argmax given the tokens before it.
    Sampled: slot k is a draw from the target's distribution given the prefix, independent of the draft.
    The comparison only decides whether later draws were made on the right prefix. This is speculative
    sampling (Leviathan et al. 2022) with a one-hot draft distribution: a drafted token x is accepted with
    probability p(x), and otherwise the token comes from p without x, normalised.

    Args:
        block: [bs, B] int64, column 0 the anchor, columns 1.. the drafted tokens.
        target_tokens: [bs, B] int64, entry k the target's token after block position k: its argmax for a
            greedy request, a draw of its sampler for a sampled one.
    """
    if block.shape[1] == 1:
        return block.new_zeros(len(block), dtype=torch.int32)
    matches = block[:, 1:] == target_tokens[:, :-1]
    return matches.cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32)


def accept_blocks_torch(
    accept_len, tokens, max_logits, committed, broken_token, relay=None, longest=NO_LIMIT, block=None
) -> AcceptedBlocks:
    """Run `accept_blocks` in PyTorch, on any device, with a read on the host."""
    if accept_len is None:
        accept_len = accept_matching_prefix(block, tokens)
    commit_lens = accept_len + 1
    bonus = tokens.gather(1, accept_len.long()[:, None]).squeeze(1)
    reported = tokens
    if not math.isfinite(max_logits.sum()):  # one operator of a few, as each costs more than its work
        is_broken = ~max_logits.isfinite()
        is_output = torch.arange(tokens.shape[1], device=tokens.device) <= accept_len[:, None]
        reported = tokens.masked_fill((is_broken & is_output).any(dim=1, keepdim=True), broken_token)
    new_committed = (committed + commit_lens).clamp(max=longest)
    if relay is not None:
        relay.lengths.index_copy_(0, relay.rows, new_committed)
        relay.anchors.index_copy_(0, relay.rows, bonus)
    return AcceptedBlocks(
        accept_len=accept_len,
        commit_lens=commit_lens,
        bonus=bonus,
        committed=new_committed,
        tokens=tokens,
        reported=reported,
    )


@with_twin(accept_blocks_torch)
def accept_blocks(
    accept_len: torch.Tensor | None,
    tokens: torch.Tensor,
    max_logits: torch.Tensor,
    committed: torch.Tensor,
    broken_token: int,
    relay: RelayTables | None = None,
    longest: int = NO_LIMIT,
    block: torch.Tensor | None = None,
) -> AcceptedBlocks:
    """Add bonus tokens and lengths to accepted drafted tokens, or decide these too.

    One launch on CUDA, without host synchronisation. Moves bs * (28 B + 24) bytes with float32 logits if it
    decides: per request B - 1 drafted tokens, B of the target's, B logits and one length read, B + 2 int64
    and two int32 written. A relay adds three int64.

    Args:
        accept_len: [bs] int32, accepted drafted tokens. None: those of `accept_matching_prefix`.
        tokens: [bs, B] int64, the accepted tokens, then the bonus token, then ids without a meaning. To
            decide, entry k is the target's token after block position k.
        max_logits: [bs, B] float, the largest logit at each position. NaN or infinite: the logits are broken.
        committed: [bs] int64, tokens with committed KV before the block.
        broken_token: id outside the vocabulary, at which SGLang ends a request.
        relay: tables to write lengths and bonus tokens to as well.
        longest: the most tokens of a text. Under overlap a request that has reached its end runs once more.
            Its next block then begins here, so that all of it stays in the request table.
        block: [bs, B] int64, column 0 the anchor, columns 1.. the drafted tokens. None, with `accept_len`.
    """
    if accept_len is None:
        assert block is not None and block.is_contiguous()
        accept_len = torch.empty_like(committed, dtype=torch.int32)
    assert all(t.is_contiguous() for t in (tokens, max_logits, committed, accept_len))
    bs, block_size = tokens.shape
    accepted = AcceptedBlocks(
        accept_len=accept_len,
        commit_lens=torch.empty_like(accept_len),
        bonus=torch.empty_like(committed),
        committed=torch.empty_like(committed),
        tokens=tokens,
        reported=torch.empty_like(tokens),
    )
    if bs:
        accept_kernel[(bs,)](
            block=block,
            max_logits=max_logits,
            committed=committed,
            accept_len=accepted.accept_len,
            commit_lens=accepted.commit_lens,
            bonus=accepted.bonus,
            new_committed=accepted.committed,
            tokens=accepted.tokens,
            reported=accepted.reported,
            relay_rows=None if relay is None else relay.rows,
            relay_lengths=None if relay is None else relay.lengths,
            relay_anchors=None if relay is None else relay.anchors,
            block_size=block_size,
            broken_token=broken_token,
            longest=longest,
            BLOCK=lanes(block_size),
            num_warps=1,
        )
    return accepted


@triton.jit(do_not_specialize=["block_size", "longest"])
def accept_kernel(
    block,
    max_logits,
    committed,
    accept_len,
    commit_lens,
    bonus,
    new_committed,
    tokens,
    reported,
    relay_rows,
    relay_lengths,
    relay_anchors,
    block_size,
    broken_token,
    longest,
    BLOCK: tl.constexpr,
):
    """Accept the block of one request. If `block` is given, `accept_len` is written."""
    request = tl.program_id(0)
    slot = tl.arange(0, BLOCK)
    inside = slot < block_size
    at = request * block_size + slot
    token = tl.load(tokens + at, mask=inside)
    if block is None:
        accepted = tl.load(accept_len + request)
    else:
        drafted = tl.load(block + at + 1, mask=slot < block_size - 1)
        # The first slot whose successor differs from the target's. The last slot has no successor.
        stops = (drafted != token) | (slot >= block_size - 1)
        accepted = tl.min(tl.where(stops, slot, BLOCK), axis=0)
        tl.store(accept_len + request, accepted)
    anchor = tl.sum(tl.where(slot == accepted, token, 0), axis=0)
    tl.store(bonus + request, anchor)
    # Also false for NaN.
    is_finite = tl.abs(tl.load(max_logits + at, mask=inside, other=0.0).to(tl.float32)) < float("inf")
    num_broken = tl.sum(((slot <= accepted) & ~is_finite).to(tl.int32), axis=0)
    tl.store(reported + at, tl.where(num_broken > 0, broken_token, token), mask=inside)
    tl.store(commit_lens + request, accepted + 1)
    length = tl.minimum(tl.load(committed + request) + accepted + 1, longest)
    tl.store(new_committed + request, length)
    if relay_rows is not None:
        row = tl.load(relay_rows + request)
        tl.store(relay_lengths + row, length)
        tl.store(relay_anchors + row, anchor)
