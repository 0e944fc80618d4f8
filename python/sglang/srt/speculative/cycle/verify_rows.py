"""Rows of a verify forward: the first slots of each request's block, packed."""

import functools
from typing import Any

import numpy as np
import torch


class VerifyRows:
    """Map between blocks [bs, W] and the packed rows [T] of their verify forward.

    A request verifies its anchor and L_i drafted tokens. Its L_i + 1 rows follow each other, and W is the
    largest L_i + 1. Values per slot stay rectangles. A slot past a request's rows repeats its last row's
    value, and `limits` keeps acceptance from reading it. If all verify W slots, rows are the flattened
    blocks, and no map is needed.

    Attributes:
        bs: number of requests.
        width: W.
        lengths: [bs] on the host, L_i. None: every request verifies W slots.
        limits: [bs] int32, L_i on the device. None: as `lengths`.
        slots: [bs, W] int64, row of each slot. None: as `lengths`.
        index: [T] int64, slot of each row among the flattened [bs, W]. None: as `lengths`.
    """

    __slots__ = ("bs", "index", "lengths", "limits", "slots", "width")

    def __init__(self, bs: int, width: int, lengths: np.ndarray | None = None, device: Any = "cpu"):
        self.bs, self.width = bs, width
        self.lengths = None if lengths is None or bool((lengths == width - 1).all()) else lengths
        self.limits = self.slots = self.index = None
        if self.lengths is None:
            return
        column = np.arange(width)
        starts = np.cumsum(self.lengths + 1) - self.lengths - 1
        slots = starts[:, None] + np.minimum(column, self.lengths[:, None])
        index = np.flatnonzero(column <= self.lengths[:, None])
        self.limits = torch.from_numpy(self.lengths.astype(np.int32)).to(device, non_blocking=True)
        self.slots = torch.from_numpy(slots).to(device, non_blocking=True)
        self.index = torch.from_numpy(index).to(device, non_blocking=True)

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
        if per_request is None or self.width == 1:
            return per_request
        if self.index is None:
            return per_request.repeat_interleave(self.width, dim=0)
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
