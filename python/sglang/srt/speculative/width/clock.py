"""Cycle times without waiting for the device: CUDA events, or wall time on a CPU."""

import time
from collections import deque
from typing import Any, NamedTuple

import torch


class CycleTiming(NamedTuple):
    """A finished cycle and the idle_gap before it."""

    work: Any  # as `stop` was told
    seconds: float
    idle_gap: (
        float | None
    )  # seconds since the end of the previous cycle; None if something else ran in between


class CycleClock:
    """Times what runs between `start` and `stop`.

    `finished` returns the timings known by now, in order. Call `interrupt` if something other than a cycle
    runs, or nothing does.
    """

    def __init__(self, device: str):
        self._is_cuda = device != "cpu"
        self._free_events: list[Any] = []  # read; recorded again, as making two in every cycle takes time
        self._pending: deque[tuple[Any, Any, Any, Any]] = deque()
        self._previous: Any = None  # end of the previous cycle
        self._start: Any = None

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = self._free_events.pop() if self._free_events else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._start = self._now()

    def stop(self, work: Any = None) -> None:
        """End a cycle, which did this work."""
        end = self._now()
        self._pending.append((work, self._previous, self._start, end))
        self._previous = end

    def interrupt(self) -> None:
        self._previous = None

    def finished(self) -> list[CycleTiming]:
        timings = []
        while self._pending and (not self._is_cuda or self._pending[0][-1].query()):
            work, previous, start, end = self._pending.popleft()
            idle_gap = None if previous is None else self._between(previous, start)
            seconds = self._between(start, end)
            if self._is_cuda:
                # The next cycle's idle_gap begins with `end`, so that one is free a cycle later.
                self._free_events += [start] if previous is None else [start, previous]
            timings.append(CycleTiming(work, seconds, idle_gap))
        return timings

    def _between(self, start: Any, end: Any) -> float:
        return 1e-3 * start.elapsed_time(end) if self._is_cuda else end - start
