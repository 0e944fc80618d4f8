"""Report of a rehearsed server: JSON lines in the file that REHEARSAL_REPORT names."""

import json
import os
from typing import Any

VARIABLE = "REHEARSAL_REPORT"
order: list[str] = []  # waits, plans and replays since lengths were published last


def note(kind: str, **facts: Any) -> None:
    with open(os.environ[VARIABLE], "a") as file:
        file.write(json.dumps({"kind": kind, **facts}) + "\n")


def problem(text: str) -> None:
    """Report something that a GPU would have done silently wrong."""
    note("problem", text=text)
