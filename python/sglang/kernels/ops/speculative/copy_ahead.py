"""Proposals copied from a request's own text, after a match of its last tokens.

A history [rows, columns] int32 holds the text of each request by position, a row per row of the request
table. -1 marks places that no block may contain (nothing written, an image): it matches nothing and ends a
copy. Records [rows, 2] float32 hold, per row, the recently accepted share of copied tokens and of drafted
tokens.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_dflash.kernels.ops.speculative._twin import with_twin
from sglang_dflash.kernels.ops.speculative.block import lanes

TILE = 2048  # positions per program of the lookup
PARTS = 64  # tiles reduced in one step


@dataclass(frozen=True, slots=True)
class CopyRule:
    """Rule that prefers a copy to a draft.

    A copy is preferred if its score is at least the accepted share of drafts. The score is the accepted share
    of copies times the trust in a match of this length. Any values are lossless; these were chosen on the
    bundled pair, among the rules in benchmark/results/copy-rules.md.
    """

    longest: int = 16  # most last tokens of a text that are compared. A copy itself fills its block
    shortest: int = 3  # least tokens of a match
    medium: int = 5  # length from which a match is trusted as `trust_medium`
    long: int = 8  # length from which a match is trusted as 1
    trust_short: float = 0.4  # trust in a match below `medium`
    trust_medium: float = 0.7  # trust in a match below `long`
    copies_follow: float = 0.125  # update rate of the record of copies, per cycle
    drafts_follow: float = 0.125  # update rate of the record of drafts, per cycle
    retry: float = 1 / 256  # recovery of a record per cycle that passes a match over: copies are tried again
    copies_start: float = 1.0  # record of copies of a new request
    drafts_start: float = 0.3  # record of drafts of a new request


RULE = CopyRule()


def _look_back(history, requests, ends, back):
    """Gather the tokens up to `ends`, the last first; -1 before a text's beginning."""
    positions = ends[:, None] - back
    return torch.where(positions >= 0, history[requests[:, None], positions.clamp(min=0)], -1)


def _trust(length):
    trust = torch.where(length >= RULE.medium, RULE.trust_medium, RULE.trust_short)
    return torch.where(length >= RULE.long, 1.0, trust)


def find_match_torch(history, requests, seq_lens, bound):
    """`find_match` in PyTorch; it synchronises with the host, so it is for the CPU."""
    back, bound = torch.arange(RULE.longest, device=history.device), min(bound, history.shape[1])
    suffix = _look_back(history, requests, seq_lens, back)
    text = history[requests, :bound]
    is_earlier = torch.arange(bound, device=history.device) < seq_lens[:, None]
    rows, ends = ((text == suffix[:, :1]) & is_earlier).nonzero(as_tuple=True)
    found = _look_back(history, requests[rows], ends, back)
    same = (found == suffix[rows]) & (found >= 0)
    length = same.cumprod(dim=1).sum(dim=1)
    keys = torch.where(length >= RULE.shortest, (length << 32) + ends, 0)
    return torch.zeros_like(seq_lens).scatter_reduce_(0, rows, keys, "amax")[:, None]


@with_twin(find_match_torch)
def find_match(
    history: torch.Tensor, requests: torch.Tensor, seq_lens: torch.Tensor, bound: int
) -> torch.Tensor:
    """Find the longest (then latest) earlier occurrence of each request's last tokens.

    Occurrences may overlap the text's end. One launch on CUDA, without host synchronisation. Reads 4 bytes
    per token of text.

    Args:
        history: [rows, columns] int32.
        requests: [bs] int64, rows of `history`.
        seq_lens: [bs] int64, n: the last token is at position n.
        bound: at least the largest n + 1, on the host.

    Returns:
        Keys [bs, parts] int64. The maximum of a row is (length of the match << 32) + the position of its last
        token, which is below n; 0 if no match has `shortest` tokens.
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
            LONGEST=RULE.longest,
            SHORTEST=RULE.shortest,
            TILE=TILE,
            num_warps=8,
        )
    return keys


def choose_copies_torch(history, records, requests, seq_lens, keys, block_size):
    """`choose_copies` in PyTorch; it synchronises with the host, so it is for the CPU."""
    copied = keys.new_full((len(keys), block_size), -1)
    if not keys.any():
        return copied, torch.zeros_like(seq_lens, dtype=torch.int32)
    best_match = keys.amax(dim=1)
    length, end = best_match >> 32, best_match & 0xFFFFFFFF
    share = records[requests]
    is_copied = (length > 0) & (_trust(length) * share[:, 0] >= share[:, 1])
    step = torch.arange(block_size - 1, device=history.device)
    positions = end[:, None] + 1 + step % (seq_lens - end).clamp(min=1)[:, None]
    tokens = history[requests[:, None], positions].long()
    is_valid = (tokens >= 0).cumprod(dim=1).bool()
    copied[:, 1:] = torch.where(is_valid & is_copied[:, None], tokens, -1)
    length = torch.where(is_valid[:, 0], length, 0)
    return copied, torch.where(is_copied, length, -length).int()


@with_twin(choose_copies_torch)
def choose_copies(
    history: torch.Tensor,
    records: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    keys: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the continuation of each match, if the request's record prefers copies.

    A continuation that reaches the end of the text goes on with its own beginning: after "a b c a b c" comes
    "a b c a b c". The choice depends on text and records only, so it is lossless for sampled requests too.
    One launch on CUDA, without host synchronisation.

    The first arguments and `keys` are those of `find_match`, and its result. `records` is [rows, 2] float32,
    the accepted shares of copies and drafts.

    Returns:
        Copied tokens [bs, B] int64, -1 where nothing is copied and in column 0, the anchor's; and match
        lengths [bs] int32, negative if a match was passed over, 0 without a match.
    """
    inputs = records, requests, seq_lens, keys
    assert all(t.is_contiguous() for t in inputs) and history.stride(1) == 1
    bs, tiles = keys.shape
    copied = keys.new_empty((bs, block_size))
    lengths = keys.new_empty((bs,), dtype=torch.int32)
    if bs:
        choose_copies_kernel[(bs,)](
            history=history,
            records=records,
            requests=requests,
            seq_lens=seq_lens,
            keys=keys,
            copied=copied,
            lengths=lengths,
            stride=history.stride(0),
            tiles=tiles,
            block_size=block_size,
            **_trust_options(),
            PARTS=PARTS,
            BLOCK=lanes(block_size),
            num_warps=1,
        )
    return copied, lengths


def append_tokens_torch(history, records, requests, seq_lens, out_tokens, accept_len, lengths, was_drafted):
    """`append_tokens` in PyTorch, on any device."""
    verify_len = out_tokens.shape[1]
    positions = seq_lens[:, None] + 1 + torch.arange(verify_len, device=history.device)
    history[requests[:, None], positions] = out_tokens.int()
    if verify_len == 1:
        return
    kept = accept_len / (verify_len - 1)
    copies, drafts = records[requests].unbind(dim=1)
    share = (kept / _trust(lengths)).clamp(max=1)
    followed = copies + RULE.copies_follow * (share - copies)
    retried = copies + RULE.retry * (1 - copies)
    copies = torch.where(lengths > 0, followed, torch.where(lengths < 0, retried, copies))
    if was_drafted:
        drafts = torch.where(lengths > 0, drafts, drafts + RULE.drafts_follow * (kept - drafts))
    records[requests] = torch.stack((copies, drafts), dim=1)


@with_twin(append_tokens_torch)
def append_tokens(
    history: torch.Tensor,
    records: torch.Tensor,
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    out_tokens: torch.Tensor,
    accept_len: torch.Tensor,
    lengths: torch.Tensor,
    was_drafted: bool,
) -> None:
    """Write a verified block's output from position n + 1 on, and update the records.

    `out_tokens` is [bs, B] int64, of which the first `accept_len` ([bs] int32) + 1 tokens count. Tokens
    beyond are written too, without a meaning; the history has columns for them. `lengths` come from
    `choose_copies`. `was_drafted` is True if tokens that were not copied came from the draft.

    One launch on CUDA, without host synchronisation.
    """
    per_request = records, requests, seq_lens, out_tokens, accept_len, lengths
    assert all(t.is_contiguous() for t in per_request) and history.stride(1) == 1
    bs, verify_len = out_tokens.shape
    if bs:
        append_tokens_kernel[(bs,)](
            history=history,
            records=records,
            requests=requests,
            seq_lens=seq_lens,
            out_tokens=out_tokens,
            accept_len=accept_len,
            lengths=lengths,
            stride=history.stride(0),
            verify_len=verify_len,
            drafts_follow=RULE.drafts_follow if was_drafted else 0.0,
            **_trust_options(),
            COPIES_FOLLOW=RULE.copies_follow,
            RETRY=RULE.retry,
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


def _trust_options() -> dict[str, int | float]:
    trust = dict(TRUST_SHORT=RULE.trust_short, TRUST_MEDIUM=RULE.trust_medium)
    return dict(MEDIUM=RULE.medium, LONG=RULE.long, **trust)


@triton.jit
def _trust_kernel(
    length, MEDIUM: tl.constexpr, LONG: tl.constexpr, TRUST_SHORT: tl.constexpr, TRUST_MEDIUM: tl.constexpr
):
    return tl.where(length >= LONG, 1.0, tl.where(length >= MEDIUM, TRUST_MEDIUM, TRUST_SHORT))


@triton.jit(do_not_specialize=["tiles", "block_size"])
def choose_copies_kernel(
    history,
    records,
    requests,
    seq_lens,
    keys,
    copied,
    lengths,
    stride,
    tiles,
    block_size,
    MEDIUM: tl.constexpr,
    LONG: tl.constexpr,
    TRUST_SHORT: tl.constexpr,
    TRUST_MEDIUM: tl.constexpr,
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
    request = tl.load(requests + number).to(tl.int64)
    row = history + request * stride
    trust = _trust_kernel(
        length, MEDIUM=MEDIUM, LONG=LONG, TRUST_SHORT=TRUST_SHORT, TRUST_MEDIUM=TRUST_MEDIUM
    )
    is_copied = (length > 0) & (trust * tl.load(records + 2 * request) >= tl.load(records + 2 * request + 1))
    slot = tl.arange(0, BLOCK)
    is_drafted = (slot > 0) & (slot < block_size)
    period = tl.maximum(tl.load(seq_lens + number) - end, 1)
    position = end + 1 + tl.where(is_drafted, slot - 1, 0) % period
    token = tl.load(row + position, mask=is_drafted & (length > 0), other=0)
    # The first slot that nothing can be copied to.
    stop = tl.min(tl.where(is_drafted & (token < 0), slot, BLOCK), axis=0)
    token = tl.where(is_drafted & is_copied & (slot < stop), token, -1)
    tl.store(copied + number * block_size + slot, token.to(tl.int64), mask=slot < block_size)
    length = tl.where(stop > 1, length, 0)
    tl.store(lengths + number, tl.where(is_copied, length, -length))


@triton.jit(do_not_specialize=["verify_len"])
def append_tokens_kernel(
    history,
    records,
    requests,
    seq_lens,
    out_tokens,
    accept_len,
    lengths,
    stride,
    verify_len,
    drafts_follow,
    MEDIUM: tl.constexpr,
    LONG: tl.constexpr,
    TRUST_SHORT: tl.constexpr,
    TRUST_MEDIUM: tl.constexpr,
    COPIES_FOLLOW: tl.constexpr,
    RETRY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per request."""
    number = tl.program_id(0)
    request = tl.load(requests + number).to(tl.int64)
    slot = tl.arange(0, BLOCK)
    token = tl.load(out_tokens + number * verify_len + slot, mask=slot < verify_len)
    position = request * stride + tl.load(seq_lens + number) + 1 + slot
    tl.store(history + position, token.to(tl.int32), mask=slot < verify_len)
    length = tl.load(lengths + number)
    kept = tl.load(accept_len + number).to(tl.float32) / tl.maximum(verify_len - 1, 1).to(tl.float32)
    copies, drafts = tl.load(records + 2 * request), tl.load(records + 2 * request + 1)
    trust = _trust_kernel(
        length, MEDIUM=MEDIUM, LONG=LONG, TRUST_SHORT=TRUST_SHORT, TRUST_MEDIUM=TRUST_MEDIUM
    )
    share = tl.minimum(kept / trust, 1.0)
    followed = copies + COPIES_FOLLOW * (share - copies)
    retried = copies + RETRY * (1 - copies)
    copies = tl.where(length > 0, followed, tl.where(length < 0, retried, copies))
    drafts = tl.where(length > 0, drafts, drafts + drafts_follow * (kept - drafts))
    tl.store(records + 2 * request, copies, mask=verify_len > 1)
    tl.store(records + 2 * request + 1, drafts, mask=verify_len > 1)
