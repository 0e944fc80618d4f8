"""The formats of draft checkpoints, each converted to one flat config or refused.

Beside z-lab's and the speculators library's there are P-EAGLE drafts with an EAGLE-3 config, as Amazon and
NeMo AutoModel publish them. What makes one of those a P-EAGLE draft is the tensor `mask_hidden`, and a mask
token in its config. Sources: AWS's reader for Neuron (gpt-oss), NeMo AutoModel's `LlamaEagle3DraftModel`.
"""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.srt.configs.checkpoint import tensor_shapes
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig, names_sliding_layers
from sglang_dflash.srt.configs.draft_kinds import (
    PEAGLE_ARCHITECTURE,
    check_architectures,
    config_class,
    default_layer_inputs,
)
from sglang_dflash.srt.configs.fields import (
    DraftConfigError,
    LayerFields,
    first_name,
    is_int,
    shown,
    validated,
)
from sglang_dflash.srt.configs.quantization import OtherMethodError, find_quantization, read_quantization
from sglang_dflash.srt.configs.speculators_format import (
    flat_draft,
    is_speculators_config,
    normalize,
    speculators_ids_to_layer_outputs,
)
from sglang_dflash.srt.configs.unsupported import BUILTIN_ARCHITECTURES, Unsupported, draft_findings

FLAT_PEAGLE_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "LlamaEagle3DraftModel",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLMPeagle",
    "PeagleLlamaForCausalLM",
    "PeagleQwen3ForCausalLM",
    "PEagleDraftModel",
)
MASK_TENSOR = "mask_hidden"
DEFAULT_DEPTH = 7  # drafted tokens a step, if the config does not say

_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
_DEPTHS = ("num_depths", "speculative_tokens", "para_num", "para_depths")
_LAYER_INPUTS = ("eagle_aux_hidden_state_layer_ids", "layer_ids")


def flat_config(
    config: Mapping[str, Any], checkpoint: str, target_layers: int | None = None
) -> dict[str, Any]:
    """Return the flat config of a draft in any format.

    Args:
        config: the file's config.json.
        checkpoint: its folder, or a hub id.
        target_layers: the target's depth, for a draft that does not name the layers it reads; None if that
            is not known.

    Raises:
        DraftConfigError: naming every field that is missing, wrong or contradictory.
        ValueError: for the config of another model.
    """
    if is_speculators_config(config):
        flat = normalize(config, checkpoint, target_layers)
    elif is_flat_peagle(config, checkpoint):
        flat = flatten_peagle(config, checkpoint, target_layers)
    else:
        check_architectures(config.get("architectures"), checkpoint)
        flat = dict(config)
    if names_sliding_layers(flat.get("layer_types")):
        flat["use_sliding_window"] = True  # without it transformers drops the window
    validated(LayerFields, flat, checkpoint)
    return flat


def checkpoint_findings(
    config: Mapping[str, Any], checkpoint: str, revision: str | None = None
) -> list[Unsupported]:
    """List what ours does not serve of a checkpoint. Flags and devices may add reasons.

    Faults that make a config invalid are left to the class that reads it, but for those of a quantization:
    the built-in would load such a file, and draft noise.
    """
    builtin_reads = is_dflash_draft(config)
    architectures = config.get("architectures")
    served = (config_class(architectures) or DFlashDraftConfig).nested_fields()
    found = draft_findings(config, served) if builtin_reads else []
    try:
        read_quantization(find_quantization(config, checkpoint, revision))
    except ValueError as error:
        is_other = isinstance(error, OtherMethodError)
        where = "" if is_other else "quantization_config: "
        found.append(Unsupported(where + str(error).rstrip("."), builtin_reads and is_other))
    return found


def is_dflash_draft(config: Mapping[str, Any]) -> bool:
    """Return True for a draft in z-lab's format, which the built-in may read as well."""
    architectures = config.get("architectures")
    if is_speculators_config(config):
        return False
    return config_class(architectures) is not None or first_name(architectures) in BUILTIN_ARCHITECTURES


def is_flat_peagle(config: Mapping[str, Any], checkpoint: str) -> bool:
    """Return True for such a draft. An EAGLE-3 file has no mask tensor."""
    if first_name(config.get("architectures")) not in FLAT_PEAGLE_ARCHITECTURES:
        return False
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        return False
    says_so = config.get("parallel_drafting") is True or any(
        config.get(name) is not None for name in _MASK_TOKENS
    )
    tensors = tensor_shapes(checkpoint) if says_so else None
    return says_so and (tensors is None or MASK_TENSOR in tensors)


def names_its_layers(config: Mapping[str, Any]) -> bool:
    """Return True if the config says which target layers the draft reads."""
    return _layer_inputs(config) is not None


def flatten_peagle(config: Mapping[str, Any], checkpoint: str, target_layers: int | None) -> dict[str, Any]:
    """Convert the config to the flat one that `PEagleDraftConfig` reads.

    Layers that the config does not name are spread over `target_layers`, the target's depth n: before layers
    2, n // 2 and n - 3, as SGLang has it for EAGLE-3.

    Raises:
        DraftConfigError: the config has faults. The message names all of them.
    """
    problems: list[str] = []
    nested = config.get("eagle_config")
    eagle = nested if isinstance(nested, dict) else {}
    inputs = _layer_inputs(config)
    if inputs is None and target_layers is None:
        problems.append("eagle_aux_hidden_state_layer_ids is missing, and the target's depth is not known")
    elif inputs is None and target_layers is not None:
        inputs = default_layer_inputs(target_layers)
    elif not isinstance(inputs, list) or not all(map(is_int, inputs)):
        problems.append(f"eagle_aux_hidden_state_layer_ids must be a list of integers, got {shown(inputs)}")
        inputs = []
    for name, neutral in (("mlp_bias", (None, False)), ("logit_scale", (None, 1, 1.0))):
        if config.get(name) not in neutral:
            problems.append(f"{name} is {shown(config[name])}, which is not supported")
    if config.get("target_hidden_size") not in (None, config.get("hidden_size")):
        problems.append(
            f"target_hidden_size is {shown(config['target_hidden_size'])}, but hidden_size is "
            f"{shown(config.get('hidden_size'))}"
        )
    depth = next((config[name] for name in _DEPTHS if config.get(name) is not None), DEFAULT_DEPTH)
    if not is_int(depth) or depth < 1:
        problems.append(f"num_depths must be a positive integer, got {shown(depth)}")
        depth = DEFAULT_DEPTH
    mask = _mask_token(config, problems)
    if problems:
        raise DraftConfigError(checkpoint, problems)

    def option(name: str) -> Any:
        value = eagle.get(name, config.get(name))
        return False if value is None else value

    vocabulary = config.get("draft_vocab_size") or config.get("vocab_size")
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    # Llama's defaults, as the fields of Qwen3 have others.
    sizes = {"num_key_value_heads": heads}
    if is_int(heads) and is_int(hidden) and heads > 0:
        sizes["head_dim"] = hidden // heads
    return flat_draft(
        {**config, **{name: size for name, size in sizes.items() if config.get(name) is None}},
        PEAGLE_ARCHITECTURE,
        depth + 1,
        mask_token_id=mask,
        draft_vocab_size=vocabulary,
        speculative_tokens=depth,
        target_layer_ids=speculators_ids_to_layer_outputs(inputs or ()),
        norm_before_residual=option("norm_before_residual"),
        norm_before_fc=option("norm_before_fc"),
        fc_norm=option("fc_norm"),
        # `model_type` says nothing: the config is a copy of the target's.
        qk_norm=any(name.endswith(".q_norm.weight") for name in tensor_shapes(checkpoint) or ()),
    )


def _layer_inputs(config: Mapping[str, Any]) -> Any:
    nested = config.get("eagle_config")
    places = (config, nested) if isinstance(nested, dict) else (config,)
    found = (place.get(name) for place in places for name in _LAYER_INPUTS)
    return next((value for value in found if value is not None), None)


def _mask_token(config: Mapping[str, Any], problems: list[str]) -> int | None:
    nested = config.get("dflash_config")
    places = [("dflash_config.", nested)] if isinstance(nested, dict) else []
    found: dict[str, int] = {}
    for where, fields in (*places, ("", config)):
        for name in _MASK_TOKENS:
            value: Any = fields.get(name)
            value = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
            if is_int(value):
                found[where + name] = value
            elif value is not None:
                problems.append(f"{where}{name} must be an integer, got {shown(value)}")
    if len(set(found.values())) > 1:
        problems.append(f"the mask token is given twice, with different ids: {shown(found)}")
    elif not found and not problems:
        problems.append("mask_token_id is missing")
    return next(iter(found.values()), None)
