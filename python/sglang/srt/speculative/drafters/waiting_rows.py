"""Context rows that wait: on a CPU writing one takes as many operators as writing fifty."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ContextRows:
    """What a draft's context is written from. aux_hidden: [n, num_aux * hidden]; positions, cache_loc: [n]
    int64."""

    aux_hidden: torch.Tensor
    positions: torch.Tensor
    cache_loc: torch.Tensor


class WaitingRows:
    """Rows of cycles that verified the anchor alone. Nobody reads them before the next block is drafted or
    another request is prefilled, so they may wait until then, and are written together.

    Rows of one set of requests at a time: when it changes, a slot may pass to another owner, whose rows come
    later."""

    def __init__(self, most_cycles: int):
        self._most_cycles = most_cycles
        self._requests: torch.Tensor | None = None
        self._rows: list[ContextRows] = []

    def has_room_for(self, requests: torch.Tensor) -> bool:
        """Whether rows of one more cycle of these requests may be added. requests: [bs] int64."""
        if not self._rows:
            return True
        return len(self._rows) < self._most_cycles and torch.equal(requests, self._requests)

    def add(self, requests: torch.Tensor, rows: ContextRows) -> None:
        """rows.aux_hidden is copied: the next target forward may overwrite it."""
        self._requests = requests
        self._rows.append(ContextRows(rows.aux_hidden.clone(), rows.positions, rows.cache_loc))

    def take(self) -> ContextRows | None:
        """All of them, in the order of their cycles; none wait from then on."""
        rows, self._rows = self._rows, []
        if not rows:
            return None
        columns = ((r.aux_hidden, r.positions, r.cache_loc) for r in rows)
        return ContextRows(*(torch.cat(column) for column in zip(*columns, strict=True)))
