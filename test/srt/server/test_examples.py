"""The examples, run as a user runs them: those of `examples/`, and those in docstrings.

`offline_engine.py` starts a separate engine: test_stock_sglang.py.
"""

import ast
import doctest
import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from serving import PEAGLE_DRAFT, ROOT, SPECULATORS_DRAFT, Server, dflash_arguments
from support.decisions import accepted_blocks
from support.servers import FLOAT32, MEASURED_COSTS

from sglang_dflash import doctor
from sglang_dflash.srt.hardware_backend.cpu import runtime
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout
from sglang_dflash.srt.speculative.cycle.observer import CycleObserver, observers_from_environment
from sglang_dflash.srt.speculative.dflash_worker import DFlashWorker
from sglang_dflash.srt.speculative.request_fields import requested_caps

EXAMPLES = ROOT / "examples"
# The block size of all three bundled drafts, anchor included.
BLOCK_SIZE = 8


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run an example; return what it printed."""
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, cwd=cwd, env=environment
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def numbers(pattern: str, output: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, output)]


def test_every_example_is_tested_and_short():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    tests = Path(__file__).read_text() + Path(__file__).with_name("test_stock_sglang.py").read_text()
    assert not [name for name in files if f'"{name}"' not in tests]
    table = (EXAMPLES / "README.md").read_text()
    assert not [name for name in files if f"| `{name}` |" not in table]
    assert not [name for name in files if len((EXAMPLES / name).read_text().splitlines()) > 60]


def example_of(documented: object) -> str:
    """Return the code of a docstring's example: the indented lines that follow each `::`."""
    _, heading, text = inspect.getdoc(documented).partition("\nExample:\n")
    assert heading, documented
    code = re.findall(r"::\n\n((?: {8}.*\n|\n)+)", f"{text}\n")
    return textwrap.dedent("".join(code))


@pytest.mark.parametrize("documented", [doctor.main, requested_caps])
def test_a_docstrings_session_prints_what_it_shows(documented, monkeypatch):
    monkeypatch.chdir(ROOT)
    session = doctest.DocTestParser().get_doctest(example_of(documented), {}, documented.__name__, None, 0)
    assert session.examples
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert not runner.run(session, out=printed.append).failed, "".join(printed)


def test_the_observer_of_the_docstring_runs(tmp_path, monkeypatch, capsys):
    """Its module is loaded as a server does it, and told of a cycle by the worker."""
    code = example_of(CycleObserver)
    (made,) = [node.name for node in ast.parse(code).body if isinstance(node, ast.ClassDef)]
    (tmp_path / "kept_tokens.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"kept_tokens:{made}"
    assert f"SGLANG_DFLASH_OBSERVERS={name}" in CycleObserver.__doc__
    monkeypatch.setenv("SGLANG_DFLASH_OBSERVERS", name)
    worker = SimpleNamespace(observers=observers_from_environment())
    layout = VerifyLayout(2, 8, np.array([7, 4]))
    accepted = accepted_blocks(torch.tensor([7, 0], dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int64))
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="a"), SimpleNamespace(rid="b")])
    DFlashWorker.notify(worker, "on_begun", batch)
    DFlashWorker.notify(worker, "on_accepted", batch, SimpleNamespace(layout=layout), accepted)
    assert capsys.readouterr().out.splitlines() == [
        "a: 7 of 7 drafted tokens accepted",
        "b: 0 of 4 drafted tokens accepted",
    ]


@pytest.fixture(scope="module")
def server(servers) -> Server:
    return servers.get(*FLOAT32, *dflash_arguments(), "--enable-metrics")


@pytest.mark.server
def test_openai_stream(server):
    output = run(sys.executable, EXAMPLES / "openai_stream.py", server.url)
    [(tokens, chunks)] = re.findall(r"^(\d+) tokens in (\d+) chunks$", output, re.MULTILINE)
    assert 1 < int(chunks) < int(tokens), (
        "a chunk holds what a verified block gave, so there are fewer chunks than tokens"
    )
    assert len(output.splitlines()) > 2  # the text itself


@pytest.mark.server
def test_acceptance(server):
    output = run(sys.executable, EXAMPLES / "acceptance.py", server.url)
    lengths = numbers(r"accept length ([\d.]+)", output)
    assert len(lengths) == 2 and all(1.0 < length <= BLOCK_SIZE for length in lengths), output
    shares = [
        list(map(float, line.partition(": ")[2].split()))
        for line in output.splitlines()
        if "position 1" in line
    ]
    assert len(shares) == 2 and len(shares[1]) == BLOCK_SIZE - 1, output
    assert all(row == sorted(row, reverse=True) and 0 < row[0] <= 1 for row in shares), output


@pytest.mark.server
def test_bench_serving(server, tmp_path):
    file = tmp_path / "figures.jsonl"
    output = run("bash", EXAMPLES / "bench_serving.sh", server.url, file)
    figures = json.loads(file.read_text())
    assert figures["completed"] == 16 and figures["total_output_tokens"] == 16 * 64
    assert 1.0 < figures["accept_length"] <= BLOCK_SIZE
    assert "Accept length:" in output


@pytest.mark.server
def test_speculators_checkpoint(servers):
    server = servers.get(*FLOAT32, "--model-path", str(SPECULATORS_DRAFT), environment=MEASURED_COSTS)
    if runtime.needs_stand_in():
        assert "DFLASH adaptive: widths [1, 2, 4, 8] measured" in server.log(), "the default on a CPU"
    output = run(sys.executable, EXAMPLES / "speculators_checkpoint.py", server.url)
    assert re.search(r"^target +\S*tiny-qwen3-code$", output, re.MULTILINE), output
    assert f"draft   {SPECULATORS_DRAFT}" in output
    assert f"num_draft_tokens {BLOCK_SIZE}, the library's speculative_tokens {BLOCK_SIZE - 1}" in output
    lengths = numbers(r"accept length ([\d.]+)", output)
    assert len(lengths) == 3 and all(1.0 < length <= BLOCK_SIZE for length in lengths), output


@pytest.mark.server
def test_peagle_checkpoint(servers):
    server = servers.get(*FLOAT32, "--model-path", str(PEAGLE_DRAFT))
    output = run(sys.executable, EXAMPLES / "peagle_checkpoint.py", server.url)
    assert f"draft {PEAGLE_DRAFT}, sample method greedy" in output
    greedy, *sampled = numbers(r"accept length ([\d.]+)", output)
    assert (
        len(sampled) == 2 and greedy > max(sampled) and all(1.0 <= length <= BLOCK_SIZE for length in sampled)
    ), output
