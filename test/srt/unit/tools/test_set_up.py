"""`make`'s set-up of `.venv`, without a network: pip runs for real, on indexes that lack files."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import set_up
from serving import ROOT

SCRIPT = Path(set_up.__file__)


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
    """An environment whose Python is this one, for which pip installs nothing and finds nothing installed."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    hides = "--ignore-installed --dry-run"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in "-m pip install"*) exec {sys.executable} "$@" {hides};; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return tmp_path / "venv"


@pytest.fixture
def installed(monkeypatch) -> list[tuple[list[str], dict[str, str]]]:
    """Commands that would install SGLang, and their environments. Nothing is installed."""
    commands = []

    def run(command, log, environment):
        commands.append((command, environment))
        return 0, ""

    monkeypatch.setattr(set_up, "run", run)
    return commands


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


# Words of uv 0.13 and pip 23 to 26, and of the line that a user reads.
MESSAGES = {
    "cause: tcp connect error\n  cause: Connection refused (os error 111)": "no connection",
    "cause: client error (Connect)\n  cause: dns error\n  cause: error resolving DNS": "no connection",
    "connection broken by 'NewConnectionError(...)'\nERROR: No matching distribution": "no connection",
    "cause: failed to copy file to /x: No space left on device (os error 28)": "no space left",
    "ERROR: Could not install packages: [Errno 28] No space left on device": "no space left",
    "urllib3.exceptions.IncompleteRead: IncompleteRead(5 bytes read, 95 more expected)": "broke off",
    "hint: The structure of `six` (v1.17.0) was invalid:\n  Failed to read from zip file": "broke off",
    "error: Request failed\n  cause: error decoding response body": "broke off",
    "error: Failed to build `x==1`\n  cause: The build backend returned an error\n"
    "socket.gaierror: Name or service not known": "cannot be built",
    "ERROR: Failed to build installable wheels for some pyproject.toml based projects": "cannot be built",
    "error: No solution found when resolving dependencies": "index lacks something",
    "ERROR: No matching distribution found for cuda-tile==1.7.0": "index lacks something",
    "error: something else": "error: something else",
    "": "no message",
}


@pytest.mark.parametrize("message", MESSAGES)
def test_a_failure_is_one_line_with_what_to_do(message, tmp_path):
    line = set_up.cause_of(message, tmp_path)
    assert MESSAGES[message] in line and "\n" not in line


def fails_with(words: str, venv: Path, capsys, *flags: str) -> None:
    assert set_up.main([str(venv), "--sglang", "9.9", *flags]) == 1
    said = capsys.readouterr()
    assert said.out.startswith(f"Setting up {venv}: ") and len(said.out.splitlines()) == 1
    [line] = said.err.splitlines()
    assert line.startswith(f"{venv} is not ready: ") and words in line
    assert not (venv / ".ready").exists()


def test_no_network(venv, installed, capsys, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    fails_with("no connection to the package index", venv, capsys)
    assert not installed


@pytest.fixture
def empty_index(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))


def test_without_a_wheel_of_uv_pip_installs_alone(empty_index, venv, installed, capsys):
    assert set_up.main([str(venv), "--sglang", "9.9", "--extras", "test"]) == 0
    [(command, _)] = installed
    assert command[1:4] == ["-m", "pip", "install"]
    assert command[-3:] == ["--editable", ".[model,test]", "sglang==9.9"]
    _, line, _ = capsys.readouterr().out.splitlines()
    assert line.startswith("pip installs alone") and "no wheel of uv" in line
    assert {path.name for path in venv.glob(".ready*")} == {".ready", ".ready-model", ".ready-test"}


def test_overrides_need_uv(empty_index, venv, installed, capsys):
    fails_with("OVERRIDE needs uv", venv, capsys, "--override", "cuda-tile==1.6.0")


def test_uv_gets_overrides_and_that_there_is_no_index(empty_index, venv, installed, monkeypatch):
    monkeypatch.setattr(set_up, "install_uv", lambda python, settings: None)
    assert set_up.main([str(venv), "--sglang", "9.9", "--override", "a==1", "b==2"]) == 0
    [(command, environment)] = installed
    assert command[0] == str(venv / "bin" / "uv") and "--no-index" in command
    assert Path(command[command.index("--override") + 1]).read_text() == "a==1\nb==2\n"
    assert environment["UV_FIND_LINKS"] == os.environ["PIP_FIND_LINKS"]


def test_what_is_there_is_not_installed_again(venv, installed, monkeypatch):
    """An environment with everything needs no index; another version, or a newer pyproject.toml, does."""
    monkeypatch.setattr(set_up, "install_uv", lambda python, settings: None)
    (venv / ".ready").touch()
    version = subprocess.run(
        [sys.executable, "-c", "from importlib.metadata import version; print(version('sglang'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert set_up.main([str(venv), "--sglang", version, "--extras", "test"]) == 0
    assert not installed and (venv / ".ready-test").exists()
    assert set_up.main([str(venv), "--sglang", "9.9"]) == 0
    assert len(installed) == 1
    os.utime(venv / ".ready", (0, 0))
    assert set_up.main([str(venv), "--sglang", version]) == 0
    assert len(installed) == 2


def test_an_installation_that_runs_is_shown_and_logged(tmp_path, capsys):
    command = [sys.executable, "-c", "print('Resolved 2 packages in 1s'); raise SystemExit('no space')"]
    status, output = set_up.run(command, tmp_path / "log", dict(os.environ))
    assert status == 1 and output == (tmp_path / "log").read_text() == "Resolved 2 packages in 1s\nno space\n"
    assert capsys.readouterr().out == "  Resolved 2 packages in 1s\n  no space\n"


def test_an_old_python_is_told_so(monkeypatch, capsys):
    """The file must be read by it first."""
    ast.parse(SCRIPT.read_text(), feature_version=(3, 8))
    monkeypatch.setattr(set_up.sys, "version_info", (3, 9, 1))
    assert set_up.main([]) == 1
    assert capsys.readouterr().out.startswith("sglang-dflash needs Python 3.11 or newer, this is 3.9; ")


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
