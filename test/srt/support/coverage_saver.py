"""Coverage of processes that are killed, as servers are: what was run is saved every two seconds.

`make coverage` names this module as a plugin of coverage.py, which loads it in every process it measures.
The main thread saves, between two lines of its own: coverage.py's tracer is not made for another thread.
"""

import atexit
import signal
import threading
from typing import Any

from coverage import Coverage

SECONDS = 2


def coverage_init(registry: Any, options: dict) -> None:
    """Start the timer. A fork has none; coverage.py calls this function there again."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, _save)
        signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)
        atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # a late alarm would end the process


def _save(signum: int, frame: Any) -> None:
    current = Coverage.current()
    if current is not None:
        current.save()
