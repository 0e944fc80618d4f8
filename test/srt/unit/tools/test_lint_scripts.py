"""The scripts of `.ci/` that `make lint` runs, and the picture of the import contracts."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from serving import ROOT

FUNCTION = "def add(rows, ends, *, size=1):\n"
RECORD = "class Rows(NamedTuple):\n    rows: int\n    ends: int\n"
SECTION = "Args:\n        rows: [n] int64, of the table. None: all, in order: first to last."


def check(script: str, folder: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / ".ci" / script, folder, *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (SECTION, True),
        ("One launch: no host read. None: all rows.", True),
        ("Several facts come first. rows: [n] int64.", False),
        ("rows, ends: [n] int64.", False),
        ("Args:\n        rows: [n]. ends: [n].", False),
        (f"{SECTION}\n\n    ends: [n] int64.", False),
        ("word " * 18, False),
    ],
)
@pytest.mark.parametrize("code", [FUNCTION, RECORD])
def test_docstrings(code, text, is_right, tmp_path):
    """A parameter has an item of its own in a section, and the first line is short."""
    head, _, body = code.partition("\n")
    opening = "" if text.startswith("word") else "Add rows.\n\n    "
    (tmp_path / "code.py").write_text(f'{head}\n    """{opening}{text}\n    """\n{body}')
    result = check("check_docstrings.py", tmp_path)
    assert (result.returncode == 0) == is_right, result.stdout


@pytest.mark.parametrize(
    ("source", "is_circle", "is_late_circle"),
    [
        ("from sglang_dflash.one import name", True, True),
        ("def function():\n    import sglang_dflash.one", False, True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sglang_dflash.one", False, False),
    ],
)
def test_circles_of_imports(source, is_circle, is_late_circle, tmp_path):
    (tmp_path / "one.py").write_text("from sglang_dflash import two")
    (tmp_path / "two.py").write_text(source)
    done = check("check_circles.py", tmp_path)
    assert done.returncode == int(is_circle)
    assert ("circle of imports: sglang_dflash.one, sglang_dflash.two\n" in done.stdout) == is_circle
    assert check("check_circles.py", tmp_path, "--late").returncode == int(is_late_circle)


def test_rooms_import_each_other_in_a_circle_although_no_modules_do(tmp_path):
    for name, source in (
        ("left/one", "from sglang_dflash.srt.house.right import name"),
        ("left/two", ""),
        ("right", "import sglang_dflash.srt.house.left.two"),
    ):
        path = tmp_path / "srt" / "house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert check("check_circles.py", tmp_path).returncode == 0
    done = check("check_circles.py", tmp_path, "--rooms", "srt/house")
    assert done.returncode == 1
    assert "imports: sglang_dflash.srt.house.left, sglang_dflash.srt.house.right\n" in done.stdout


def test_the_picture_of_the_rooms_is_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    outer, rooms, speculative = (contract["layers"] for contract in contracts)
    at = rooms.index("speculative") + 1
    page = (ROOT / "docs" / "dev" / "architecture.md").read_text()
    [picture] = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"\.py|/", "", line).strip() for line in picture.splitlines()]
    assert lines == [*outer[:-1], *rooms[:at], *speculative, *rooms[at:], outer[-1]]
