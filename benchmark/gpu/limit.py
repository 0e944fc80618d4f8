"""Time limit: a command killed from outside would leave its server behind, on the GPU."""

import os
import signal
import subprocess
import time


class OutOfTime(BaseException):
    """Raised in the main thread at the limit. Not an Exception, so error handlers let it pass."""


class TimeLimit:
    """Context manager that raises OutOfTime after `seconds`, or never for None."""

    def __init__(self, seconds: float | None):
        self._end = None if seconds is None else time.monotonic() + seconds
        self._guarded: tuple[subprocess.Popen, int] | None = None

    def left(self) -> float:
        return float("inf") if self._end is None else self._end - time.monotonic()

    def guard(self, process: subprocess.Popen, with_signal: int = signal.SIGKILL) -> None:
        """End this process first at the limit, and no other one.

        Threads may be waiting for its answers, and the main thread waits for them.
        """
        self._guarded = process, with_signal

    def __enter__(self) -> "TimeLimit":
        if self._end is not None:
            signal.signal(signal.SIGALRM, self._ring)
            signal.setitimer(signal.ITIMER_REAL, max(0.01, self.left()))
        return self

    def __exit__(self, *_) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, *_) -> None:
        if self._guarded is not None:
            process, with_signal = self._guarded
            if process.poll() is None:
                # A server's process leads a group of its own, with its children in it.
                leads = os.getpgid(process.pid) == process.pid
                (os.killpg if leads else os.kill)(process.pid, with_signal)
        raise OutOfTime
