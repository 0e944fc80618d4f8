"""Ledger of what we reach for inside SGLang, beside patches and imports.

`reaches.txt` names private attributes that we read, attributes that we write, and members that our classes
override. `python tools/sglang_diff` compares each with any SGLang. A test compares the ledger with our
source, and with the names that a server looks up (`srt/reaches.py`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sglang_dflash.srt.reaches import ON_CPU, ROWS, WAIT


class Reach(NamedTuple):
    """Names of one owner that one file of ours reaches for.

    Attributes:
        owner: Dotted path of a class, or of a module.
        kind: "read", "write" or "override".
        names: Attributes, methods and properties.
        where: Path of our file below `srt/speculative/`, or below `srt/`.
        why: What for.
        feature: Feature that needs the names. None: DFLASH cannot be served without them.
        since: First supported release of SGLang that has the names.
    """

    owner: str
    kind: str
    names: tuple[str, ...]
    where: str
    why: str
    feature: str | None
    since: str


# Heads of the ledger's sections -> the feature that needs the names, and the first release that has them.
SECTIONS = {
    "[required]": (None, "0.5.22"),
    "[required, since 0.5.23]": (None, "0.5.23"),
    "[ROWS]": (ROWS, "0.5.22"),
    "[WAIT]": (WAIT, "0.5.22"),
    "[ON_CPU]": (ON_CPU, "0.5.22"),
}


def _reaches(table: str) -> Iterator[Reach]:
    """Read owners below `sglang.srt`, and below each its lines `where kind names: why`."""
    owner, feature, since = "", None, ""
    for line in table.splitlines():
        if line in SECTIONS:
            feature, since = SECTIONS[line]
        elif line.startswith(" "):
            what, _, why = line.partition(": ")
            where, kind, *names = what.split()
            yield Reach(owner, kind, tuple(names), where, why, feature, since)
        else:
            owner = f"sglang.srt.{line}"


REACHES = tuple(_reaches(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")))
