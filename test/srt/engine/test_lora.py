"""LoRA on the target: base and two adapters in one batch, with drafts for each.

The answers are those of plain SGLang with that adapter merged into the weights.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import TARGET, dflash_arguments, heldout_prompts
from support.parity import FLOAT32_TIE, first_difference
from support.scheduled import Answer, Job, run
from support.servers import FLOAT32, patched
from tokenizers import Tokenizer

from sglang_dflash.srt.hardware_backend.cpu import runtime

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not runtime.needs_stand_in(), reason="SGLang's LoRA backend of a CPU"),
]

RANK, ALPHA, NEW = 4, 8, 32
MODULES = (*(f"self_attn.{name}_proj" for name in "qkvo"), "mlp.down_proj")
ADAPTERS = (None, "first", "second")


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Return the target's, in float32."""
    return {name: tensor.float() for name, tensor in load_file(TARGET / "model.safetensors").items()}


@pytest.fixture(scope="module")
def deltas(weights) -> dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Return A [r, in] and B [out, r] of each adapter's modules."""
    num_layers = json.loads((TARGET / "config.json").read_text())["num_hidden_layers"]
    found: dict = {}
    for seed, adapter in enumerate(ADAPTERS[1:]):
        generator = torch.Generator().manual_seed(seed)
        found[adapter] = {}
        for layer in range(num_layers):
            for name in MODULES:
                weight = weights[f"model.layers.{layer}.{name}.weight"]
                parts = [
                    torch.randn(n, generator=generator)
                    for n in ((RANK, weight.shape[1]), (weight.shape[0], RANK))
                ]
                size = 0.2 * weight.std() / (ALPHA / RANK * RANK**0.5)
                found[adapter][f"model.layers.{layer}.{name}"] = parts[0], parts[1] * size
    return found


@pytest.fixture(scope="module")
def folders(deltas, tmp_path_factory) -> dict[str, str]:
    found = {}
    for adapter, modules in deltas.items():
        folder = tmp_path_factory.mktemp(adapter)
        tensors = {}
        for name, (a, b) in modules.items():
            tensors[f"base_model.model.{name}.lora_A.weight"] = a
            tensors[f"base_model.model.{name}.lora_B.weight"] = b
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": ALPHA,
            "bias": "none",
            "base_model_name_or_path": str(TARGET),
            "target_modules": sorted({name.rpartition(".")[2] for name in MODULES}),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config))
        found[adapter] = str(folder)
    return found


@pytest.fixture(scope="module")
def merged(weights, deltas, tmp_path_factory) -> dict[str | None, Path]:
    """Return a checkpoint per adapter, with its product added to the weights."""
    found: dict[str | None, Path] = {None: TARGET}
    for adapter, modules in deltas.items():
        folder = found[adapter] = tmp_path_factory.mktemp(f"{adapter}-merged")
        for path in TARGET.glob("*.json"):
            shutil.copy(path, folder)
        tensors = dict(weights)
        for name, (a, b) in modules.items():
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + ALPHA / RANK * (b @ a)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return found


def assert_same_ids(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Compare output ids, up to a tie of the expected ones."""
    for got, wanted in zip(answers, expected, strict=True):
        position = first_difference(got.output_ids, wanted.output_ids)
        if position is not None:
            assert wanted.gaps[position] < 10 * FLOAT32_TIE, (position, got, wanted)


def test_base_and_adapters_in_one_batch(folders, merged):
    """Then the same prompts under other adapters, whose prefix must not come from the cache, and again."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [
        tuple(tokenizer.encode(p["text"]).ids) for p in heldout_prompts() if 20 <= p["num_tokens"] <= 90
    ][:6]

    def batch(shift: int) -> list[Job]:
        return [
            Job(prompt, NEW, step=number // 3, adapter=ADAPTERS[(number + shift) % 3])
            for number, prompt in enumerate(prompts)
        ]

    groups = [batch(0), batch(1), batch(1)]
    paths = [f"{name}={path}" for name, path in folders.items()]
    arguments = ["--model-path", TARGET, *FLOAT32, *dflash_arguments(), "--lora-backend", "torch_native"]
    answers = run([*arguments, "--lora-paths", *paths], groups, environment=patched("lora_on_cpu"))
    everything = list(zip(sum(groups, []), sum(answers, []), strict=True))
    for adapter in ADAPTERS:
        jobs, got = zip(*((job, answer) for job, answer in everything if job.adapter == adapter), strict=True)
        assert sum(sum(answer.accepted) for answer in got) > 0, f"{adapter}: no drafted token was accepted"
        plain = ["--model-path", merged[adapter], *FLOAT32]
        [expected] = run(plain, [[replace(job, adapter=None, logprobs=True) for job in jobs]])
        assert_same_ids(got, expected)
    pairs = list(zip(answers[0], answers[1], strict=True))
    assert sum(one.output_ids != other.output_ids for one, other in pairs) >= 4, "the adapters change little"
    # Other prompts of the same adapter may have the same beginning.
    cached = [other.cached_tokens for _, other in pairs]
    assert max(cached) < 10, f"another adapter's prefix came from the cache: {cached}"
    assert [answer.output_ids for answer in answers[2]] == [answer.output_ids for answer in answers[1]]
    assert all(answer.cached_tokens > 10 for answer in answers[2])
