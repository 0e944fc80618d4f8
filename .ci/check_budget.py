"""Check that no room has more lines than `.ci/budget.toml` allows, and that each raise of it was paid for.

A file belongs to the longest folder of the budget that it is below. A commit that raises a number, or the sum
of all, has a line `Figure:` (a page and a ratio) or `Bug:` (a test) in its body. Exit status 1 otherwise.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ".ci/budget.toml"
PAID = re.compile(r"^(Figure|Bug): \S", re.MULTILINE)


def lines_by_room(root: Path, rooms: dict[str, int]) -> dict[str, int]:
    """Count the lines of the Python files of each room, without the rooms inside it."""
    lines = dict.fromkeys(rooms, 0)
    for path in {path for room in rooms for path in (root / room).rglob("*.py")}:
        inside = [room for room in rooms if path.is_relative_to(root / room)]
        lines[max(inside, key=len)] += len(path.read_text(encoding="utf-8").splitlines())
    return lines


def is_raised(new: dict[str, int], old: dict[str, int]) -> bool:
    """Return whether a room that was there got a larger number, or all together did."""
    return any(new[room] > old[room] for room in new.keys() & old.keys()) or sum(new.values()) > sum(
        old.values()
    )


def unpaid_commits() -> list[str]:
    """Return the subjects of commits that raise the budget without a reason; none outside a git checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    unpaid = []
    for commit in git("log", "--no-merges", "--format=%H", "--", BUDGET).split():
        new, old = (tomllib.loads(git("show", f"{name}:{BUDGET}")) for name in (commit, f"{commit}^"))
        if old and is_raised(new, old) and not PAID.search(git("show", "-s", "--format=%b", commit)):
            unpaid.append(git("show", "-s", "--format=%h %s", commit).strip())
    return unpaid


def main() -> int:
    """Print what is wrong, then the sum, and return the exit status."""
    rooms = tomllib.loads((ROOT / BUDGET).read_text())
    lines = lines_by_room(ROOT, rooms)
    wrong = [
        f"{room}: {lines[room]} lines, {rooms[room]} allowed" for room in rooms if lines[room] > rooms[room]
    ]
    wrong += [f"{commit}: raises the budget without `Figure:` or `Bug:`" for commit in unpaid_commits()]
    print(*wrong, f"{sum(lines.values())} lines of {sum(rooms.values())} allowed.", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
