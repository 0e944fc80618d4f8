"""Faults of drafts that one examination refuses.

unit/configs/test_corrupted_checkpoints.py tries all of them, the start of a server and the doctor a few.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from serving import DFLASH2_DRAFT, PEAGLE_DRAFT, SPECULATORS_DRAFT
from support.drafts import REMOVE, make_draft

Tensors = dict[str, torch.Tensor]


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {other: tensor for other, tensor in tensors.items() if other != name}


def with_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name].clone())}


def with_first(name: str, value: float) -> Callable[[Tensors], Tensors]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[0] = value
        return tensor

    return with_tensor(name, change)


def quantized(tensors: Tensors) -> Tensors:
    name = "layers.1.mlp.up_proj"
    weight = tensors[f"{name}.weight"].mul(100).to(torch.int8)
    return tensors | {f"{name}.weight": weight, f"{name}.weight_scale": torch.ones(1)}


def with_own_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": torch.zeros(4096, 256)}


def nested(**changes: object) -> dict:
    return {"dflash_config": changes}


# name -> (changes of a bundled draft, what its refusal says)
FAULTS: dict[str, tuple[dict, str]] = {
    "two faults": (
        {"block_size": 0} | nested(mask_token_id=-1),
        "block_size must be .* 1, got 0.*mask_token_id is -1, outside the vocabulary",
    ),
    "mask token outside the vocabulary": (nested(mask_token_id=2048), "mask_token_id is 2048, outside"),
    "hidden size": ({"hidden_size": 128}, "hidden_size is 128, but the target's hidden_size is 256"),
    "a missing field": ({"hidden_size": REMOVE}, "hidden_size is missing"),
    "another width": ({"base": SPECULATORS_DRAFT, "target_hidden_size": 512}, "target_hidden_size is 512"),
    "layer id out of range": (
        nested(target_layer_ids=[1, 99]),
        r"target_layer_ids \[1, 99\] .* leave the target's 12 layers",
    ),
    "id of the last layer": (
        nested(target_layer_ids=[2, 5, 8, 11]),
        r"target_layer_ids \[2, 5, 8, 11\] .* name the last layer",
    ),
    "layer ids repeated": (nested(target_layer_ids=[1, 4, 4, 7]), "target_layer_ids must be without repeats"),
    "layer ids empty": (nested(target_layer_ids=[]), "target_layer_ids must be a non-empty list"),
    "fewer layers than fc reads": (
        nested(target_layer_ids=[7, 4, 1]),
        r"fc.weight is \(256, 1024\), expected \(256, 768\)",
    ),
    "unknown layer type": (
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        "layer_types.1 must be 'full_attention' or 'sliding_attention', got 'linear_attention'",
    ),
    "another kind of draft": (
        {"architectures": ["LlamaForCausalLMEagle3"]},
        "neither a DFlash nor a P-EAGLE draft: its architectures are .*LlamaForCausalLMEagle3",
    ),
    "a Domino draft": (nested(projector_type="domino"), "projector_type is 'domino': a Domino projector"),
    "another library's quantization": (
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config: quant_method 'awq' is not served",
    ),
    "quantized without a config": (
        {"weights": quantized},
        r"layers.1.mlp.up_proj.weight_scale \(F32\): the config names no quantization for it",
    ),
    "two bases": ({"rope_parameters": {"rope_theta": 5e6}}, "rope_theta is .*5e[+]06"),
    "two embeddings": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "rope_scaling and rope_parameters",
    ),
    "a head of another vocabulary": (
        {"weights": with_own_head, "vocab_size": 4096},
        "vocab_size is 4096, .* which the draft's own head cannot serve",
    ),
    "a tensor missing": ({"weights": without("hidden_norm.weight")}, "hidden_norm.weight: missing"),
    "a part of a fused tensor missing": (
        {"weights": without("layers.1.self_attn.k_proj.weight")},
        "layers.1.self_attn.k_proj.weight: missing",
    ),
    "a tensor of another shape": (
        {"weights": with_tensor("layers.1.mlp.down_proj.weight", lambda t: t[:-3].clone())},
        r"layers.1.mlp.down_proj.weight is \(253, 512\), expected \(256, 512\)",
    ),
    "a norm that is no number": (
        {"weights": with_first("norm.weight", torch.nan)},
        "model.safetensors: norm.weight holds 1 values",
    ),
    "a norm of zeros": (
        {"base": DFLASH2_DRAFT, "weights": with_tensor("norm.weight", torch.zero_)},
        "norm.weight is zero throughout",
    ),
    "another t2d": (
        {"base": SPECULATORS_DRAFT, "weights": with_tensor("t2d", torch.logical_not)},
        "name different target tokens",
    ),
    "a map below the vocabulary": (
        {"base": SPECULATORS_DRAFT, "weights": with_first("d2t", -1)},
        "d2t points outside",
    ),
    "a map of target ids": (
        {"base": PEAGLE_DRAFT, "weights": with_tensor("d2t", lambda t: t + torch.arange(len(t)))},
        "d2t points outside .*look like target ids, where offsets",
    ),
}


def write_fault(name: str, folder: Path) -> Path:
    """Write a bundled draft with this fault."""
    changes, _ = FAULTS[name]
    return make_draft(folder, **changes)
