"""Penalties of the logits of a block, and counts of emitted tokens."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflash.kernels.ops.speculative._twin import with_twin
from sglang_dflash.kernels.ops.speculative.block import lanes


class PenaltyTerms(NamedTuple):
    """Penalties of bs requests, in columns [bs, 1]."""

    frequency: torch.Tensor  # float32
    presence: torch.Tensor  # float32
    repetition: torch.Tensor  # float32
    min_new_tokens: torch.Tensor  # int64
    prompt_lens: torch.Tensor  # int64
    # [bs, vocab] float32, contiguous, -inf at the tokens that end a request: added while it is too short to
    # end. None if no request has a minimum length.
    stop_logits: torch.Tensor | None

    def additive(self, counts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Compute what is added to logits [bs, vocab].

        `counts` [bs, vocab] are of emitted tokens. `lengths` [bs] include the prompt.
        """
        total = -self.frequency * counts - self.presence * (counts > 0)
        if self.stop_logits is not None:
            is_short = lengths[:, None] - self.prompt_lens < self.min_new_tokens
            total = total + torch.where(is_short, self.stop_logits, 0.0)
        return total

    def scaling(self, counts: torch.Tensor) -> torch.Tensor:
        """Compute the factor [bs, vocab] that divides positive logits and multiplies others."""
        return torch.where(counts > 0, self.repetition, 1.0)


def penalize_block_torch(logits, block, counts, requests, seq_lens, terms, starts=None, max_accept=None):
    """Run `penalize_block` in PyTorch, on any device."""
    bs, block_size = block.shape
    counts, one = counts[requests], counts.new_ones((bs, 1))
    if starts is None:
        starts = torch.arange(bs, device=block.device) * block_size
        max_accept = torch.full_like(starts, block_size - 1)
    for k in range(block_size):
        if k > 0:
            counts.scatter_add_(1, block[:, k : k + 1], one)
        # Requests that do not verify this slot look at their last row, and leave it alone.
        row = starts + max_accept.clamp(max=k)
        old = logits[row]
        # The block's first token, at position seq_lens, has been emitted too.
        new = (old + terms.additive(counts, seq_lens + 1 + k)).to(old.dtype)
        scaling = terms.scaling(counts)
        new = torch.where(new > 0, new / scaling, new * scaling).to(old.dtype)
        logits[row] = torch.where((k <= max_accept)[:, None], new, old)


@with_twin(penalize_block_torch)
def penalize_block(
    logits: torch.Tensor,
    block: torch.Tensor,
    counts: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    terms: PenaltyTerms,
    starts: torch.Tensor | None = None,
    max_accept: torch.Tensor | None = None,
) -> None:
    """Penalise logits in place, each row for the tokens its request emitted up to it.

    One launch on CUDA, without host synchronisation. Moves bs * vocab * (2 B * itemsize + 4) bytes, and 4
    more with stop_logits. Elsewhere it goes position by position: [bs, B, vocab] counts would not fit beside
    the logits of a large vocabulary.

    Args:
        logits: [T, vocab] float, rows of the verified slots.
        block: [bs, B] int64; the first column is counted already.
        counts: [rows, vocab] int32, emitted tokens.
        requests: [bs] int64, rows of `counts`.
        seq_lens: [bs] int64, tokens before the block.
        terms: penalties of the requests.
        starts: [bs] int64, row of each request's anchor. None, like `max_accept`: T is bs * B, each request
            verifies its block.
        max_accept: [bs] int32, verified drafted tokens. None, with `starts`.
    """
    inputs = counts, block, requests, seq_lens, *terms
    assert all(tensor is None or tensor.is_contiguous() for tensor in inputs) and logits.stride(1) == 1
    (bs, verify_len), vocabulary, tile = block.shape, counts.shape[1], 1024
    assert logits.shape[1] == vocabulary and (starts is not None or logits.shape[0] == bs * verify_len)
    if bs:
        penalize_block_kernel[(bs, triton.cdiv(vocabulary, tile))](
            logits=logits,
            counts=counts,
            block=block,
            requests=requests,
            seq_lens=seq_lens,
            **terms._asdict(),
            starts=starts,
            max_accept=max_accept,
            logits_stride=logits.stride(0),
            vocabulary=vocabulary,
            verify_len=verify_len,
            TILE=tile,
            num_warps=4,
        )


# Columns of one copy: their alignment depends on the number of requests.
@triton.jit(
    do_not_specialize=["verify_len"],
    do_not_specialize_on_alignment=["frequency", "presence", "repetition", "min_new_tokens", "prompt_lens"],
)
def penalize_block_kernel(
    logits,
    counts,
    block,
    requests,
    seq_lens,
    frequency,
    presence,
    repetition,
    min_new_tokens,
    prompt_lens,
    stop_logits,
    starts,
    max_accept,
    logits_stride,
    vocabulary,
    verify_len,
    TILE: tl.constexpr,
):
    """One program per request and tile of the vocabulary, one step per position."""
    number = tl.program_id(0).to(tl.int64)
    request = tl.load(requests + number).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = token < vocabulary
    count = tl.load(counts + request * vocabulary + token, mask=inside, other=0)
    per_time, once = tl.load(frequency + number), tl.load(presence + number)
    factor = tl.load(repetition + number)
    # The block's first token, at position seq_lens, has been emitted as well.
    emitted = tl.load(seq_lens + number) + 1 - tl.load(prompt_lens + number)
    missing = tl.load(min_new_tokens + number) - emitted
    if stop_logits is not None:
        stop = tl.load(stop_logits + number * vocabulary + token, mask=inside, other=0.0)
    block += number * verify_len
    if starts is not None:
        logits += tl.load(starts + number) * logits_stride
        end = tl.load(max_accept + number) + 1
    else:
        logits += number * verify_len * logits_stride
        end = verify_len
    for position in range(end):
        if position > 0:
            count += (token == tl.load(block + position)).to(tl.int32)
        is_emitted = count > 0
        added = -per_time * count.to(tl.float32) - tl.where(is_emitted, once, 0.0)
        if stop_logits is not None:
            added += tl.where(position < missing, stop, 0.0)
        logit = tl.load(logits + token, mask=inside, other=0.0)
        changed = (logit.to(tl.float32) + added).to(logit.dtype).to(tl.float32)
        scaling = tl.where(is_emitted, factor, 1.0)
        changed = tl.where(changed > 0, changed / scaling, changed * scaling)
        tl.store(logits + token, changed.to(logit.dtype), mask=inside)
        logits += logits_stride


def count_tokens_torch(counts, requests, tokens, accept_len):
    """Run `count_tokens` in PyTorch, on any device."""
    is_output = torch.arange(tokens.shape[1], device=tokens.device) <= accept_len[:, None]
    counts[requests] = counts[requests].scatter_add_(1, tokens, is_output.int())


@with_twin(count_tokens_torch)
def count_tokens(
    counts: torch.Tensor, requests: torch.Tensor, tokens: torch.Tensor, accept_len: torch.Tensor
) -> None:
    """Add the first accept_len + 1 tokens of each row to its request's counts.

    One launch on CUDA, without host synchronisation.

    Args:
        counts: [rows, vocab] int32.
        requests: [bs] int64.
        tokens: [bs, B] int64.
        accept_len: [bs] int32.
    """
    assert all(tensor.is_contiguous() for tensor in (counts, requests, tokens, accept_len))
    bs, verify_len = tokens.shape
    if bs:
        count_tokens_kernel[(bs,)](
            counts=counts,
            requests=requests,
            tokens=tokens,
            accept_len=accept_len,
            vocabulary=counts.shape[1],
            verify_len=verify_len,
            BLOCK=lanes(verify_len),
            num_warps=1,
        )


@triton.jit(do_not_specialize=["verify_len"])
def count_tokens_kernel(counts, requests, tokens, accept_len, vocabulary, verify_len, BLOCK: tl.constexpr):
    """One program per request."""
    number = tl.program_id(0)
    slot = tl.arange(0, BLOCK)
    is_output = (slot < verify_len) & (slot <= tl.load(accept_len + number))
    token = tl.load(tokens + number * verify_len + slot, mask=is_output, other=0)
    row = counts + tl.load(requests + number).to(tl.int64) * vocabulary
    tl.atomic_add(row + token, tl.full((BLOCK,), 1, tl.int32), mask=is_output)
