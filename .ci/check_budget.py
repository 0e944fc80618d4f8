"""Check that no room is larger than `.ci/budget.toml` allows, and that each raise of it was paid for.

Code is counted in lines, pages in words. A file belongs to the longest path of the budget that it is below. A
commit that raises the number of a product room, or their sum, has a line `Figure:` (a page and a ratio) or
`Bug:` (a test) in its body. Exit status 1 otherwise.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ".ci/budget.toml"
PRODUCT = "python/"
CODE = (".py", ".sh")
PAID = re.compile(r"^(Figure|Bug): \S", re.MULTILINE)


def sizes_of(root: Path, rooms: dict[str, int]) -> dict[str, int]:
    """Count the words of pages or the lines of code of each room, without the rooms inside it."""
    sizes = dict.fromkeys(rooms, 0)
    for room in rooms:
        is_pages = room.startswith("docs") or room.endswith(".md")
        for path in [root / room, *(root / room).rglob("*")]:
            name = path.relative_to(root)
            inside = [other for other in rooms if name.is_relative_to(other)]
            if path.is_file() and max(inside, key=len) == room:
                if is_pages and path.suffix == ".md":
                    sizes[room] += len(path.read_text(encoding="utf-8").split())
                elif not is_pages and path.suffix in CODE:
                    sizes[room] += len(path.read_text(encoding="utf-8").splitlines())
    return sizes


def is_raised(new: dict[str, int], old: dict[str, int]) -> bool:
    """Return whether a product room that was there got a larger number, or all together did."""
    new, old = (
        {room: size for room, size in sizes.items() if room.startswith(PRODUCT)} for sizes in (new, old)
    )
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
    """Print what is wrong, then the sum of the product, and return the exit status."""
    rooms = tomllib.loads((ROOT / BUDGET).read_text())
    sizes = sizes_of(ROOT, rooms)
    wrong = [f"{room}: {sizes[room]}, {rooms[room]} allowed" for room in rooms if sizes[room] > rooms[room]]
    wrong += [f"{commit}: raises the budget without `Figure:` or `Bug:`" for commit in unpaid_commits()]
    product = [room for room in rooms if room.startswith(PRODUCT)]
    used, allowed = (sum(counts[room] for room in product) for counts in (sizes, rooms))
    print(*wrong, f"{used} product lines of {allowed} allowed.", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
