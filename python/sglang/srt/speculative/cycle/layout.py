"""Rows of a verify forward: the first slots of each request's block, packed."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_dflash.srt.speculative.cycle.prompts import on_device


class VerifyRows:
    """Map between blocks [bs, W] and the packed rows [T] of their verify forward.

    A request verifies its anchor and L_i drafted tokens. Its L_i + 1 rows follow each other, and W is the
    largest L_i + 1. Values per slot stay rectangles. A slot past a request's rows repeats its last row's
    value, and `limits` keeps acceptance from reading it. If all verify W slots, rows are the flattened
    blocks, and no map is needed. A CUDA graph may have further rows, which are not read: they repeat the
    first one, and their KV goes to SGLang's padding slot.

    Attributes:
        bs: number of requests.
        width: W.
        lengths: [bs] on the host, L_i. None: every request verifies W slots.
        limits: [bs] int32, L_i on the device. None: as `lengths`.
        slots: [bs, W] int64, row of each slot. None: as `lengths`.
        index: [T] int64, slot of each row among the flattened [bs, W]. None: as `lengths`.
        layout: SGLang's of the rows, for backends that read it on a GPU.
    """

    __slots__ = ("_columns", "_padding", "bs", "index", "layout", "lengths", "limits", "slots", "width")

    def __init__(
        self,
        bs: int,
        width: int,
        lengths: np.ndarray | None = None,
        device: Any = "cpu",
        layout: Any = None,
    ):
        self.bs, self.width, self.layout = bs, width, layout
        is_rectangle = lengths is None or bool((lengths == width - 1).all())
        if is_rectangle and (layout is None or layout.graph_num_tokens == bs * width):
            lengths = None
        self.lengths = lengths
        self._columns: tuple[int, torch.Tensor] | None = None
        self.limits: torch.Tensor | None = None
        self.slots: torch.Tensor | None = None
        self.index: torch.Tensor | None = None
        if lengths is None:
            return
        column = np.arange(width)
        starts = np.cumsum(lengths + 1) - lengths - 1
        slots = starts[:, None] + np.minimum(column, lengths[:, None])
        index = np.flatnonzero(column <= lengths[:, None])
        self._padding = 0 if layout is None else layout.graph_num_tokens - len(index)
        self.limits = on_device(lengths, torch.int32, device)
        self.slots = on_device(slots, torch.int64, device)
        self.index = on_device(np.pad(index, (0, self._padding)), torch.int64, device)

    def columns(self, block_size: int) -> torch.Tensor:
        """Return the slot of each row among flattened blocks of this size, [T] int64.

        Rows that no request has get -1.
        """
        if self._columns is None or self._columns[0] != block_size:
            assert self.lengths is not None and self.limits is not None
            held = np.arange(block_size) <= self.lengths[:, None]
            columns = np.pad(np.flatnonzero(held), (0, self._padding), constant_values=-1)
            self._columns = block_size, on_device(columns, torch.int64, self.limits.device)
        return self._columns[1]

    @property
    def shape(self) -> tuple[int, int]:
        """bs and W."""
        return self.bs, self.width

    @property
    def starts(self) -> torch.Tensor | None:
        """First row of each request, [bs] int64. None: every request verifies W slots."""
        return None if self.slots is None else self.slots[:, 0].contiguous()

    @property
    def num_rows(self) -> int:
        """T."""
        return self.bs * self.width if self.index is None else self.index.numel()

    def pack(self, blocks: torch.Tensor) -> torch.Tensor:
        """Take the rows of values per slot: [bs, W, ...] -> [T, ...]."""
        flat = blocks.flatten(0, 1)
        return flat if self.index is None else flat[self.index]

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """Give each slot the value of its row: [T, ...] -> [bs, W, ...]."""
        return rows.view(self.bs, self.width, *rows.shape[1:]) if self.slots is None else rows[self.slots]

    def repeat(self, per_request: Any) -> Any:
        """Give each row its request's value: [bs, ...] -> [T, ...]. None stays None."""
        if per_request is None:
            return None
        if self.index is None:
            return per_request if self.width == 1 else per_request.repeat_interleave(self.width, dim=0)
        return per_request[self.index // self.width]

    def of(self, column: int) -> torch.Tensor:
        """Return the row of one slot of each request. [bs] int64"""
        if self.slots is None:
            return torch.arange(self.bs) * self.width + column
        return self.slots[:, column]


@functools.lru_cache(maxsize=1024)
def whole_blocks(bs: int, width: int) -> VerifyRows:
    """Return the rows of blocks that are verified whole. A cycle asks several times."""
    return VerifyRows(bs, width)


class PreparedLayout(RaggedVerifyLayout, frozen=True):  # type: ignore[call-arg]
    """A layout of all S requests of a graph, made on the host, where it keeps the `counts`."""

    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, counts: Sequence[int], num_rows: int, device: Any) -> "PreparedLayout":
        """Copy `counts`, rows of each request, to the device without waiting."""
        ends = np.cumsum(counts)
        numbers = on_device([*counts, 0, *ends.tolist()], torch.int32, device)
        lengths, bounds = numbers[: len(counts)], numbers[len(counts) :]
        return cls(
            verify_lens=lengths,
            graph_num_tokens=num_rows,
            extend_start_loc=bounds[:-1],
            qo_indptr_device=bounds,
            counts=tuple(counts),
        )

    def padded_to_bucket(self, *, padded_bs: int, cap: int | None = None) -> "PreparedLayout":
        """Return itself: it has the requests that pad a batch."""
        return self
