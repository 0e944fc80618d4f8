"""Coverage of processes that are killed, as servers are: what was run is saved every second.

`make coverage` names this module as a plugin of coverage.py, which loads it in every process it measures.
"""

import threading
import time
from typing import Any

from coverage import Coverage


def coverage_init(registry: Any, options: dict) -> None:
    """Start the thread that saves. It ends with the process."""
    threading.Thread(target=_save_often, daemon=True).start()


def _save_often() -> None:
    while True:
        time.sleep(1)
        current = Coverage.current()
        if current is not None:
            current.save()
