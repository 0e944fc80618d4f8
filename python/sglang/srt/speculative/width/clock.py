"""What a cycle takes, without waiting for the device: wall time on a CPU, CUDA events read when they are
over."""

import time
from collections import deque
from typing import Any, NamedTuple

import torch


class Lap(NamedTuple):
    """A cycle that is over. num_tokens: committed ones of its requests, when it began. seconds: its own. gap:
    seconds between the end of the one before and its start; None where something else happened in between.
    after: width of the one before."""

    num_requests: int
    width: int
    num_tokens: int
    seconds: float
    gap: float | None
    after: int | None = None


class CycleClock:
    """`start` and `stop` around a cycle; `finished` gives the laps known by now, in order. `interrupt` where
    something else than a cycle runs, or nothing does."""

    def __init__(self, device: str):
        self._is_cuda = device != "cpu"
        self._under_way: deque[tuple[int, int, int, Any, Any, Any]] = deque()
        self._before: tuple[Any, int] | None = None  # when it ended, how wide it was
        self._start: Any = None

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._start = self._now()

    def stop(self, num_requests: int, width: int, num_tokens: int) -> None:
        end = self._now()
        self._under_way.append((num_requests, width, num_tokens, self._before, self._start, end))
        self._before = end, width

    def interrupt(self) -> None:
        self._before = None

    def finished(self) -> list[Lap]:
        laps = []
        while self._under_way and self._is_over(self._under_way[0][-1]):
            num_requests, width, num_tokens, before, start, end = self._under_way.popleft()
            ended, after = before or (None, None)
            gap = None if ended is None else self._between(ended, start)
            laps.append(Lap(num_requests, width, num_tokens, self._between(start, end), gap, after))
        return laps

    def _is_over(self, moment: Any) -> bool:
        return moment.query() if self._is_cuda else True

    def _between(self, start: Any, end: Any) -> float:
        return 1e-3 * start.elapsed_time(end) if self._is_cuda else end - start
