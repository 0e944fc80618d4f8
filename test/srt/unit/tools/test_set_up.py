"""`make`'s set-up of `.venv`, without a network: stand-ins of pip and uv write down what they are asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import set_up
from serving import ROOT


@pytest.fixture(autouse=True)
def pip_settings(monkeypatch, tmp_path) -> Path:
    """Hide this machine's settings of pip and uv. Returns an empty file of settings."""
    for name in os.environ:
        if name.startswith(("PIP_", "UV_", "MAKE", "MFLAGS")) or name in ("ARGS", "OVERRIDE"):
            monkeypatch.delenv(name)
    file = tmp_path / "pip.conf"
    file.touch()
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    return file


@pytest.fixture
def venv(tmp_path) -> Path:
    """An environment with this Python, in which `commands` gets what would be installed, `variables` uv's.

    uv cannot be had if NO_UV is set, and fails if UV_FAILS is.
    """
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    python, uv = folder / "bin" / "python", folder / "bin" / "uv"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *"uv>="*) exit ${{NO_UV:-0}};;\n'
        f'"-m pip install"*) echo "pip $*" >> {folder}/commands; exit;; esac\nexec {sys.executable} "$@"\n'
    )
    uv.write_text(
        f'#!/bin/sh\necho "uv $*" >> {folder}/commands; env > {folder}/variables; exit ${{UV_FAILS:-0}}\n'
    )
    python.chmod(0o755)
    uv.chmod(0o755)
    return folder


def commands(venv: Path) -> list[str]:
    return (venv / "commands").read_text().splitlines() if (venv / "commands").exists() else []


def test_uv_is_told_what_pip_is_configured_with(pip_settings, monkeypatch):
    """The environment counts more than pip's files, and a variable of uv's most."""
    pip_settings.write_text(
        "[global]\nindex-url = https://of.file/simple\nextra-index-url = file:///a/simple\n  file:///b/simple\n"
        "cert = /ca.crt\nconstraint = /c.txt\n[install]\nfind-links = /wheels /more\n"
    )
    monkeypatch.setenv("PIP_INDEX_URL", "https://of.environment/simple")
    monkeypatch.setenv("UV_CONSTRAINT", "/mine.txt")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    settings = set_up.pip_settings(Path(sys.executable))
    environment = set_up.uv_environment(settings)
    told = {name: environment[name] for name in environment.keys() - os.environ.keys()}
    assert told == {
        "UV_DEFAULT_INDEX": "https://of.environment/simple",
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/ca.crt",
    }
    assert environment["UV_CONSTRAINT"] == "/mine.txt"


def test_without_uv_pip_installs_alone(venv, monkeypatch):
    monkeypatch.setenv("NO_UV", "1")
    assert set_up.main([str(venv), "--sglang", "9.9", "--extras", "test"]) == 0
    [command] = commands(venv)
    assert command.startswith("pip ") and command.endswith("--editable .[model,test] sglang==9.9")
    assert {path.name for path in venv.glob(".ready*")} == {".ready", ".ready-model", ".ready-test"}
    assert set_up.main([str(venv), "--sglang", "9.8", "--override", "cuda-tile==1.6.0"]) == 1
    assert len(commands(venv)) == 1, "pip has no overrides"


def test_uv_gets_overrides_and_that_there_is_no_index(venv, monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert set_up.main([str(venv), "--sglang", "9.9", "--override", "a==1", "b==2"]) == 0
    [command] = commands(venv)
    assert f"--override {venv}/overrides.txt --no-index --editable .[model] sglang==9.9" in command
    assert (venv / "overrides.txt").read_text() == "a==1\nb==2\n"
    assert f"UV_FIND_LINKS={tmp_path}\n" in (venv / "variables").read_text()


def test_an_environment_that_failed_is_not_ready(venv, monkeypatch, capsys):
    monkeypatch.setenv("UV_FAILS", "1")
    assert set_up.main([str(venv), "--sglang", "9.9"]) == 1
    assert capsys.readouterr().err.startswith(f"{venv} is not ready: ")
    assert commands(venv) and not (venv / ".ready").exists()


def test_what_is_there_is_not_installed_again(venv):
    """An environment with everything needs no index; another version, or a newer pyproject.toml, does."""
    (venv / ".ready").touch()
    show = "from importlib.metadata import version; print(version('sglang'))"
    version = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    installed = version.stdout.strip()
    assert set_up.main([str(venv), "--sglang", installed, "--extras", "test"]) == 0
    assert not commands(venv) and (venv / ".ready-test").exists()
    assert set_up.main([str(venv), "--sglang", "9.9"]) == 0
    assert len(commands(venv)) == 1
    os.utime(venv / ".ready", (0, 0))
    assert set_up.main([str(venv), "--sglang", installed]) == 0
    assert len(commands(venv)) == 2


def made(goal: str, tmp_path: Path, *ready: str) -> list[str]:
    """Return what `make` runs, with stand-ins for Python; the set-up makes what it is asked for."""
    venv = tmp_path / "environment"
    for name in ("bin", *ready):
        (venv / name).mkdir(parents=True) if name == "bin" else (venv / name).touch()
    log = tmp_path / "log"
    python = venv / "bin" / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\ntouch {venv}/.ready\n'
        f'case "$*" in *"--extras test"*) touch {venv}/.ready-test;; esac\n'
    )
    python.chmod(0o755)
    command = ["make", "-s", f"VENV={venv}", f"PYTHON={python}", f"SMOLLM2={tmp_path}", goal]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60, capture_output=True)
    return [line for line in log.read_text().splitlines() if "set_up.py" in line]


def test_a_fresh_checkout_is_set_up_in_one_run(tmp_path):
    [line] = made("test", tmp_path)
    assert line.endswith(f"--model {tmp_path} --extras test")


def test_serving_needs_no_tests(tmp_path):
    [line] = made("serve", tmp_path)
    assert "--extras" not in line


def test_tests_add_to_what_serves(tmp_path):
    [line] = made("test-core", tmp_path, ".ready")
    assert line.endswith("--extras test") and "--model" not in line
