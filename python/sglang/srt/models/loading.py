"""Loading of a draft checkpoint's tensors, which `configs/draft_tensors.py` lists.

Packed modules are dequantized.
"""

import copy
import logging
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader

from sglang_dflash.srt.configs.checkpoint import StoredTensor
from sglang_dflash.srt.configs.draft_tensors import (
    ExaminedTensors,
    canonical_name,
    d2t_problems,
    examine_tensors,
    expected_tensors,
)
from sglang_dflash.srt.configs.json_values import short_repr
from sglang_dflash.srt.layers.dequantize import take_quantized_modules

logger = logging.getLogger(__name__)

# A module of a checkpoint -> the layer of the model that fuses it with others, and its shard there.
SHARDS: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class CheckedTensors(NamedTuple):
    """Tensors that fit a draft, by our names, and its config in the file's sizes."""

    config: Any
    tensors: dict[str, torch.Tensor]
    found: ExaminedTensors  # what `examine_tensors` says of them


def check_tensors(
    model: Any, weights: Iterable[tuple[str, torch.Tensor]], is_update: bool = False
) -> CheckedTensors:
    """Raise ValueError with all problems of a checkpoint, or of a weight update.

    An update may bring some of the tensors, and plain weights for modules that the checkpoint had quantized.
    """
    named = list(weights)
    config = copy.copy(model.config)  # as the file has it: on a CPU SGLang rounds up the width of the MLP
    config.intermediate_size = getattr(config, "original_intermediate_size", config.intermediate_size)
    stored = ((name, StoredTensor.from_tensor(tensor)) for name, tensor in named)
    found = examine_tensors(config, model.draft, stored, is_update=is_update)
    # SGLang's loaders cut or pad a tensor of another size instead of refusing it.
    problems = found.problems or _late_modules(model, found.shapes)
    if model.was_loaded and not problems:
        problems = [f"{name}: this draft has no such tensor" for name in found.unknown]
    if not problems and "d2t" in found.maps:
        problems = d2t_problems(found.maps["d2t"], model.draft)
    if problems:
        raise ValueError("DFLASH draft weights do not match its config:\n  - " + "\n  - ".join(problems))
    return CheckedTensors(config, {canonical_name(name): tensor for name, tensor in named}, found)


def load_tensors(model: Any, checked: CheckedTensors) -> set[str]:
    """Load checked tensors, and return the names of the model's parameters.

    After an update `model.renew_cast_weights` must follow.
    """
    config, tensors, found = checked
    missing_width = model.config.intermediate_size - config.intermediate_size
    _take_vocabulary_mapping(model, found.maps.get("d2t"))
    if found.unknown:
        logger.warning(
            "DFLASH draft: tensors that are not read: %s. If the draft was trained with them, few drafted "
            "tokens are accepted.",
            short_repr(found.unknown),
        )
    expected, _ = expected_tensors(config, model.draft)
    ids = model.draft.target_layer_ids
    is_ascending = list(ids) == sorted(ids)
    quantized = take_quantized_modules(tensors, found)
    _make_room_for_vocabulary(model, found.shapes)

    def fitted(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "fc.weight" and not is_ascending:
            # Its columns, as SGLang captures layers: in ascending order.
            places = sorted(range(len(ids)), key=ids.__getitem__)
            tensor = torch.cat([tensor.chunk(len(ids), dim=1)[place] for place in places], dim=1)
        elif name in expected and tensor.shape[0] > expected[name][0]:
            tensor = tensor[: expected[name][0]]  # padding
        return _padded(name, tensor, missing_width)

    for name, tensor in tensors.items():
        if name in found.shapes and name != "d2t":
            _load(model, name, fitted(name, tensor))

    for module in quantized:
        try:
            weight = module.dequantize(model.norm.weight.device)
        except ValueError as error:
            raise ValueError(f"DFLASH draft weights: {error}") from error
        name = f"{module.name}.weight"
        _load(model, name, fitted(name, weight).to(model.norm.weight.dtype))
    if quantized:
        schemes = ", ".join(sorted({module.scheme.name for module in quantized}))
        logger.info("DFLASH draft: %d quantized layers (%s) are dequantized.", len(quantized), schemes)
    model.was_loaded = True
    return {name for name, _ in model.named_parameters()}


def model_layer(module: str) -> tuple[str, str | int | None]:
    """Return the layer of the model that holds a module, and its shard if fused."""
    parent, _, last = module.rpartition(".")
    fused, shard = SHARDS.get(last, (last, None))
    return f"{parent}.{fused}" if parent else fused, shard


def _load(model: Any, name: str, tensor: torch.Tensor) -> None:
    module, _, part = name.rpartition(".")
    layer, shard = model_layer(module)
    parameter = model.get_parameter(f"{layer}.{part}" if layer else part)
    load = getattr(parameter, "weight_loader", default_weight_loader)
    load(parameter, tensor, *(() if shard is None else (shard,)))


def _padded(name: str, tensor: torch.Tensor, missing: int) -> torch.Tensor:
    """Pad a matrix of the MLP with zeros, as SGLang does on a CPU."""
    if not missing or ".mlp." not in name or tensor.ndim != 2:
        return tensor
    return F.pad(tensor, (0, missing) if name.endswith("down_proj.weight") else (0, 0, 0, missing))


def _take_vocabulary_mapping(model, d2t: torch.Tensor | None) -> None:
    """Keep `d2t`, the offsets from draft ids to target ids."""
    if d2t is not None and model.draft.has_own_vocabulary:
        if model.d2t is None:
            model.d2t = torch.empty_like(d2t, device=model.norm.weight.device, dtype=torch.int64)
        model.d2t.copy_(d2t)  # in place: CUDA graphs read it


def _late_modules(model, names: Iterable[str]) -> list[str]:
    """List what a weight update would have to add to the model: CUDA graphs would not read it."""
    if model.borrowed[0] is None:
        return []
    return [
        f"{name}.weight: this draft reads the target's; start with a checkpoint that has its own"
        for name in ("embed_tokens", "lm_head")
        if f"{name}.weight" in names and getattr(model, name) is None
    ]


def _make_room_for_vocabulary(model, tensors: Container[str]) -> None:
    draft, hidden_size, like = model.draft, model.draft.hidden_size, model.norm.weight
    if "embed_tokens.weight" in tensors and model.embed_tokens is None:
        model.embed_tokens = VocabParallelEmbedding(draft.vocab_size, hidden_size).to(like.device, like.dtype)
    if "lm_head.weight" in tensors and model.lm_head is None:
        model.lm_head = ParallelLMHead(draft.draft_vocab_size, hidden_size).to(like.device, like.dtype)
