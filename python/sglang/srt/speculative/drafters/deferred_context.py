"""Context rows that are written later.

On a CPU one row takes as many operators as fifty. On a GPU each write reads the weights of keys and values.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Inputs of a draft's context.

    `aux_hidden` is [n, num_aux * hidden]; `positions` and `cache_loc` are [n] int64.
    """

    aux_hidden: torch.Tensor
    positions: torch.Tensor
    cache_loc: torch.Tensor


class DeferredContext:
    """Context rows of cycles that verified the anchor alone, to be written together.

    Nobody reads them before the next block is drafted or another request is prefilled. All rows are of one
    set of requests: a changed set may give a slot to another request, whose rows are written later."""

    def __init__(self, max_cycles: int):
        self._max_cycles = max_cycles
        self._requests: torch.Tensor | None = None
        self._rows: list[ContextRows] = []

    def has_room_for(self, requests: torch.Tensor) -> bool:
        """Tell whether rows of one more cycle of these requests [bs] int64 may be added."""
        if self._requests is None or not self._rows:
            return True
        if len(self._rows) == self._max_cycles:
            return False
        # SGLang makes another tensor when its batch changes. Comparing values on a GPU would wait for it.
        return requests is self._requests or (not requests.is_cuda and torch.equal(requests, self._requests))

    def add(self, requests: torch.Tensor, rows: ContextRows) -> None:
        """Keep a copy of the rows: the next target forward may overwrite `aux_hidden`."""
        self._requests = requests
        self._rows.append(ContextRows(rows.aux_hidden.clone(), rows.positions, rows.cache_loc))

    def take(self) -> ContextRows | None:
        """Remove and return all rows, in the order of their cycles. None: there are none."""
        rows, self._rows = self._rows, []
        if not rows:
            return None
        columns = ((r.aux_hidden, r.positions, r.cache_loc) for r in rows)
        return ContextRows(*(torch.cat(column) for column in zip(*columns, strict=True)))
