"""Check an installed sglang-dflash without its dependencies: version, licence, entry points and their files.

Run `python .ci/check_installed.py` where it is installed. Exit status 1 if something is missing.
"""

import sys
import tomllib
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def problems() -> list[str]:
    """Return what differs from pyproject.toml, or is not there."""
    installed = distribution(PROJECT["name"])
    found = []
    if installed.version != PROJECT["version"]:
        found.append(f"version {installed.version}, not {PROJECT['version']}")
    if installed.metadata["License-Expression"] != PROJECT["license"]:
        found.append("no licence")
    points = {(point.group, point.name): point.value for point in installed.entry_points}
    for group, named in PROJECT["entry-points"].items():
        for name, value in named.items():
            if points.get((group, name)) != value:
                found.append(f"no entry point {group}: {name} = {value}")
    if find_spec("sglang_dflash") is None:
        found.append("no package sglang_dflash")
    files = {str(file) for file in installed.files or ()}
    for value in points.values():
        file = value.partition(":")[0].replace(".", "/") + ".py"
        if file not in files:
            found.append(f"no file {file}")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems()) or 0)
