"""A tiny random checkpoint of each target family, written by Hugging Face's classes.

Each comes with its answers and hidden states.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from serving import PEAGLE_DRAFT
from support.dflash2_cases import OPTIONS as DFLASH2_OPTIONS
from support.dflash2_cases import random_dflash2_weights
from support.draft_cases import BASE
from support.drafts import as_deepseek, random_peagle_weights, random_weights, read_config, write_checkpoint

VOCAB, HIDDEN, LAYERS = 1100, 64, 6
# Layers that a draft reads and that are compared with Hugging Face's: neither first, last nor adjacent.
LAYER_IDS = (1, 2, 4)

_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
# SGLang rounds a width up to 32 on a CPU, and not all of its loaders pad.
_MOE = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_SHARED_EXPERT = {**_MOE, "num_experts": 4, "shared_expert_intermediate_size": 32}
_MLA = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "out_hidden_size": HIDDEN,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 2, 3, 4, 5
_QWEN3_VL = {
    "vision_config": _QWEN3_VISION,
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VIDEO_TOKEN,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}
# As published: its text layers get no features of the vision tower's inner layers.
_QWEN3_5 = _QWEN3_VL | {"vision_config": _QWEN3_VISION | {"deepstack_visual_indexes": []}}
_HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * (LAYERS // 3),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_SHORT_CONV = {
    "layer_types": ["conv", "conv", "full_attention"] * (LAYERS // 3),
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
}
# SGLang reads these fields, which transformers no longer has.
_HYBRID_FIELDS = {
    "full_attention_interval": 3,
    "partial_rotary_factor": 0.5,
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
}
_IN_TEXT_CONFIG = {"text_config": _HYBRID_FIELDS}
_MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 3, 3],
    "mrope_interleaved": True,
}
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}


# Of captured states, relative to the largest: two float32 implementations, a few layers.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Family:
    """One family of targets.

    config: of the text model, beside what all share; written: what else SGLang needs in config.json; adjust:
    of the weights; rewrite: of the checkpoint's tensors to what published ones hold; around: of the config
    around the text model's.
    """

    architecture: str
    config: dict = field(default_factory=dict)
    written: dict = field(default_factory=dict)
    adjust: Callable | None = None
    rewrite: Callable[[dict], dict] | None = None
    around: dict | None = None

    def build_config(self, **changes):
        name = self.architecture.partition("For")[0]
        text_class = getattr(transformers, f"{name}TextConfig", None) or getattr(
            transformers, f"{name}Config"
        )
        config = text_class(**{**_SHARED, **self.config, **changes})
        if self.around is None:
            return config
        whole_class, is_tied = getattr(transformers, f"{name}Config"), config.tie_word_embeddings
        return whole_class(text_config=config.to_dict(), tie_word_embeddings=is_tied, **self.around)


def _loud_sinks(model) -> None:
    """Return sinks that matter; SGLang keeps them in bfloat16, whatever the model's dtype."""
    for layer in model.model.layers:
        layer.self_attn.sinks.data = layer.self_attn.sinks.data.normal_(std=2.0).bfloat16().float()


def _quiet_embedding(model) -> None:
    """Scale down an embedding that is tied and scaled up by the square root of the width.

    It would drown the layers: every answer would be its prompt's last token.
    """
    model.get_input_embeddings().weight.data.mul_(0.1)


def _experts_as_published(tensors: dict) -> dict:
    """Store experts with inputs first, as they were saved before transformers 5."""
    return {name: t.transpose(1, 2) if ".experts." in name else t for name, t in tensors.items()}


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA4 = {
    **_WINDOWS,
    "tie_word_embeddings": True,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": VOCAB,
    "pad_token_id": 0,
}
# Published configs have these fields, transformers no longer does.
_ROUTING = {"moe_layer_freq": 1}
_DEEPSEEK = {**_MOE, **_MLA, **_ROUTED, "rope_parameters": _YARN}

FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3ForCausalLM"),
    "qwen3-moe": Family("Qwen3MoeForCausalLM", {**_MOE, "num_experts": 4}, {"num_experts": 4}),
    "glm4-moe": Family("Glm4MoeForCausalLM", {**_MOE, **_ROUTED}),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        {**_MOE, **_WINDOWS, "num_local_experts": 4, "intermediate_size": 64},
        adjust=_loud_sinks,
    ),
    # As the small published ones: embeddings per layer, the last layers reading keys and values of earlier
    # ones.
    "gemma4": Family(
        "Gemma4ForConditionalGeneration",
        {**_GEMMA4, "global_head_dim": 32, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
        adjust=_quiet_embedding,
        around={"vision_config": _GEMMA4_VISION},
    ),
    # SGLang reads heads of two widths in the class above only.
    "gemma4-text": Family(
        "Gemma4ForCausalLM",
        {**_GEMMA4, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        {"swa_num_key_value_heads": 2, "swa_head_dim": 16},
        adjust=_quiet_embedding,
    ),
    "deepseek-v2": Family(
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "q_lora_rank": None},
        _ROUTING | {"topk_method": "greedy", "scoring_func": "softmax"},
    ),
    "qwen3-vl": Family("Qwen3VLForConditionalGeneration", {"rope_parameters": _MROPE}, around=_QWEN3_VL),
    "qwen3-vl-moe": Family(
        "Qwen3VLMoeForConditionalGeneration",
        {**_MOE, "num_experts": 4, "rope_parameters": _MROPE},
        rewrite=_experts_as_published,
        around=_QWEN3_VL,
    ),
    # SGLang keeps the convolution's state in bfloat16, whatever the model's dtype, unless the environment
    # says otherwise.
    "qwen3.5": Family("Qwen3_5ForConditionalGeneration", _HYBRID, _IN_TEXT_CONFIG, around=_QWEN3_5),
    "qwen3.5-text": Family("Qwen3_5ForCausalLM", _HYBRID, _HYBRID_FIELDS),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeForConditionalGeneration", {**_HYBRID, **_SHARED_EXPERT}, _IN_TEXT_CONFIG, around=_QWEN3_5
    ),
    "qwen3-next": Family(
        "Qwen3NextForCausalLM", {**_HYBRID, **_SHARED_EXPERT, "rope_parameters": _HALF_ROTARY}, _HYBRID_FIELDS
    ),
    "lfm2": Family("Lfm2ForCausalLM", _SHORT_CONV),
    "lfm2-moe": Family(
        "Lfm2MoeForCausalLM", {**_SHORT_CONV, **_MOE, "num_experts": 4, "num_dense_layers": 1}
    ),
    "llama": Family("LlamaForCausalLM"),
    "llama3": Family("LlamaForCausalLM", {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": Family("MistralForCausalLM", {"sliding_window": None}),
    "ministral3": Family("Ministral3ForCausalLM"),
    "phi3": Family("Phi3ForCausalLM"),
    "deepseek-v3": Family(
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, "q_lora_rank": 24},
        _ROUTING | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
}


def vision_kinds(ids: Sequence[int]) -> torch.Tensor:
    """Return [1, n]: 1 at tokens of an image, 2 at tokens of a video."""
    tokens = torch.tensor([list(ids)])
    return (tokens == IMAGE_TOKEN).int() + 2 * (tokens == VIDEO_TOKEN).int()


@dataclass
class Target:
    """A family's checkpoint and the model it was written from."""

    family: Family
    path: Path
    model: torch.nn.Module

    @torch.no_grad()
    def answer(self, prompt: Sequence[int], length: int, **pictures) -> tuple[list[int], list[float]]:
        """Return the greedy continuation, and each token's lead, in logits, over the next best."""
        ids, leads = list(prompt), []
        for _ in range(length):
            if pictures:
                pictures["mm_token_type_ids"] = vision_kinds(ids)
            best = self.model(torch.tensor([ids]), **pictures).logits[0, -1].topk(2)
            ids.append(int(best.indices[0]))
            leads.append(float(best.values[0] - best.values[1]))
        return ids[len(prompt) :], leads

    @torch.no_grad()
    def hidden_states(self, ids: Sequence[int]) -> torch.Tensor:
        """Return [num_layers + 1, len(ids), hidden]: the embedding, then every layer's output.

        The last output is normed.
        """
        return torch.cat(self.model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states)


def write_target(name: str, folder: Path, **changes) -> Target:
    """Write a random target; `changes` are to the config of its text model."""
    family = FAMILIES[name]
    config = family.build_config(**changes)
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, family.architecture)(config).float().eval()
    generator = torch.Generator().manual_seed(5)
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in parameter_name:  # shows a norm that is left out or applied twice
            parameter.data.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    if family.adjust is not None:
        family.adjust(model)
    model.save_pretrained(folder)
    if family.rewrite is not None:
        weights = folder / "model.safetensors"
        tensors = family.rewrite(load_file(weights))
        save_file({name: t.contiguous() for name, t in tensors.items()}, weights, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(_merged(json.loads(path.read_text()), family.written)))
    return Target(family, folder, model)


def lengthen_memory(folder: Path) -> None:
    """Set a GatedDeltaNet checkpoint's decays close to one: a state remembers hundreds of tokens."""
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if name.endswith("A_log"):
            rates = torch.rand(tensor.shape, generator=generator) * 0.02 + 0.0005
            weights[name] = rates.log().to(tensor.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def copy_with_long_memory(checkpoint: Path, folder: Path) -> Path:
    """Copy a GatedDeltaNet checkpoint, lengthen its memory, and return the copy."""
    shutil.copytree(checkpoint, folder)
    lengthen_memory(folder)
    return folder


def _merged(config: dict, changes: dict) -> dict:
    """Return a config with changes, merged into inner dicts."""
    inner = {key: _merged(config[key], value) for key, value in changes.items() if isinstance(value, dict)}
    return config | changes | inner


def _draft_config(vocab: int) -> dict:
    return {
        **BASE,
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_target_layers": LAYERS,
        "block_size": 8,
        "dflash_config": {"mask_token_id": min(7, vocab - 1), "target_layer_ids": list(LAYER_IDS)},
    }


def write_draft(folder: Path, vocab: int = VOCAB) -> Path:
    """Write a random DFlash draft for any of the targets."""
    config = _draft_config(vocab)
    return write_checkpoint(folder, config, random_weights(config, len(LAYER_IDS)))


def write_deepseek_draft(folder: Path, vocab: int = VOCAB) -> Path:
    """Write a random draft with the config of DeepSeek's block-7 drafts for any of the targets."""
    config = _draft_config(vocab)
    return write_checkpoint(folder, as_deepseek(config), random_weights(config, len(LAYER_IDS)))


def write_dflash2_draft(folder: Path, vocab: int = VOCAB) -> Path:
    """Write a random DFlash2 draft for any of the targets."""
    config = _draft_config(vocab) | {"architectures": ["DFlash2DraftModel"]}
    config["dflash_config"] |= DFLASH2_OPTIONS
    return write_checkpoint(folder, config, random_dflash2_weights(config, len(LAYER_IDS)))


def write_peagle_draft(folder: Path, vocab: int = VOCAB, tokens: int = 500) -> Path:
    """Write a random one-layer P-EAGLE draft, with a window and a reduced vocabulary."""
    config = read_config(PEAGLE_DRAFT)
    config |= {
        "draft_vocab_size": tokens,
        "mask_token_id": min(7, vocab - 1),
        # The library counts layers from the embedding.
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in LAYER_IDS],
    }
    config["transformer_layer_config"] |= {
        "hidden_size": HIDDEN,
        "vocab_size": vocab,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "layer_types": ["sliding_attention"],
        "sliding_window": 12,
        "max_position_embeddings": 256,
    }
    weights = random_peagle_weights(config["transformer_layer_config"], len(LAYER_IDS), tokens)
    weights["d2t"] = torch.arange(tokens)  # token i of the draft is token 2 i of the target
    return write_checkpoint(folder, config, weights)
