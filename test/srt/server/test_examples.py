"""The examples that need a server of their own: an agent with tools, and weights that are updated."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import DRAFT, ROOT, TARGET, Server, dflash_arguments
from support.servers import FLOAT32

pytestmark = pytest.mark.server


def run(name: str, *arguments: str | Path) -> str:
    command = [sys.executable, ROOT / "examples" / name, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server(servers) -> Server:
    flags = "--tool-call-parser", "hermes", "--no-speculative-adaptive"
    return servers.get(*FLOAT32, *dflash_arguments(), *flags)


def test_agent_tools(server):
    """A call arrives whole from pieces, and its result goes into the next turn."""
    output = run("agent_tools.py", server.url)
    stock = {"apples": 12, "pears": 0, "plums": 30}
    calls = re.findall(r'count_stock\({"fruit": ?"(\w+)"}\) = (\d+)', output)
    assert calls and all(int(result) == stock[fruit] for fruit, result in calls), output
    assert output.rpartition(" = ")[2].strip("0123456789\n"), "the answer after the calls"


def test_rl_weights(server, tmp_path):
    """A target with noise on its weights agrees less with the draft; its own weights bring that back."""
    shutil.copytree(TARGET, tmp_path / "noisy")
    file = tmp_path / "noisy" / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "down_proj" in name:
            noise = torch.randn(tensor.shape, generator=generator) * 4 * tensor.float().std()
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(tensors, file, metadata={"format": "pt"})

    def tokens_a_cycle(*checkpoints: Path) -> list[float]:
        return [*map(float, re.findall(r"([\d.]+) a cycle", run("rl_weights.py", server.url, *checkpoints)))]

    before, after = tokens_a_cycle(tmp_path / "noisy")
    noisy, restored, same_draft = tokens_a_cycle(TARGET, DRAFT)
    assert max(after, noisy) < 0.9 * min(before, restored, same_draft)
