"""Cycle times without waiting for the device: CUDA events, or wall time on a CPU."""

import time
from collections import deque
from typing import Any

import torch


class CycleClock:
    """Times work from `start`, or the end of the work before it, to its `stop`.

    Call `interrupt` if something other than a cycle runs: the work that ends next is then not timed.
    """

    def __init__(self, device: str):
        self._is_cuda = device != "cpu"
        self._free_events: list[Any] = []  # read; recorded again, as making one in every cycle takes time
        self._pending: deque[tuple[Any, Any, Any]] = deque()
        self._since: list[Any] = []  # the moment that the work under way is timed from, if there is one

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = self._free_events.pop() if self._free_events else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Begin here, whatever ran before."""
        self._since = [self._now()]

    def stop(self, work: Any = None) -> None:
        """End this work. The next begins here."""
        end = self._now()
        self._pending.extend((work, start, end) for start in self._since)
        self._since = [end]

    def interrupt(self) -> None:
        """Begin nowhere."""
        self._since = []

    def finished(self) -> list[tuple[Any, float]]:
        """Return work and its seconds, as far as they are known by now, in order."""
        timings = []
        while self._pending and (not self._is_cuda or self._pending[0][-1].query()):
            work, start, end = self._pending.popleft()
            seconds = 1e-3 * start.elapsed_time(end) if self._is_cuda else end - start
            timings.append((work, seconds))
            if self._is_cuda:
                self._free_events.append(start)
        return timings
