"""The documented commands run as written: README, pages under docs/, docstrings. So do the examples.

A server's command line goes through SGLang's own arguments up to the start of processes. Requests run against
a server. Other programs know the flags. Nothing runs what needs a network or another library's environment.
"""

import ast
import doctest
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import quiet_start
import torch
from prometheus_client import CollectorRegistry, generate_latest
from safetensors.torch import load_file, save_file
from serving import DRAFT, PEAGLE_DRAFT, ROOT, SPECULATORS_DRAFT, TARGET, dflash_arguments
from sglang.srt.observability import metrics_collector
from support.decisions import accepted_blocks
from support.documented import (
    PAGES,
    URL,
    Command,
    blocks,
    commands,
    defined_flags,
    is_server,
    server_arguments,
)
from support.servers import FLOAT32, run_to_end

from sglang_dflash import doctor
from sglang_dflash.srt.hardware_backend.cpu import runtime
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.caps import requested_caps
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout
from sglang_dflash.srt.speculative.cycle.observer import CycleObserver, observers_from_environment
from sglang_dflash.srt.speculative.dflash_worker import DFlashWorker
from sglang_dflash.srt.speculative.width.settings import lens_to_verify, parse_steps

COMMANDS = list(dict.fromkeys(commands()))
SERVERS = [command for command in COMMANDS if is_server(command)]
REQUESTS = [command for command in COMMANDS if command.words[0] == "curl"]
# They need a network, or an environment of another library.
NOT_RUN = (
    *("git clone", "pip install", "python -m venv clients", "clients/bin/pip install"),
    *("clients/bin/guidellm run", "clients/bin/aiperf profile", "spec/bin/", "(cd models"),
)
EXAMPLES = ROOT / "examples"
SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct"
HAS_SMOLLM2 = SMOLLM2.is_dir() and any(
    SMOLLM2.with_name(f"{SMOLLM2.name}-{kind}").is_dir() for kind in ("dflash", "dflash2")
)
# Resolves every list of server arguments as launch_server does, each in a fork of a process with SGLang.
RESOLVE = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
os.chdir(sys.argv[2])
import sglang.srt.arg_groups.pipeline, sglang.srt.configs.model_config, sglang.srt.utils.hf_transformers_utils
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.server_args import prepare_server_args
for arguments in json.load(open(sys.argv[1])):
    child = os.fork()
    if child == 0:
        try:
            args = prepare_server_args(arguments)
            args.resolve_once()
            view = resolved_view(args)
            found = [view.speculative_algorithm, view.speculative_num_draft_tokens, view.sleep_on_idle]
        except BaseException as error:
            found = [repr(error)]
        print("RESOLVED", json.dumps(found), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command as a user does; return what it printed."""
    # `make test` sets the variables of `make` that its recipes read.
    theirs = ("MAKE", "MFLAGS", "ARGS", "WORKERS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    environment |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=300, cwd=cwd, env=environment
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def files_of(command: Command) -> list[Path]:
    """Return the files that define a command's flags."""
    match command.words:
        case ["python", "-m", "sglang_dflash.doctor", *_]:
            return [Path(doctor.__file__)]
        case ["python", "-m", "sglang.benchmark.serving" | "sglang.test.run_eval" as module, *_]:
            return [Path(importlib.util.find_spec(module).origin)]
        case ["python", "tools/sglang_diff", *_]:
            return [ROOT / "tools" / "sglang_diff" / "__main__.py"]
        case ["python" | "bash", script, *_] if (ROOT / script).is_file():
            return [ROOT / script]
    raise AssertionError(f"no test knows {command}")


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_exists_and_knows_its_flags(command):
    if command in SERVERS + REQUESTS or command.text.startswith(NOT_RUN):
        return  # tested below, or not at all
    if command.words[0] == "make":  # a Python given is one that make need not look for
        assert run("make", "--dry-run", "PYTHON=python3", *command.words[1:])
    else:
        files = [file for file in files_of(command) if file.suffix == ".py"]
        assert set(command.flags) <= set().union(*map(defined_flags, files))


def make_serve() -> list[str]:
    """Return the server arguments of `make serve`."""
    output = run("make", "--dry-run", "PYTHON=python3", "serve")
    (serve,) = [line for line in output.splitlines() if "sglang.launch_server" in line]
    return serve.split()[4:]


def test_server_commands_resolve_to_dflash(tmp_path):
    assert len(SERVERS) > 5 and REQUESTS, "are commands still recognised?"
    texts = [*(command.text for command in SERVERS), "make serve"]
    file = tmp_path / "arguments.json"
    file.write_text(json.dumps([*map(server_arguments, SERVERS), make_serve()]))
    done = run_to_end("-c", RESOLVE, file, ROOT)
    found = [json.loads(line.partition(" ")[2]) for line in done.output.splitlines() if "RESOLVED" in line]
    given = [re.search(r"--speculative-num-draft-tokens (\d+)", text) for text in texts]
    sleeps = runtime.needs_stand_in()  # an idle scheduler takes no core of a CPU
    wanted = [["DFLASH", int(number.group(1)) if number else 8, sleeps] for number in given]
    assert dict(zip(texts, found, strict=True)) == dict(zip(texts, wanted)), done.output[-4000:]


def answer(command: Command, url: str) -> str:
    """Run a curl command against another server; return the text of its answer, streamed or not."""
    output = run(*(word.replace(URL, url) for word in command.words), "--silent", "--fail")
    if not output.startswith("data: "):
        return json.loads(output)["choices"][0]["text"]
    *events, end = [line.removeprefix("data: ") for line in output.splitlines() if line]
    assert end == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)


@pytest.mark.server
@pytest.mark.skipif(not HAS_SMOLLM2, reason="SmolLM2-135M-Instruct or its draft is not there: make model")
def test_the_first_answer(servers):
    """`make serve` answers the README's request as the README says, by DFLASH."""
    server = servers.get(*(ROOT / word if "/" in word else word for word in make_serve()))
    (first,) = [command for command in REQUESTS if command.where == "README.md"]
    assert answer(first, server.url) == "The capital of France is Paris."
    log = server.log()
    assert "sglang-dflash DFlashWorker" in log
    # A fork has chosen the CPU before the log begins, and tests ask whether it is ready.
    lines = [line for line in log.splitlines(keepends=True) if "GET /health" not in line]
    lines.insert(0, f"{quiet_start.ON_CPU}\n")
    shown = [line[:200] for line in quiet_start.shown(lines, [])]
    [last] = [number for number, line in enumerate(shown, 1) if "avg_spec_accept_length" in line]
    assert last <= 40, "".join(shown)


PAIR = (*dflash_arguments(), "--enable-metrics", "--context-length", "256")


@pytest.mark.server
def test_requests_are_answered(servers):
    """The README's question has no limit: the bundled target answers up to the end of the context."""
    server = servers.get(*FLOAT32, *PAIR)
    for command in REQUESTS:
        assert answer(command, server.url).strip(), command
    [client] = [text for page in PAGES for kind, text in blocks(page) if kind == "python" and URL in text]
    assert run(sys.executable, "-c", client.replace(URL, server.url)).strip()


# example -> (server, what it prints). offline_engine.py starts an engine itself: test_stock_sglang.py.
RUNS = {
    "openai_stream.py": (PAIR, [r"^\d+ tokens in \d+ chunks$"]),
    "acceptance.py": (PAIR, [r"accept length [2-8]\.", r"position 1"]),
    "bench_serving.sh": (PAIR, [r"Successful requests: +16", r"Accept length: +[2-8]\."]),
    "speculators_checkpoint.py": (
        ("--model-path", str(SPECULATORS_DRAFT)),
        [r"^target +\S*tiny-qwen3-code$", "num_draft_tokens 8, .* 7$", r"accept length [1-8]\."],
    ),
    "peagle_checkpoint.py": (
        ("--model-path", str(PEAGLE_DRAFT)),
        ["sample method greedy", r"accept length [2-8]\."],
    ),
}


# SGLang's load generator imports all of SGLang anew. Another checkpoint is served by itself in every run.
LONG_RUNS = ("bench_serving.sh", "peagle_checkpoint.py")


@pytest.mark.server
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG_RUNS)) for name in RUNS]
)
def test_an_example_runs(name, servers, tmp_path):
    arguments, patterns = RUNS[name]
    server = servers.get(*FLOAT32, *arguments)
    file = [tmp_path / "figures.jsonl"] if name.endswith(".sh") else []
    output = run("bash" if file else sys.executable, EXAMPLES / name, server.url, *file)
    assert all(re.search(pattern, output, re.MULTILINE) for pattern in patterns), output


AGENT = (*dflash_arguments(), "--tool-call-parser", "hermes", "--no-speculative-adaptive")


@pytest.mark.server
def test_agent_tools(servers):
    """A call arrives whole from pieces, and its result goes into the next turn."""
    url = servers.get(*FLOAT32, *AGENT).url
    output = run(sys.executable, EXAMPLES / "agent_tools.py", url)
    stock = {"apples": 12, "pears": 0, "plums": 30}
    calls = re.findall(r'count_stock\({"fruit": ?"(\w+)"}\) = (\d+)', output)
    assert calls and all(int(result) == stock[fruit] for fruit, result in calls), output
    assert output.rpartition(" = ")[2].strip("0123456789\n"), "the answer after the calls"


@pytest.mark.server
def test_rl_weights(servers, tmp_path):
    """A target with noise on its weights agrees less with the draft; its own weights bring that back."""
    shutil.copytree(TARGET, tmp_path / "noisy")
    file = tmp_path / "noisy" / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "down_proj" in name:
            noise = torch.randn(tensor.shape, generator=generator) * 4 * tensor.float().std()
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})

    url = servers.get(*FLOAT32, *AGENT).url

    def tokens_a_cycle(*checkpoints: Path) -> list[float]:
        output = run(sys.executable, EXAMPLES / "rl_weights.py", url, *checkpoints)
        return [*map(float, re.findall(r"([\d.]+) a cycle", output))]

    before, after = tokens_a_cycle(tmp_path / "noisy")
    noisy, restored, same_draft = tokens_a_cycle(TARGET, DRAFT)
    assert max(after, noisy) < 0.9 * min(before, restored, same_draft)


def test_every_example_is_tested_and_listed():
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    assert files == {*RUNS, "agent_tools.py", "rl_weights.py", "offline_engine.py"}
    assert files == set(re.findall(r"^\| `([\w.]+)` \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE))


def example_of(documented: object) -> str:
    """Return the code of a docstring's example: the indented lines that follow each `::`."""
    _, heading, text = inspect.getdoc(documented).partition("\nExample:\n")
    assert heading, documented
    return textwrap.dedent("".join(re.findall(r"::\n\n((?: {8}.*\n|\n)+)", f"{text}\n")))


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
    assert f"SGLANG_DFLASH_OBSERVERS=kept_tokens:{made}" in CycleObserver.__doc__
    monkeypatch.setenv("SGLANG_DFLASH_OBSERVERS", f"kept_tokens:{made}")
    worker = SimpleNamespace(observers=observers_from_environment())
    accepted = accepted_blocks(torch.tensor([7, 0], dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int64))
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="a"), SimpleNamespace(rid="b")])
    cycle = SimpleNamespace(layout=VerifyLayout(2, 8, np.array([7, 4])))
    DFlashWorker.notify(worker, "on_begun", batch)
    DFlashWorker.notify(worker, "on_accepted", batch, cycle, accepted)
    assert capsys.readouterr().out.splitlines() == [
        "a: 7 of 7 drafted tokens accepted",
        "b: 0 of 4 drafted tokens accepted",
    ]


def test_settings_and_metrics_in_the_text_exist(monkeypatch):
    settings = [text for page in PAGES for kind, text in blocks(page) if kind == "json"]
    assert settings
    for text in settings:
        assert lens_to_verify(parse_steps(text), 8) == (1, 4, 8)
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    DFlashMetrics(7, {"model_name": "tiny"})
    sglangs = Path(metrics_collector.__file__).read_text()
    existing = set(re.findall(r"sglang:spec_\w+", generate_latest(registry).decode() + sglangs))
    named = {name for page in PAGES for name in re.findall(r"sglang:spec_\w+", page.read_text())}
    assert named and named <= existing
