"""Time limits: a command killed from outside would leave its server behind, on the GPU."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

A_DAY = 86_400.0  # a timer takes no infinity


class OutOfTime(BaseException):
    """Raised in the main thread at a limit. Not an Exception, so error handlers let it pass."""


class TimeLimit:
    """The seconds that a call may take; None: any number."""

    def __init__(self, seconds: float | None):
        self._end = float("inf") if seconds is None else time.monotonic() + seconds
        self._guarded: tuple[subprocess.Popen, int] | None = None

    def left(self) -> float:
        return self._end - time.monotonic()

    def guard(self, process: subprocess.Popen, with_signal: int = signal.SIGKILL) -> None:
        """End this process first at the limit, and no other one.

        Threads may be waiting for its answers, and the main thread waits for them.
        """
        self._guarded = process, with_signal

    @contextlib.contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """Raise OutOfTime in the block after `seconds`, at the call's own limit, or when told to end."""
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, self._ring)
        signal.setitimer(signal.ITIMER_REAL, max(0.01, min(seconds, self.left(), A_DAY)))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, number: int, _frame) -> None:
        if number == signal.SIGTERM:
            self._end = 0.0  # nothing else is started
        if self._guarded is not None:
            process, with_signal = self._guarded
            if process.poll() is None:
                # A server's process leads a separate group, with its children in it.
                leads = os.getpgid(process.pid) == process.pid
                (os.killpg if leads else os.kill)(process.pid, with_signal)
        raise OutOfTime
