"""Ragged rows of the first slots of blocks, of a verify forward or of the draft's head."""

import functools
from typing import Any

import numpy as np
import torch

from sglang_dflash.srt.speculative.cycle.host import on_device


class VerifyLayout:
    """Map between blocks [bs, W] and the ragged rows [T] of their verify forward.

    A request verifies its anchor and L_i drafted tokens. Its L_i + 1 rows follow each other, and W is the
    largest L_i + 1. Values per slot stay rectangles. A slot past a request's rows repeats its last row's
    value, and `max_accept` keeps acceptance from reading it. In a rectangle all verify W slots: rows are the
    flattened blocks, and no map is needed. A CUDA graph may have further rows, which are not read: they
    repeat the first one, and their KV goes to SGLang's padding slot.

    Three requests with L = [2, 0, 1] verify T = 6 rows, and W is 3:

        index = [0, 1, 2, 3, 6, 7]
        slots = [[0, 1, 2], [3, 3, 3], [4, 5, 5]]

    Args:
        bs: number of requests.
        verify_len: W.
        num_draft_tokens: [bs] on the host, L_i.
        device: of the maps.
        for_graph: SGLang's layout of the rows, for backends that read it on a GPU. The number of rows is the
            layout's.
        num_rows: least number of rows, without such a layout.

    Attributes:
        is_rectangle: whether every request verifies W slots, and no graph has further rows.
        max_accept: [bs] int32, L_i on the device. Not in a rectangle.
        slots: [bs, W] int64, row of each slot. Not in a rectangle.
        index: [T] int64, slot of each row among the flattened [bs, W]. Not in a rectangle.
    """

    def __init__(
        self,
        bs: int,
        verify_len: int,
        num_draft_tokens: np.ndarray,
        device: Any = "cpu",
        for_graph: Any = None,
        num_rows: int = 0,
    ):
        self.bs, self.verify_len, self.for_graph = bs, verify_len, for_graph
        self.num_draft_tokens = num_draft_tokens
        num_verified = int(num_draft_tokens.sum()) + bs
        num_rows = max(num_rows, num_verified) if for_graph is None else for_graph.graph_num_tokens
        self.is_rectangle = num_verified == num_rows == bs * verify_len
        if self.is_rectangle:
            return
        column, counts = np.arange(verify_len), num_draft_tokens[:, None]
        starts = np.cumsum(num_draft_tokens + 1) - num_draft_tokens - 1
        index = np.flatnonzero(column <= counts)
        self._padding, self._columns = num_rows - num_verified, (0, torch.empty(0))
        self.max_accept = on_device(num_draft_tokens, torch.int32, device)
        self.slots = on_device(starts[:, None] + np.minimum(column, counts), torch.int64, device)
        self.index = on_device(np.pad(index, (0, self._padding)), torch.int64, device)

    def columns(self, block_size: int) -> torch.Tensor:
        """Return the slot of each row among flattened blocks of this size, [T] int64.

        Rows that no request has get -1. Not for a rectangle.
        """
        if self._columns[0] != block_size:
            held = np.arange(block_size) <= self.num_draft_tokens[:, None]
            columns = np.pad(np.flatnonzero(held), (0, self._padding), constant_values=-1)
            self._columns = block_size, on_device(columns, torch.int64, self.index.device)
        return self._columns[1]

    @property
    def shape(self) -> tuple[int, int]:
        """bs and W."""
        return self.bs, self.verify_len

    @property
    def bounds(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """First row of each request [bs] int64, and `max_accept`. In a rectangle both are None."""
        return (None, None) if self.is_rectangle else (self.slots[:, 0].contiguous(), self.max_accept)

    @property
    def num_rows(self) -> int:
        """T."""
        return self.bs * self.verify_len if self.is_rectangle else self.index.numel()

    def to_rows(self, blocks: torch.Tensor) -> torch.Tensor:
        """Take the rows of values per slot: [bs, W, ...] -> [T, ...]."""
        flat = blocks.flatten(0, 1)
        return flat if self.is_rectangle else flat[self.index]

    def to_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """Give each slot the value of its row: [T, ...] -> [bs, W, ...]."""
        return rows.unflatten(0, self.shape) if self.is_rectangle else rows[self.slots]

    def repeat(self, per_request: Any) -> Any:
        """Give each row its request's value: [bs, ...] -> [T, ...]. None stays None."""
        if per_request is None:
            return None
        if not self.is_rectangle:
            return per_request[self.index // self.verify_len]
        return per_request if self.verify_len == 1 else per_request.repeat_interleave(self.verify_len, dim=0)


@functools.lru_cache(maxsize=1024)
def whole_blocks(bs: int, verify_len: int) -> VerifyLayout:
    """Return the layout of blocks that are verified whole. A cycle asks several times."""
    return VerifyLayout(bs, verify_len, np.full(bs, verify_len - 1))


@functools.lru_cache(maxsize=256)
def drafted_slots(lengths: tuple[int, ...], num_slots: int, device: torch.device, pads: bool) -> VerifyLayout:
    """Return the layout of verified slots without anchors: the rows of the draft's head.

    A request that verifies none has a row nevertheless. Choices of lengths hold for a few cycles.

    Args:
        lengths: drafted tokens that each request verifies.
        num_slots: drafted slots of each block.
        device: of the maps.
        pads: whether blocks keep `num_slots` slots, and rows are whole quarters of a power of two. A GPU then
            sees few shapes.
    """
    counts = np.maximum(lengths, 1)
    if not pads:
        return VerifyLayout(len(counts), int(counts.max()), counts - 1, device)
    step = 1 << max(0, int(counts.sum() - 1).bit_length() - 3)
    num_rows = min(-(-int(counts.sum()) // step) * step, len(counts) * num_slots)
    return VerifyLayout(
        len(counts), verify_len=num_slots, num_draft_tokens=counts - 1, device=device, num_rows=num_rows
    )
