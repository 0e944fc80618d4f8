"""Check the share of lines that tests run, room by room, against floors.

Usage: `python .ci/check_coverage.py build/coverage/data.json`, after `coverage json`. The floors are in
pyproject.toml under `tool.coverage_floors`, in percent. Exit status 1 if a room is below its floor or has
none.
"""

import json
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "python/sglang/"


def room_of(path: str) -> str:
    """Return the room of a file: `kernels`, a folder of `srt` or of `srt/speculative`, or `.`."""
    parts = path.partition(PACKAGE)[2].split("/")[:-1]
    depth = 3 if parts[:2] == ["srt", "speculative"] else 2 if parts[:1] == ["srt"] else 1
    return "/".join(parts[:depth]) or "."


def coverage_of_rooms(report: dict) -> dict[str, tuple[int, int]]:
    """Return the lines of each room that ran, and all its lines."""
    rooms: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for path, found in report["files"].items():
        ran, lines = rooms[room_of(path)]
        summary = found["summary"]
        rooms[room_of(path)] = ran + summary["covered_lines"], lines + summary["num_statements"]
    return {room: counts for room, counts in sorted(rooms.items()) if counts[1]}


def main(file: str) -> int:
    """Print a table of the rooms and return the exit status."""
    floors = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["coverage_floors"]
    is_low = False
    print("| room | lines | run | floor |\n|---|---:|---:|---:|")
    for room, (ran, lines) in coverage_of_rooms(json.loads(Path(file).read_text())).items():
        share, floor = 100 * ran / lines, floors.get(room)
        is_room_low = floor is None or share < floor
        is_low |= is_room_low
        print(f"| `{room}` | {lines} | {share:.1f} % | {floor}{' MISSED' * is_room_low} |")
    return int(is_low)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
