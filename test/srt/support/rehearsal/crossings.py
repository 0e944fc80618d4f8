"""Tensors that live across a replay: each row of the product's table is checked in every decode cycle."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from support.rehearsal import graphs, report

from sglang_dflash.srt.speculative.cycle.replays import ACROSS_REPLAYS


def watch(worker: type) -> None:
    """Report a tensor of the table that lies in the graphs' memory when its cycle has drafted or ended."""
    notify = worker.notify

    def checked(self, stage: str, *args: Any) -> None:
        if stage in ("on_drafted", "on_committed"):
            block = args[2] if stage == "on_drafted" else None
            for path in ACROSS_REPLAYS:
                if any(map(graphs.is_in_pool, _tensors(_find(self, block, path)))):
                    report.problem(f"{path} lies in memory that the next replay overwrites")
        notify(self, stage, *args)

    worker.notify = checked


def _find(worker: Any, block: Any, path: str) -> Any:
    """Follow a row's attributes. Return None for what this server or stage has not."""
    first, *rest = path.split(".")
    value = block if first == "block" else getattr(worker, first)
    for name in rest:
        value = getattr(value, name, None)
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an object: itself, its items, or its attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__") or hasattr(value, "__dataclass_fields__"):
        names = getattr(value, "__dataclass_fields__", None) or vars(value)
        for name in names:
            if isinstance(held := getattr(value, name, None), torch.Tensor | Mapping | Sequence):
                yield from _tensors(held)
