"""Checks in the background, in processes that stand still while something is measured."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

POLL_S = 0.2


def groups_below(pid: int) -> list[int]:
    """List the process groups of a process and its descendants, a parent's before its children's.

    A server that a check has started leads a group of its own.
    """
    children: dict[int, list[int]] = {}
    group_of: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            # The name, in parentheses, may hold spaces; state, parent and group follow.
            _, parent, group, *_ = file.read_text().rsplit(")", 1)[1].split()
            children.setdefault(int(parent), []).append(int(file.parent.name))
            group_of[int(file.parent.name)] = int(group)
    groups: list[int] = []
    below = [pid]
    for process in below:  # grows while it is walked
        below += sorted(children.get(process, []))
        if process in group_of and group_of[process] not in groups:
            groups.append(group_of[process])
    return groups


def signal_group(group: int, with_signal: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, with_signal)


def stop_all(pid: int) -> list[int]:
    """Stop a process and its descendants, parents first; return their groups in that order.

    A parent may start another child until it is stopped, so look again until nothing is new.
    """
    stopped: list[int] = []
    while new := [group for group in groups_below(pid) if group not in stopped]:
        for group in new:
            signal_group(group, signal.SIGSTOP)
            stopped.append(group)
    return stopped


def continue_all(stopped: Sequence[int]) -> None:
    """Continue stopped groups, children first: a parent then finds its server answering."""
    for group in reversed(stopped):
        signal_group(group, signal.SIGCONT)


def kill_all(pid: int) -> None:
    """Kill a process and its descendants."""
    for group in stop_all(pid):
        signal_group(group, signal.SIGKILL)


@dataclass
class Job:
    """A check of the lane. start: starts its process as the leader of a new session."""

    name: str
    start: Callable[[], subprocess.Popen]
    finish: Callable[[int, float], None]  # called with the exit code and the seconds it ran
    process: subprocess.Popen | None = None
    seconds: float = 0.0
    stopped: list[int] = field(default_factory=list)


class Lane:
    """Run jobs in order, `width` at a time, from entering to leaving the context.

    Leaving kills the running jobs; they and the waiting ones are then not finished.
    """

    def __init__(self, jobs: Sequence[Job], width: int):
        self._waiting, self._running, self._width = list(jobs), [], width
        self._lock, self._is_paused, self._is_over = threading.Lock(), False, False
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> "Lane":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        with self._lock:
            self._is_over = True
            for job in self._running:
                kill_all(job.process.pid)
                job.process.wait()
        self._thread.join()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop all jobs until the block ends, and start none."""
        with self._lock:
            self._is_paused = True
            for job in self._running:
                job.stopped = stop_all(job.process.pid)
        try:
            yield
        finally:
            with self._lock:
                for job in self._running:
                    continue_all(job.stopped)
                self._is_paused = False

    def left(self) -> list[str]:
        """Return the names of unfinished jobs."""
        with self._lock:
            return [job.name for job in (*self._running, *self._waiting)]

    def wait(self) -> None:
        """Return when all jobs are finished."""
        while self.left():
            time.sleep(POLL_S)

    def _work(self) -> None:
        latest = time.monotonic()
        while True:
            with self._lock:
                now = time.monotonic()
                if self._is_over:
                    return
                if not self._is_paused:
                    self._advance(now - latest)
                latest = now
            time.sleep(POLL_S)

    def _advance(self, elapsed: float) -> None:
        for job in list(self._running):
            job.seconds += elapsed
            if job.process.poll() is not None:
                self._running.remove(job)
                job.finish(job.process.returncode, job.seconds)
        while self._waiting and len(self._running) < self._width:
            job = self._waiting.pop(0)
            job.process = job.start()
            self._running.append(job)
