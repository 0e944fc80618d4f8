"""Mutants of the lines that decide: each planted fault must fail a test of its room.

    python test/srt/mutants.py [--only acceptor] [--list]

Each fault replaces one text in a copy of the package, and tests run against the copy. A text that is gone, or
stands in several places, is an error that names it: bring the list up to date. Exit status: 0 if all are
killed or explained, 1 if one survives, 2 if the list is wrong.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from support.core_files import CORE

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "sglang"
UNIT = ROOT / "test" / "srt" / "unit"
LIST = Path(__file__).with_suffix(".toml")

# pytest's exit status.
PASSED, FAILED, INTERRUPTED = 0, 1, 2


@dataclass(frozen=True)
class Room:
    """A file of the product and its planted faults, as in mutants.toml."""

    file: str
    tests: Sequence[str]
    faults: Sequence[Sequence[str]]


def count(room: Room, old: str) -> int:
    """Count the places of a text in the product's file."""
    return (PACKAGE / room.file).read_text().count(old)


def run(tests: Sequence[str], path: Path) -> subprocess.CompletedProcess:
    """Run tests, and their comparisons in the interpreter; a package below `path` is found first."""
    files = [UNIT / test for test in tests]
    done = run_pytest(files, path, "-m", "not server and not long")
    compared = [file for file in files if "@against_twin" in file.read_text()]
    if done.returncode == PASSED and compared:
        options = "--hypothesis-profile=short", "-m", "twin"
        done = run_pytest(compared, path, *options, TRITON_INTERPRET="1")
    return done


def run_pytest(
    files: Sequence[Path], path: Path, *options: str, **environment: str
) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *options,
        *map(str, files),
    ]
    if all(file.name in CORE for file in files):
        command.append("--core")  # SGLang's import takes longer than the tests
    environment = {**os.environ, "PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def verdict(room: Room, old: str, new: str, *explanation: str) -> str:
    """Plant a fault in a copy of the package. Returns "killed", "explained" or "survived"."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "sglang_dflash"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        (copy / room.file).write_text((PACKAGE / room.file).read_text().replace(old, new))
        done = run(room.tests, Path(folder))
    # A fault may show when a module is imported, and one in a kernel may end the process by a signal.
    if done.returncode in (FAILED, INTERRUPTED) or done.returncode < 0:
        return "killed"
    if done.returncode != PASSED:
        raise RuntimeError(f"{room.file}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}")
    return "explained" if explanation else "survived"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Plant faults in the lines that decide, and run their tests."
    )
    parser.add_argument("--only", default="", metavar="WORD", help="files whose name has this word")
    parser.add_argument("--list", action="store_true", help="check that every text is there, and run nothing")
    args = parser.parse_args()
    rooms = [Room(**room) for room in tomllib.loads(LIST.read_text())["room"] if args.only in room["file"]]
    gone = [f"{room.file}: {old!r}" for room in rooms for old, *_ in room.faults if count(room, old) != 1]
    if gone:
        print("Not once in the product:", *gone, sep="\n  ", file=sys.stderr)
        return 2
    if args.list:
        return 0
    found: Counter[str] = Counter()
    for room in rooms:
        if (done := run(room.tests, UNIT)).returncode != PASSED:
            print(f"Without a fault these fail: {room.tests}\n{done.stdout[-2000:]}", file=sys.stderr)
            return 2
        for old, new, *explanation in room.faults:
            result = verdict(room, old, new, *explanation)
            found[result] += 1
            print(f"{result:9} {room.file}: {old.strip()!r} -> {new.strip()!r}", flush=True)
    print(
        f"{found.total()} mutants: {found['killed']} killed, {found['explained']} explained, "
        f"{found['survived']} survived."
    )
    return int(found["survived"] > 0)


if __name__ == "__main__":
    sys.exit(main())
