"""LoRA on the target: base and two adapters in one batch, with drafts for each.

Every token must be the best one of a Hugging Face model with that adapter merged into its weights.
"""

import json

import pytest
import torch
from safetensors.torch import save_file
from serving import TARGET, dflash_arguments, heldout_prompts
from support.parity import FLOAT32_TIE
from support.scheduled import Job, run
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
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def deltas(model) -> dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Return A [r, in] and B [out, r] of each adapter's modules."""
    found: dict = {}
    for seed, adapter in enumerate(ADAPTERS[1:]):
        generator = torch.Generator().manual_seed(seed)
        found[adapter] = {}
        for layer in range(model.config.num_hidden_layers):
            for name in MODULES:
                weight = model.get_submodule(f"model.layers.{layer}.{name}").weight
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


@torch.no_grad()
def assert_merged(model, modules, jobs, answers) -> None:
    """Compare answers with the model that has the adapter's product added to its weights."""
    for sign in (1, -1):
        for name, (a, b) in modules.items():
            model.get_submodule(name).weight += sign * ALPHA / RANK * (b @ a)
        if sign == -1:
            return
        for job, answer in zip(jobs, answers, strict=True):
            ids = torch.tensor([[*job.input_ids, *answer.output_ids]])
            logits = model(ids).logits[0, len(job.input_ids) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0]
            behind = (logits.amax(dim=-1) - chosen).max()
            assert behind < FLOAT32_TIE * 10, f"{job.adapter}: not the merged model's token, by {behind:.2g}"


def test_base_and_adapters_in_one_batch(model, deltas, folders):
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
        assert_merged(model, deltas.get(adapter, {}), jobs, got)
        assert sum(sum(answer.accepted) for answer in got) > 0, f"{adapter}: no drafted token was accepted"
    pairs = list(zip(answers[0], answers[1], strict=True))
    assert sum(one.output_ids != other.output_ids for one, other in pairs) >= 4, "the adapters change little"
    # Other prompts of the same adapter may begin alike.
    cached = [other.cached_tokens for _, other in pairs]
    assert max(cached) < 10, f"another adapter's prefix came from the cache: {cached}"
    assert [answer.output_ids for answer in answers[2]] == [answer.output_ids for answer in answers[1]]
    assert all(answer.cached_tokens > 10 for answer in answers[2])
