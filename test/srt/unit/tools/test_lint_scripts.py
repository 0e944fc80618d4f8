"""The scripts of `.ci/` that `make lint` runs, and the picture of the import contracts."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from serving import ROOT

SECTION = "Args:\n        rows: [n] int64, of the table. None: all, in order: first to last."


def run(script: str, folder: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / ".ci" / script, folder, *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (SECTION, True),
        ("Several facts come first. rows: [n] int64.", False),
        ("Args:\n        rows: [n]. ends: [n].", False),
        ("word " * 18, False),
    ],
)
def test_a_parameter_has_an_item_and_the_first_line_is_short(text, is_right, tmp_path):
    opening = "" if text.startswith("word") else "Add rows.\n\n    "
    (tmp_path / "code.py").write_text(f'def add(rows, ends):\n    """{opening}{text}\n    """\n')
    result = run("check_docstrings.py", tmp_path)
    assert (result.returncode == 0) == is_right, result.stdout


def test_calls_that_hide_what_an_argument_is(tmp_path):
    """Too many by position; a tuple into a kernel, into a class, or beside others."""
    right = "f(a, b, c, d)", "f(a, b=b, c=c, d=d, e=e)", "x.view(a, b, c, d, e)", "def f(*args): g(a, *args)"
    wrong = "f(a, b, c, d, e)", "kernel[grid](*a)", "Rows(*a)", "f(b, *a.sizes[:2])"
    (tmp_path / "right.py").write_text("\n".join(right))
    assert run("check_keywords.py", tmp_path).returncode == 0
    (tmp_path / "wrong.py").write_text("\n".join(wrong))
    done = run("check_keywords.py", tmp_path)
    assert done.returncode == 1 and done.stdout.count("wrong.py:") == len(wrong), done.stdout


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
    assert run("check_circles.py", tmp_path).returncode == int(is_circle)
    assert run("check_circles.py", tmp_path, "--late").returncode == int(is_late_circle)


def test_the_picture_of_the_rooms_is_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    outer, rooms, speculative = (contract["layers"] for contract in contracts)
    at = rooms.index("speculative") + 1
    page = (ROOT / "docs" / "dev" / "architecture.md").read_text()
    [picture] = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"\.py|/", "", line).strip() for line in picture.splitlines()]
    assert lines == [*outer[:-1], *rooms[:at], *speculative, *rooms[at:], outer[-1]]
