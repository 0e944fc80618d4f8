"""Untrained drafts: random, always wrong, or with a config that must be refused."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from serving import DRAFT, TARGET

REMOVE = object()


def read_config(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "config.json").read_text())


def write_checkpoint(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_draft(
    folder: Path, weights: Callable[[dict], dict] | None = None, base: Path = DRAFT, **changes: object
) -> Path:
    """Copy a checkpoint with changed config and tensors.

    changes: fields of the config; REMOVE deletes a key, and a dict is merged into the key's dict. weights:
    maps the tensors.
    """
    config, tensors = read_config(base), load_file(base / "model.safetensors")
    _change(config, changes)
    return write_checkpoint(folder, config, tensors if weights is None else weights(tensors))


def as_deepseek(config: dict) -> dict:
    """Return a DFlash config as DeepSpec writes one of a draft without heads, with a block of 7."""
    nested = config["dflash_config"]
    kept = {name: value for name, value in config.items() if name != "dflash_config"}
    return kept | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": 7,
        "mask_token_id": nested["mask_token_id"],
        "target_layer_ids": nested["target_layer_ids"],
        "num_anchors": 512,
        "markov_rank": 0,
        "enable_confidence_head": False,
    }


def make_deepseek_draft(folder: Path) -> Path:
    """Write the bundled draft in DeepSpec's format, with the target's embedding and head in it."""
    target = load_file(TARGET / "model.safetensors")
    embedding = target["model.embed_tokens.weight"]
    tensors = load_file(DRAFT / "model.safetensors") | {
        "embed_tokens.weight": embedding,
        "lm_head.weight": target.get("lm_head.weight", embedding).clone(),
    }
    return write_checkpoint(folder, as_deepseek(read_config(DRAFT)), tensors)


def always_wrong(folder: Path) -> Path:
    """Negate the trained draft's last norm: every logit changes sign.

    It then proposes its LEAST likely token. A poor draft may hit the target's choice once in a thousand.
    """
    return make_draft(folder, lambda tensors: {**tensors, "norm.weight": -tensors["norm.weight"]})


def random_weights(config: dict, num_aux: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors, scaled so that every part of the model matters.

    Norms are away from 1, biases away from 0.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns):
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def around_one(size):
        return 1 + 0.3 * torch.randn(size, generator=generator)

    hidden, head_dim = config["hidden_size"], config["head_dim"]
    sizes = {"q": config["num_attention_heads"] * head_dim}
    sizes["k"] = sizes["v"] = config["num_key_value_heads"] * head_dim
    weights = {
        "fc.weight": matrix(hidden, num_aux * hidden),
        "hidden_norm.weight": around_one(hidden),
        "norm.weight": around_one(hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        for part, size in sizes.items():
            weights[f"{layer}.self_attn.{part}_proj.weight"] = matrix(size, hidden) * 2
            if config["attention_bias"]:
                weights[f"{layer}.self_attn.{part}_proj.bias"] = torch.randn(size, generator=generator)
        weights[f"{layer}.self_attn.o_proj.weight"] = matrix(hidden, sizes["q"])
        if config["attention_bias"]:
            weights[f"{layer}.self_attn.o_proj.bias"] = torch.randn(hidden, generator=generator)
        for part in ("q", "k"):
            weights[f"{layer}.self_attn.{part}_norm.weight"] = around_one(head_dim)
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{part}.weight"] = around_one(hidden)
        for part in ("gate", "up"):
            weights[f"{layer}.mlp.{part}_proj.weight"] = matrix(config["intermediate_size"], hidden)
        weights[f"{layer}.mlp.down_proj.weight"] = matrix(hidden, config["intermediate_size"])
    return weights


def random_peagle_weights(layers: dict, num_aux: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a P-EAGLE draft with a vocabulary of this size, all but `d2t`.

    layers: the config's `transformer_layer_config`.
    """
    weights, hidden = random_weights(layers, num_aux), layers["hidden_size"]
    generator = torch.Generator().manual_seed(3)
    weights["layers.0.hidden_norm.weight"] = weights.pop("hidden_norm.weight")
    for part in "qkv":  # the first layer reads two states of a row
        name = f"layers.0.self_attn.{part}_proj.weight"
        weights[name] = torch.randn(len(weights[name]), 2 * hidden, generator=generator) * hidden**-0.5
    weights["mask_hidden"] = torch.randn(1, 1, num_aux * hidden, generator=generator)
    weights["embed_tokens.weight"] = torch.randn(layers["vocab_size"], hidden, generator=generator)
    weights["lm_head.weight"] = torch.randn(tokens, hidden, generator=generator) * hidden**-0.5
    return weights


def _change(config: dict, changes: dict) -> None:
    for key, value in changes.items():
        if value is REMOVE:
            config.pop(key, None)
        elif isinstance(value, dict) and isinstance(config.get(key), dict):
            _change(config[key], value)
        else:
            config[key] = value
