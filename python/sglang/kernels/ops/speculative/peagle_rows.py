"""Pending rows of requests, and P-EAGLE draft blocks of `drafters/peagle.py` made of them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dflash.kernels.ops.speculative._twin import with_twin
from sglang_dflash.kernels.ops.speculative.block import PADDING_SLOT


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Verified rows, by row of the request table, B columns."""

    tokens: torch.Tensor  # [rows, B] int64
    fused: torch.Tensor  # [rows, B, hidden], the target's fused state before each token
    count: torch.Tensor  # [rows] int64, number of valid columns
    was_run: torch.Tensor  # [rows] int32, 1 if the draft has run these columns: the next ones replace them


@dataclass(frozen=True, slots=True)
class RequestTables:
    """Request tables of target and draft, and the layout of a block."""

    source: torch.Tensor  # [rows, max_len] int32, the target's table
    table: torch.Tensor  # [rows, max_len] int32, the draft's table, row i beside token i + 1
    mask_token_id: int
    # A block begins with its first pending row, but not after this row. None: it begins at row max(0, n - B),
    # which a host that knows n knows as well.
    last_start: int | None = None


class DraftRows(NamedTuple):
    """Rows of bs blocks of D = 2 (B - 1) rows, all int64."""

    tokens: torch.Tensor  # [bs, D]
    positions: torch.Tensor  # [bs, D]
    cache_loc: torch.Tensor  # [bs * D], the KV slot of each row
    start: torch.Tensor  # [bs], the first row


def prepare_rows_torch(requests, seq_lens, pending, tables, fused_mask, fused, first_drafting) -> DraftRows:
    """`prepare_rows` in PyTorch, on any device."""
    block_size = pending.tokens.shape[1]
    drafted = block_size - 1
    first_pending = seq_lens - pending.count[requests]
    if tables.last_start is None:
        start = (seq_lens - block_size).clamp(min=0)
    else:
        start = first_pending.clamp(max=tables.last_start)
    rows = start[:, None] + torch.arange(2 * drafted, device=seq_lens.device)
    # Column of a row in `pending`.
    index = rows - first_pending[:, None]
    is_pending = (index >= 0) & (rows < seq_lens[:, None])
    index = index.clamp(0, block_size - 1)
    # Rows after the last mask row are idle.
    in_text = rows < (seq_lens + drafted - 1)[:, None]
    source = tables.source
    slots = source[requests[:, None], (rows + 1).clamp(max=source.shape[1] - 1)]
    slots = torch.where(in_text, slots, PADDING_SLOT)
    tables.table[requests[:, None], rows] = slots
    # Rows that the draft has run keep their KV.
    cache_loc = torch.where(is_pending | (rows >= seq_lens[:, None]), slots, PADDING_SLOT).flatten().long()
    tokens = torch.where(is_pending, pending.tokens[requests[:, None], index], tables.mask_token_id)
    first_drafting.copy_(seq_lens - 1 - start)
    states = torch.where(is_pending[..., None], pending.fused[requests[:, None], index], fused_mask)
    fused.copy_(states.flatten(0, 1))
    pending.was_run[requests] = 1
    return DraftRows(tokens, rows, cache_loc, start)


@with_twin(prepare_rows_torch)
def prepare_rows(
    requests: torch.Tensor,
    seq_lens: torch.Tensor,
    pending: PendingRows,
    tables: RequestTables,
    fused_mask: torch.Tensor,
    fused: torch.Tensor,
    first_drafting: torch.Tensor,
) -> DraftRows:
    """Build blocks of committed rows, pending rows, mask rows and idle rows.

    With B = 4 a block has D = 6 rows. At n = 8 with the pending tokens [a, b, c] of rows 5 to 7:

        last_start 100:  start 5, tokens [a, b, c, mask, mask, mask], the last row idle
        last_start None: start 4, tokens [mask, a, b, c, mask, mask], the first row committed

    One launch on CUDA, without host synchronisation. Moves bs * D * (4 hidden + 32) bytes in bfloat16.

    Args:
        requests: [bs] int64, rows of the tables.
        seq_lens: [bs] int64, committed lengths n: rows 0 .. n - 1 are verified.
        pending: rows to run. Notes that they were.
        tables: of target and draft. The draft's is written for the rows of the block.
        fused_mask: [hidden], the fused state of mask rows.
        fused: [bs * D, hidden], written in place, as a CUDA graph reads this address.
        first_drafting: [bs] int64, written in place as well.
    """
    inputs = *(requests, seq_lens, pending.tokens, pending.fused, pending.count, pending.was_run), fused_mask
    assert all(tensor.is_contiguous() for tensor in (*inputs, fused, first_drafting))
    source, table = tables.source, tables.table
    assert source.stride(1) == table.stride(1) == 1
    bs, block_size, hidden = requests.numel(), pending.tokens.shape[1], pending.fused.shape[2]
    num_rows = 2 * (block_size - 1)
    tokens = seq_lens.new_empty((bs, num_rows))
    out = DraftRows(
        tokens=tokens,
        positions=torch.empty_like(tokens),
        cache_loc=tokens.new_empty((bs * num_rows,)),
        start=torch.empty_like(seq_lens),
    )
    if bs:
        prepare_rows_kernel[(bs, num_rows)](
            requests=requests,
            seq_lens=seq_lens,
            pending_tokens=pending.tokens,
            pending_fused=pending.fused,
            pending_count=pending.count,
            pending_was_run=pending.was_run,
            fused_mask=fused_mask,
            source=source,
            table=table,
            **out._asdict(),
            fused=fused,
            first_drafting=first_drafting,
            source_stride=source.stride(0),
            table_stride=table.stride(0),
            source_width=source.shape[1],
            mask_token_id=tables.mask_token_id,
            block_size=block_size,
            hidden=hidden,
            last_start=tables.last_start,
            PADDING=PADDING_SLOT,
            TILE=_tile(hidden),
            num_warps=4,
        )
    return out


def _tile(hidden: int) -> int:
    return min(triton.next_power_of_2(hidden), 2048)


# In a mixed batch the requests are the last ones of a prefill, so their alignment depends on their number.
@triton.jit(do_not_specialize_on_alignment=["requests"])
def prepare_rows_kernel(
    requests,
    seq_lens,
    pending_tokens,
    pending_fused,
    pending_count,
    pending_was_run,
    fused_mask,
    source,
    table,
    tokens,
    positions,
    cache_loc,
    start,
    fused,
    first_drafting,
    source_stride,
    table_stride,
    source_width,
    mask_token_id,
    block_size,
    hidden,
    last_start,
    PADDING: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per row of a block."""
    number, column = tl.program_id(0), tl.program_id(1)
    request = tl.load(requests + number).to(tl.int64)  # rows * max_len may exceed 2**31
    length = tl.load(seq_lens + number)
    first_pending = length - tl.load(pending_count + request)
    if last_start is not None:
        first = tl.minimum(first_pending, last_start)
    else:
        first = tl.maximum(length - block_size, 0)
    row = first + column
    index = row - first_pending
    is_pending = (index >= 0) & (row < length)
    index = request * block_size + tl.minimum(tl.maximum(index, 0), block_size - 1)

    slot = tl.load(source + request * source_stride + tl.minimum(row + 1, source_width - 1))
    slot = tl.where(row < length + block_size - 2, slot, PADDING)
    tl.store(table + request * table_stride + row, slot)
    out = number.to(tl.int64) * tl.num_programs(1) + column
    tl.store(cache_loc + out, tl.where(is_pending | (row >= length), slot, PADDING).to(tl.int64))
    tl.store(tokens + out, tl.where(is_pending, tl.load(pending_tokens + index), mask_token_id))
    tl.store(positions + out, row)
    if column == 0:
        tl.store(pending_was_run + request, 1)
        tl.store(start + number, first)
        tl.store(first_drafting + number, length - 1 - first)

    states = pending_fused + index * hidden
    for start_channel in range(0, hidden, TILE):
        channel = start_channel + tl.arange(0, TILE)
        inside = channel < hidden
        state = tl.load(states + channel, mask=inside & is_pending)
        mask_state = tl.load(fused_mask + channel, mask=inside & ~is_pending)
        tl.store(fused + out * hidden + channel, tl.where(is_pending, state, mask_state), mask=inside)


def append_rows_torch(requests, accept_len, out_tokens, fused, slots, pending) -> None:
    """`append_rows` in PyTorch, for a CPU: on a GPU it waits."""
    verify_len = out_tokens.shape[1]
    number, slot = (torch.arange(verify_len, device=requests.device) <= accept_len[:, None]).nonzero(
        as_tuple=True
    )
    request = requests[number]
    before = torch.where(pending.was_run[requests] > 0, 0, pending.count[requests])
    column = before[number] + slot
    pending.tokens[request, column] = out_tokens[number, slot]
    pending.fused[request, column] = fused[
        number * verify_len + slot if slots is None else slots[number, slot]
    ]
    pending.count[requests], pending.was_run[requests] = before + accept_len + 1, 0


@with_twin(append_rows_torch)
def append_rows(
    requests: torch.Tensor,
    accept_len: torch.Tensor,
    out_tokens: torch.Tensor,
    fused: torch.Tensor,
    slots: torch.Tensor | None,
    pending: PendingRows,
) -> None:
    """Append verified tokens to the pending rows, or replace those that have been run.

    One launch on CUDA, without host synchronisation. Moves (4 hidden + 16) bytes per token in bfloat16.

    Args:
        requests: [bs] int64, rows of `pending`.
        accept_len: [bs] int32, one less than the rows to append.
        out_tokens: [bs, w] int64, the token after each slot.
        fused: [T, hidden], the target's fused state of each row of the verify forward.
        slots: [bs, w] int64, row of each slot. None: slots in their order.
        pending: rows to write to.
    """
    rows = pending.tokens, pending.fused, pending.count, pending.was_run
    tensors = requests, accept_len, out_tokens, fused, *rows
    assert all(tensor.is_contiguous() for tensor in tensors) and (slots is None or slots.is_contiguous())
    bs, verify_len = out_tokens.shape
    hidden = pending.fused.shape[2]
    if bs:
        append_rows_kernel[(bs,)](
            requests=requests,
            accept_len=accept_len,
            out_tokens=out_tokens,
            fused=fused,
            pending_tokens=pending.tokens,
            pending_fused=pending.fused,
            pending_count=pending.count,
            pending_was_run=pending.was_run,
            slots=slots,
            verify_len=verify_len,
            block_size=pending.tokens.shape[1],
            hidden=hidden,
            TILE=_tile(hidden),
            num_warps=4,
        )


@triton.jit(do_not_specialize=["verify_len"])
def append_rows_kernel(
    requests,
    accept_len,
    out_tokens,
    fused,
    pending_tokens,
    pending_fused,
    pending_count,
    pending_was_run,
    slots,
    verify_len,
    block_size,
    hidden,
    TILE: tl.constexpr,
):
    """One program per request: no other may read its count while it changes."""
    number = tl.program_id(0).to(tl.int64)
    request = tl.load(requests + number).to(tl.int64)
    before = tl.where(tl.load(pending_was_run + request) > 0, 0, tl.load(pending_count + request))
    num_new = tl.load(accept_len + number) + 1
    for slot in range(num_new):
        read = number * verify_len + slot
        written = request * block_size + before + slot
        tl.store(pending_tokens + written, tl.load(out_tokens + read))
        if slots is not None:
            read = tl.load(slots + read)
        for start_channel in range(0, hidden, TILE):
            channel = start_channel + tl.arange(0, TILE)
            inside = channel < hidden
            state = tl.load(fused + read * hidden + channel, mask=inside)
            tl.store(pending_fused + written * hidden + channel, state, mask=inside)
    tl.store(pending_count + request, before + num_new)
    tl.store(pending_was_run + request, 0)
