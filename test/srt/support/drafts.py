"""Untrained drafts: random, always wrong, or with a config that must be refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from serving import DRAFT, PEAGLE_DRAFT, TARGET

REMOVE = object()


def read_config(checkpoint: Path) -> dict:
    return json.loads((checkpoint / "config.json").read_text())


def make_draft(
    folder: Path, weights: Callable[[dict], dict] | None = None, base: Path = DRAFT, **changes: object
) -> Path:
    """Copy a checkpoint with changed config and tensors.

    changes: fields of the config; REMOVE deletes a key, and a dict is merged into the key's dict. weights:
    maps the tensors.
    """
    folder.mkdir(parents=True)
    config = read_config(base)
    _change(config, changes)
    (folder / "config.json").write_text(json.dumps(config))
    if weights is None:
        shutil.copy(base / "model.safetensors", folder / "model.safetensors")
    else:
        save_file(weights(load_file(base / "model.safetensors")), folder / "model.safetensors")
    return folder


def always_wrong(folder: Path) -> Path:
    """Negate the trained draft's last norm: every logit changes sign.

    It then proposes its LEAST likely token. A poor draft may hit the target's choice once in a thousand.
    """
    return make_draft(folder, lambda tensors: {**tensors, "norm.weight": -tensors["norm.weight"]})


def random_draft(folder: Path) -> Path:
    """Write a random draft in a shape the trained draft lacks.

    Attention bias, a sliding layer, fewer layers, more KV heads, and no target layer ids, which leaves them
    to z-lab's even spread.
    """
    hidden = read_config(TARGET)["hidden_size"]
    layers, heads, head_dim, inner = 2, 4, 32, 96
    generator = torch.Generator().manual_seed(11)

    def weights(_: dict) -> dict:
        shapes = {
            "fc.weight": (hidden, layers * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for i in range(layers):
            for name in "qkv":
                shapes[f"layers.{i}.self_attn.{name}_proj.weight"] = (heads * head_dim, hidden)
                shapes[f"layers.{i}.self_attn.{name}_proj.bias"] = (heads * head_dim,)
            shapes[f"layers.{i}.self_attn.o_proj.weight"] = (hidden, heads * head_dim)
            shapes[f"layers.{i}.self_attn.o_proj.bias"] = (hidden,)
            for name in "qk":
                shapes[f"layers.{i}.self_attn.{name}_norm.weight"] = (head_dim,)
            for name in ("gate", "up"):
                shapes[f"layers.{i}.mlp.{name}_proj.weight"] = (inner, hidden)
            shapes[f"layers.{i}.mlp.down_proj.weight"] = (hidden, inner)
            for name in ("input", "post_attention"):
                shapes[f"layers.{i}.{name}_layernorm.weight"] = (hidden,)
        scale = {1: 1.0, 2: 0.05}
        return {
            name: torch.randn(shape, generator=generator) * scale[len(shape)]
            for name, shape in shapes.items()
        }

    return make_draft(
        folder,
        weights,
        num_hidden_layers=layers,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=24,
        use_sliding_window=True,
        max_window_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        intermediate_size=inner,
        attention_bias=True,
        dflash_config={"target_layer_ids": REMOVE},
    )


def _change(config: dict, changes: dict) -> None:
    for key, value in changes.items():
        if value is REMOVE:
            config.pop(key, None)
        elif isinstance(value, dict) and isinstance(config.get(key), dict):
            _change(config[key], value)
        else:
            config[key] = value


def random_peagle_draft(folder: Path, target: Path, layers: tuple[int, ...]) -> Path:
    """Write a random draft in the bundled P-EAGLE draft's shape, for another target.

    The hidden size and the sizes of its layers are that target's.
    """
    hidden, old = (
        read_config(target)["hidden_size"],
        read_config(PEAGLE_DRAFT)["transformer_layer_config"]["hidden_size"],
    )
    generator = torch.Generator().manual_seed(13)

    def resized(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor  # which tokens it may say
        shape = [size // old * hidden if size % old == 0 else size for size in tensor.shape]
        # Heads and the MLP keep their number and width.
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            shape = [hidden, tensor.shape[1]]
        elif "_proj" in name or "lm_head" in name or "embed" in name:
            shape = [tensor.shape[0], *shape[1:]]
        scale = 0.05 if len(shape) > 1 else 1.0
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    def weights(tensors: dict) -> dict:
        return {name: resized(name, tensor).contiguous() for name, tensor in tensors.items()}

    return make_draft(
        folder,
        weights,
        base=PEAGLE_DRAFT,
        eagle_aux_hidden_state_layer_ids=list(layers),
        transformer_layer_config={"hidden_size": hidden},
    )
