"""Check the share of lines that tests run, room by room, against floors.

Usage: `python .ci/check_coverage.py build/coverage/data.json`, after `coverage json`. Exit status 1 if a room
is below its floor or has none.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

PACKAGE = "python/sglang/"
# Percent of the lines of each room that tests must run: half a percent below the run of 2026-11-30.
FLOORS = {
    ".": 96.8,
    "kernels": 99.5,
    "srt": 98.7,
    "srt/arg_groups": 97.6,
    "srt/configs": 97,
    "srt/doctor": 94.8,
    "srt/hardware_backend": 98.1,
    "srt/layers": 97.8,
    "srt/models": 98.7,
    "srt/observability": 98.6,
    "srt/plugins": 97.4,
    "srt/speculative": 95.9,
    "srt/speculative/acceptance": 98.6,
    "srt/speculative/cycle": 98.8,
    "srt/speculative/drafters": 97.8,
    "srt/speculative/targets": 98.3,
    "srt/speculative/width": 98.8,
}


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
    is_low = False
    print("| room | lines | run | floor |\n|---|---:|---:|---:|")
    for room, (ran, lines) in coverage_of_rooms(json.loads(Path(file).read_text())).items():
        share, floor = 100 * ran / lines, FLOORS.get(room)
        is_room_low = floor is None or share < floor
        is_low |= is_room_low
        print(f"| `{room}` | {lines} | {share:.1f} % | {floor}{' MISSED' * is_room_low} |")
    return int(is_low)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
