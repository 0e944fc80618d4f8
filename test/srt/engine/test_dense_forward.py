"""The forward of dense models on a CPU computes what SGLang's layers compute, on SGLang's scheduler.

Every forward of a run is computed by both, in bfloat16. A residual or a norm at the wrong place would differ
by as much as the values; roundings make a few hundredths.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import DRAFT, TARGET, dflash_arguments
from support.families import VOCAB, write_draft, write_target
from support.scheduled import Job, run

from sglang_dflash.srt.hardware_backend.cpu import speedups

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not speedups.multiplies_bfloat16(), reason="this CPU does not multiply bfloat16"),
]

ROUNDING = 0.12  # 0.03 to 0.07 seen, the latter on a CPU with AMX
PROMPT = tuple(range(9, 60))
FLAGS = "--dtype", "bfloat16", "--max-total-tokens", "4096", "--skip-tokenizer-init"


class Both:
    """Computes every forward twice, and writes the largest relative difference per mode to a file."""

    def __init__(self, path: Path):
        self.path = path
        self.differences: dict[str, float] = {}

    def __call__(self, scheduler) -> None:
        """Register in the scheduler's process."""
        model = scheduler.tp_worker.model_runner.model.model
        assert "forward" in vars(model), "the model has SGLang's forward"
        ours = model.forward

        def forward(input_ids, positions, forward_batch, *more, **fields):
            wanted = type(model).forward(model, input_ids, positions, forward_batch, *more, **fields)
            found = ours(input_ids, positions, forward_batch, *more, **fields)
            self.compare(forward_batch.forward_mode.name, states(found), states(wanted))
            return found

        model.forward = forward

    def compare(self, mode: str, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            difference = float((one.float() - other.float()).norm() / other.float().norm())
            self.differences[mode] = max(difference, self.differences.get(mode, 0))
        self.path.write_text(json.dumps(self.differences))


class Errors(Both):
    """Compares both with Hugging Face's model in float32, at the first prompt."""

    def compare(self, mode: str, found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        if self.differences:
            return
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
        with torch.no_grad():
            exact = model.model(torch.tensor([PROMPT])).last_hidden_state[0]
        for name, [hidden] in (("ours", found), ("SGLang's", wanted)):
            self.differences[name] = float((hidden.float() - exact).norm() / exact.norm())
        self.path.write_text(json.dumps(self.differences))


def states(output) -> list[torch.Tensor]:
    """Return the hidden states after the last norm, and the captured ones."""
    hidden, captured = output if isinstance(output, tuple) else (output, [])
    return [hidden, *captured]


def assert_roundings(path: Path, modes: set[str]) -> None:
    differences = json.loads(path.read_text())
    assert differences.keys() == modes
    assert all(0 < difference < ROUNDING for difference in differences.values()), differences


def draw_biases(weights: Path) -> None:
    """Replace biases, which a random model has as zeros."""
    generator = torch.Generator().manual_seed(2)
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensors[name] = torch.randn(tensor.shape, generator=generator)
    save_file(tensors, weights, {"format": "pt"})


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_both_forwards_are_the_same(name, tmp_path):
    """Prompts, cycles of changing lengths and a cached prefix; the draft reads captured states."""
    target, draft = TARGET, DRAFT
    if name != "qwen3":
        target, draft = write_target(name, tmp_path / "target").path, write_draft(tmp_path / "draft")
        draw_biases(target / "model.safetensors")
    generator = random.Random(3)
    jobs = [
        Job(tuple(generator.randrange(8, VOCAB) for _ in range(length)), 24, step=step)
        for step, length in enumerate((3, 17, 40, 90))
    ]
    jobs.append(Job((*jobs[-1].input_ids[:80], 9), 24, step=20))
    run(["--model-path", target, *FLAGS, *dflash_arguments(draft)], [jobs], prepare=Both(tmp_path / "found"))
    assert_roundings(tmp_path / "found", {"EXTEND", "TARGET_VERIFY"})


def test_without_a_draft(tmp_path):
    run(
        ["--model-path", TARGET, *FLAGS],
        [[Job((9, 10, 11), 24), Job((12,) * 30, 24)]],
        environment={"SGLANG_DFLASH_CPU_LAYERS": "1"},
        prepare=Both(tmp_path / "found"),
    )
    assert_roundings(tmp_path / "found", {"EXTEND", "DECODE"})


def test_it_rounds_less_than_sglangs(tmp_path):
    run(
        ["--model-path", TARGET, *FLAGS],
        [[Job(PROMPT, 2)]],
        environment={"SGLANG_DFLASH_CPU_LAYERS": "1"},
        prepare=Errors(tmp_path / "found"),
    )
    errors = json.loads((tmp_path / "found").read_text())
    assert 0 < errors["ours"] < 0.9 * errors["SGLang's"], errors
