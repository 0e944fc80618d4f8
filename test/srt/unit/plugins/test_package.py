"""The installed package: modules in the wheel, and entry points."""

import ast
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from check_circles import imported_names
from serving import ROOT

SOURCE = ROOT / "python" / "sglang"
GROUPS = ("sglang.srt.platforms", "sglang.srt.plugins")


@pytest.fixture(scope="module")
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("group", GROUPS)
def test_installed_entry_points_load(group):
    """SGLANG_PLUGINS filters by name: two names could switch off half the plugin."""
    (ours,) = [entry for entry in entry_points(group=group) if entry.dist.name == "sglang-dflash"]
    assert ours.name == "dflash"
    assert callable(ours.load())


def test_pins(pyproject):
    """Installing the plugin must change no version of SGLang, nor of anything that comes with it."""
    from sglang_dflash.srt.plugins.compatibility import SUPPORTED

    requirements = [line.partition(";")[0].strip() for line in pyproject["project"]["dependencies"]]
    assert requirements[0] == "sglang"
    assert not [line for line in requirements if "==" in line or "~=" in line or "<" in line]
    assert importlib.metadata.version("sglang") in SUPPORTED


def test_nothing_of_the_built_in_dflash_is_imported():
    """No file of the package imports SGLang's DFlash or DSpark modules."""
    built_in = ("sglang.srt.speculative.dflash", "sglang.srt.speculative.dspark", "sglang.srt.models.dflash")
    found = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        for name in imported_names(ast.parse(path.read_text()).body, late=True)
        if name.startswith(built_in)
    }
    assert not found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Wheel built from a copy, so that the build leaves nothing in the working tree."""
    setuptools = tuple(int(part) for part in importlib.metadata.version("setuptools").split(".")[:1])
    if setuptools < (77,):
        pytest.skip("pyproject.toml requires setuptools >= 77, and this build may not download it")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(SOURCE, source / "python" / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, *"-m pip wheel --quiet --no-deps --no-build-isolation".split()]
    command += ["-w", target, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_file(wheel):
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert packed == {f"sglang_dflash/{path.relative_to(SOURCE).as_posix()}" for path in files}
    assert {"sglang_dflash/py.typed", "sglang_dflash/srt/doctor/page.css"} < packed
    # Without `__init__.py`, editable and zip imports of an installed folder differ.
    assert {f"{Path(name).parent.as_posix()}/__init__.py" for name in packed if name.endswith(".py")} < packed


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an sdist has no list of files to compare with")
def test_the_sdist_holds_every_file_but_weights(tmp_path):
    """Its lint and its core tests run, so it has the workflows, the tools and the hooks too."""
    setuptools = int(importlib.metadata.version("setuptools").partition(".")[0])
    if setuptools < 77:
        pytest.skip("pyproject.toml requires setuptools >= 77, and this build may not download it")
    listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    files = {name for name in listed if not name.endswith(".safetensors") and (ROOT / name).exists()}
    source, target = tmp_path / "source", tmp_path / "built"
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(target)!r})"
    target.mkdir()
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = target.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    assert files - packed == {".gitignore"}


def metadata_of(wheel: zipfile.ZipFile) -> str:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return wheel.read(name).decode()


def test_the_wheel_carries_the_licence(wheel):
    assert "\nLicense-Expression: Apache-2.0\n" in metadata_of(wheel)
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_links_of_the_wheels_description_are_absolute(wheel):
    """A package index shows the README outside the repository."""
    links = re.findall(r"\]\(([^)\s]+)\)", metadata_of(wheel))
    assert len(links) > 20
    assert not [link for link in links if not link.startswith(("https://", "#"))]


def test_the_picture_of_the_rooms_is_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    outer, rooms, speculative = (contract["layers"] for contract in contracts if "layers" in contract)
    at = rooms.index("speculative") + 1
    page = (ROOT / "docs" / "dev" / "architecture.md").read_text()
    [picture] = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [re.sub(r"\.py|/", "", line).strip() for line in picture.splitlines()]
    assert lines == [*outer[:-1], *rooms[:at], *speculative, *rooms[at:], outer[-1]]


def test_the_small_environment_has_the_linters_of_the_large_one():
    makefile = (ROOT / "Makefile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [line] = [line for line in makefile.splitlines() if ".venv-lint/bin/pip install" in line]
    assert set(re.findall(r"'([^']+)'", line)) < set(extras["lint"])
