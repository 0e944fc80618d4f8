"""Cycles that the requests of each test took, recorded to compare two releases of SGLang.

    python -m pytest --record-cycles FILE test/srt/engine/test_lossless.py
    python test/srt/support/cycle_counts.py FILE OTHER_FILE

Equal outputs say nothing about the draft: a draft that sees wrong KV only takes more cycles.
"""

import functools
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


class Recorder:
    """Adds up the cycles of all answers that a test receives. One JSON line per test.

    A line is appended after each test, so that several workers and later runs may share the file.
    """

    def __init__(self, file: Path):
        self._file = file
        self._lock = threading.Lock()
        self._counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def install(self) -> None:
        """Watch the three ways in which tests get answers. Call it before a test file is imported."""
        from serving import Server
        from support import scheduled, streaming

        post, stream, run = Server.post, streaming.stream, scheduled.run

        @functools.wraps(post)
        def watched_post(*args, **kwargs):
            answer = post(*args, **kwargs)
            self._add(map(_cycles_of_meta, _metas(answer)))
            return answer

        @functools.wraps(stream)
        def watched_stream(*args, **kwargs):
            last = None
            for last in stream(*args, **kwargs):
                yield last
            self._add(map(_cycles_of_meta, _metas(last)))

        @functools.wraps(run)
        def watched_run(*args, **kwargs):
            groups = run(*args, **kwargs)
            self._add(len(answer.accepted) for group in groups for answer in group)
            return groups

        Server.post, streaming.stream, scheduled.run = watched_post, watched_stream, watched_run

    def write(self) -> None:
        """Append what has been counted since the last call."""
        with self._lock, self._file.open("a", encoding="utf-8") as file:
            for test, (requests, cycles) in self._counts.items():
                file.write(json.dumps({"test": test, "requests": requests, "cycles": cycles}) + "\n")
            self._counts.clear()

    def _add(self, cycles: Iterable[int]) -> None:
        drafted = [count for count in cycles if count]
        if not drafted:
            return
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        with self._lock:
            self._counts[test][0] += len(drafted)
            self._counts[test][1] += sum(drafted)


def _metas(answer: Any) -> list[dict]:
    answers = answer if isinstance(answer, list) else [answer]
    return [one["meta_info"] for one in answers if isinstance(one, dict) and "meta_info" in one]


def _cycles_of_meta(meta: dict) -> int:
    return sum(meta.get("spec_correct_drafts_histogram") or [])


def read(file: Path) -> dict[str, dict]:
    """Return a record per test. A later line replaces an earlier one."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {line["test"]: line for line in lines}


def table(first: Path, second: Path) -> list[str]:
    """Return a Markdown table of both records by test file, then each test that differs."""
    records = read(first), read(second)
    shared = sorted(records[0].keys() & records[1].keys())
    rows = [
        f"| test file | tests | requests | cycles, {first.stem} | cycles, {second.stem} | differing tests |",
        "|---|---|---|---|---|---|",
    ]
    differ = [test for test in shared if records[0][test] != records[1][test]]
    for file in dict.fromkeys(test.partition("::")[0] for test in shared):
        tests = [test for test in shared if test.startswith(f"{file}::")]
        requests = sum(records[0][test]["requests"] for test in tests)
        cycles = [sum(record[test]["cycles"] for test in tests) for record in records]
        num_differ = len([test for test in tests if test in differ])
        name = Path(file).name
        rows.append(f"| `{name}` | {len(tests)} | {requests} | {cycles[0]} | {cycles[1]} | {num_differ} |")
    for test in differ:
        counts = ", ".join(f"{record[test]['cycles']} of {record[test]['requests']}" for record in records)
        rows.append(f"- `{test}`: {counts}")
    alone = sorted(records[0].keys() ^ records[1].keys())
    return rows + [f"- in one record only: `{test}`" for test in alone]


def main(arguments: Sequence[str]) -> int:
    """Print the comparison; the exit status is 1 if a count differs."""
    lines = table(*map(Path, arguments))
    print("\n".join(lines))
    return int(any(line.startswith("- ") for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
