"""`.ci/check_docstrings.py`, which `make lint` runs."""

import subprocess
import sys
from pathlib import Path

import pytest
from serving import ROOT

FUNCTION = "def add(rows, ends, *, size=1):\n"
RECORD = "class Rows(NamedTuple):\n    rows: int\n    ends: int\n"
MADE = "class Record:\n    def __init__(self, rows):\n        self.ends = 1 + rows\n"


def check(folder: Path, code: str, *lines: str) -> subprocess.CompletedProcess:
    """Run the script on a function or class that has these lines as its docstring."""
    head, _, body = code.partition("\n")
    docstring = "\n".join(f"    {line}" if line else "" for line in ('"""Add rows.', "", *lines, '"""'))
    (folder / "code.py").write_text(f"{head}\n{docstring}\n{body}")
    command = [sys.executable, ROOT / ".ci" / "check_docstrings.py", folder]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("code", [FUNCTION, RECORD, MADE])
@pytest.mark.parametrize(
    "line",
    [
        "rows: [n] int64.",
        "`rows`: [n] int64.",
        "- rows: [n] int64.",
        "    rows: [n] int64.",
        "rows, ends: [n] int64.",
        "other, ends: [n] int64.",
        "Several facts come first. rows: [n] int64.",
        "Several facts come first? ends: [n] int64.",
        "ends:",
    ],
)
def test_a_parameter_in_prose_is_found(tmp_path, code, line):
    result = check(tmp_path, code, line)
    assert result.returncode == 1
    assert f"parameter outside its section, or not alone in its item: {tmp_path}/code.py" in result.stdout
    assert line.strip() in result.stdout


@pytest.mark.parametrize("line", ["    rows: [n]. ends: [n].", "    rows, ends: [n]."])
def test_two_parameters_in_one_item_are_found(tmp_path, line):
    assert line.strip() in check(tmp_path, FUNCTION, "Args:", line).stdout


def test_prose_after_a_section_is_outside(tmp_path):
    result = check(tmp_path, FUNCTION, "Args:", "    rows: [n] int64.", "", "ends: [n] int64.")
    assert "ends: [n] int64." in result.stdout and "rows: [n] int64." not in result.stdout


@pytest.mark.parametrize("code", [FUNCTION, RECORD, MADE])
def test_google_sections_and_other_colons_are_in_order(tmp_path, code):
    lines = [
        "One launch: no host read. None: all rows. The rows: of the table. Columns (ends: rows).",
        "",
        "Attributes:",
        "    rows: [n] int64, of the table. None: all, in order: first to last.",
        "    `ends`: [n] int64,",
        "        one past each row.",
        "",
        "Raises:",
        "    ValueError: there are no rows.",
    ]
    result = check(tmp_path, code, *lines)
    assert result.returncode == 0, result.stdout


def test_a_long_first_line_is_found(tmp_path):
    (tmp_path / "code.py").write_text(f'"""{"word " * 18}"""\n')
    command = [sys.executable, ROOT / ".ci" / "check_docstrings.py", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1 and "first line too long" in result.stdout
