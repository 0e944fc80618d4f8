"""Cycles that the requests of each test took under scheduled.py, to compare two releases of SGLang.

Equal outputs say nothing about the draft: a draft that sees wrong KV only takes more cycles.
"""

import functools
from pathlib import Path

from support import scheduled


class Recorder:
    """Pytest plugin that appends a line per test to a file, which several workers and runs may share.

    It has to exist before a test file imports `scheduled.run`.
    """

    def __init__(self, file: Path):
        self._file = file
        self._cycles: list[int] = []
        run = scheduled.run

        @functools.wraps(run)
        def watched_run(*args, **kwargs):
            groups = run(*args, **kwargs)
            self._cycles += [len(answer.accepted) for group in groups for answer in group if answer.accepted]
            return groups

        scheduled.run = watched_run

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Write what the test's requests took."""
        if self._cycles:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{nodeid}: {len(self._cycles)} requests, {sum(self._cycles)} cycles\n")
            self._cycles.clear()
