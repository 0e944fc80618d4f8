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
    outer, rooms, speculative = (contract["layers"] for contract in contracts if "layers" in contract)
    at = rooms.index("speculative") + 1
    page = (ROOT / "docs" / "dev" / "architecture.md").read_text()
    [picture] = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"\.py|/", "", line).strip() for line in picture.splitlines()]
    assert lines == [*outer[:-1], *rooms[:at], *speculative, *rooms[at:], outer[-1]]


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("Add a table of published drafts", None),
        ("Merge, in two commits, what belongs together", None),
        ("fixup! anything", None),
        ("Adaptive width pays", "begin with an imperative, not 'Adaptive'. If it is one, add it to VERBS"),
        ("Docs: say more", "begin with an imperative, not 'Docs'"),
        ("add a table", "not 'add'"),
        ("", "begin with an imperative"),
        (f"Add {'a' * 69}", "73 characters, at most 72"),
        ("Add a table.", "end without a full stop"),
    ],
)
def test_subjects_of_commits(subject, words, tmp_path):
    """As the hook checks a message."""
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\nThe body says why.\n")
    done = run("check_subjects.py", message)
    assert done.returncode == int(words is not None)
    assert (words or "") in done.stdout and len(done.stdout.splitlines()) == done.returncode


def test_the_subjects_of_this_checkout_are_checked(tmp_path):
    """All since a fixed commit, which a copy without history lacks, and none in a folder without git."""

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    script = tmp_path / ".ci" / "check_subjects.py"
    script.parent.mkdir()
    text = (ROOT / ".ci" / script.name).read_text()
    script.write_text(text)
    command = [sys.executable, script]
    assert subprocess.run(command).returncode == 0
    git("init", "-q")
    for subject in ("Old style", "Add one", "Wrongly begun", "Add two"):
        git("commit", "-q", "--allow-empty", "-m", subject)
    assert subprocess.run(command, capture_output=True).returncode == 0, "the last one alone"
    first = subprocess.check_output(["git", "rev-list", "--max-parents=0", "HEAD"], cwd=tmp_path, text=True)
    script.write_text(re.sub(r'SINCE = "\w+"', f'SINCE = "{first.strip()}"', text))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.startswith("Commit 'Wrongly begun': begin with an imp")
    assert len(done.stdout.splitlines()) == 1


def test_the_small_environment_has_the_linters_of_the_large_one():
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [line] = [line for line in makefile.splitlines() if ".venv-lint/bin/pip install" in line]
    assert set(re.findall(r"'([^']+)'", line)) < set(extras["lint"])
