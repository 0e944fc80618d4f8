"""`.ci/check_circles.py`, which `make lint` runs, and the picture of the import contracts."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from serving import ROOT


def check(folder: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / ".ci" / "check_circles.py", folder, *options]
    return subprocess.run(command, capture_output=True, text=True)


def write(folder: Path, **sources: str) -> None:
    for name, source in sources.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)


@pytest.mark.parametrize(
    "source",
    [
        "import sglang_dflash.one",
        "from sglang_dflash import one",
        "from sglang_dflash.one import name",
        "try:\n    from sglang_dflash.one import name\nexcept ImportError:\n    name = None",
    ],
)
def test_a_circle_is_named(source, tmp_path):
    write(tmp_path, one="from sglang_dflash import two", two="import sglang_dflash.three", three=source)
    done = check(tmp_path)
    assert done.returncode == 1
    assert "circle of imports: sglang_dflash.one, sglang_dflash.three, sglang_dflash.two\n" in done.stdout


@pytest.mark.parametrize(
    "source",
    [
        "import sglang",
        "def function():\n    import sglang_dflash.one",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import sglang_dflash.one",
    ],
)
def test_what_is_no_circle(source, tmp_path):
    write(tmp_path, one="from sglang_dflash import two", two=source)
    done = check(tmp_path)
    assert done.returncode == 0 and "2 modules, 0 circles." in done.stdout
    assert check(tmp_path, "--late").returncode == int("def " in source)


def test_rooms_import_each_other_in_a_circle_although_no_modules_do(tmp_path):
    one = "from sglang_dflash.srt.house.right import name"
    write(tmp_path, srt__house__left__one=one, srt__house__left__two="")
    write(tmp_path, srt__house__right="import sglang_dflash.srt.house.left.two")
    assert check(tmp_path).returncode == 0
    done = check(tmp_path, "--rooms", "srt/house")
    assert done.returncode == 1
    assert "imports: sglang_dflash.srt.house.left, sglang_dflash.srt.house.right\n" in done.stdout


@pytest.mark.parametrize("options", [("--late",), ("--late", "--rooms", "srt/speculative")])
def test_the_package(options):
    assert check(ROOT / "python" / "sglang", *options).returncode == 0


def test_the_picture_of_the_rooms_is_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    outer, rooms, speculative = (contract["layers"] for contract in contracts)
    at = rooms.index("speculative") + 1
    page = (ROOT / "docs" / "dev" / "architecture.md").read_text()
    [picture] = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"\.py|/", "", line).strip() for line in picture.splitlines()]
    assert lines == [*outer[:-1], *rooms[:at], *speculative, *rooms[at:], outer[-1]]
