"""Request table of a draft with a window (`srt/speculative/drafters/dflash.py`)."""

import torch
import triton
import triton.language as tl

from sglang_dflash.kernels.ops.speculative._twin import with_twin


def prepare_window_torch(seq_lens, requests, source, table, size, page, columns) -> torch.Tensor:
    """`prepare_window` in PyTorch, on any device."""
    start = (seq_lens - size).clamp_(min=0)
    if page > 1:
        start -= start % page
    column = torch.arange(columns, device=seq_lens.device)
    positions = (start[:, None] + column).clamp_(max=source.shape[1] - 1)
    table[requests, :columns] = source[requests[:, None], positions]
    return seq_lens - start


@with_twin(prepare_window_torch)
def prepare_window(
    seq_lens: torch.Tensor,
    requests: torch.Tensor,
    source: torch.Tensor,
    table: torch.Tensor,
    size: int,
    page: int,
    columns: int,
) -> torch.Tensor:
    """Copy the KV slots of each request's window to the front of its row of `table`.

    One launch on CUDA, without host synchronisation. Moves bs * (24 + 8 columns) bytes.

    Args:
        seq_lens: [bs] int64, committed lengths n.
        requests: [bs] int64, rows of both tables.
        source: [rows, max_len] int32. Beyond a row's end the last entry is repeated; nothing reads the
            copies.
        table: [rows, max_len] int32. Row i gets source[i, start : start + columns]. start is the last
            multiple of `page` up to max(0, n - size).
        size: tokens of the window.
        page: tokens of a page.
        columns: entries to copy.

    Returns:
        n - start, [bs] int64: the number of committed columns.
    """
    assert seq_lens.is_contiguous() and requests.is_contiguous() and source.stride(1) == table.stride(1) == 1
    committed = torch.empty_like(seq_lens)
    bs, tile = seq_lens.numel(), min(triton.next_power_of_2(columns), 1024)
    if bs:
        prepare_window_kernel[(bs, triton.cdiv(columns, tile))](
            seq_lens=seq_lens,
            requests=requests,
            source=source,
            table=table,
            committed=committed,
            source_stride=source.stride(0),
            table_stride=table.stride(0),
            source_width=source.shape[1],
            size=size,
            page=page,
            columns=columns,
            TILE=tile,
            num_warps=4,
        )
    return committed


@triton.jit
def prepare_window_kernel(
    seq_lens,
    requests,
    source,
    table,
    committed,
    source_stride,
    table_stride,
    source_width,
    size,
    page,
    columns,
    TILE: tl.constexpr,
):
    """One program per request and tile of columns."""
    number, tile = tl.program_id(0), tl.program_id(1)
    request = tl.load(requests + number).to(tl.int64)  # rows * max_len may exceed 2**31
    length = tl.load(seq_lens + number)
    start = tl.maximum(length - size, 0)
    start -= start % page
    column = tile * TILE + tl.arange(0, TILE)
    position = tl.minimum(start + column, source_width - 1)
    inside = column < columns
    slot = tl.load(source + request * source_stride + position, mask=inside)
    tl.store(table + request * table_stride + column, slot, mask=inside)
    if tile == 0:
        tl.store(committed + number, length - start)
