"""The formats of draft checkpoints, each converted to one flat config or refused.

Beside z-lab's and the speculators library's there are P-EAGLE drafts with an EAGLE-3 config, as Amazon and
NeMo AutoModel publish them. Such a file is a P-EAGLE draft's if it has the tensor `mask_hidden`, and a mask
token in its config. Sources: AWS's reader for Neuron (gpt-oss), NeMo AutoModel's `LlamaEagle3DraftModel`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dflash.srt.configs.checkpoint import tensor_shapes
from sglang_dflash.srt.configs.draft_config import (
    NESTED_ONLY,
    DFlashDraftConfig,
    flat_draft,
    names_sliding_layers,
    speculators_ids_to_layer_outputs,
)
from sglang_dflash.srt.configs.draft_kinds import (
    DEFAULT_DEPTH,
    DSPARK_ARCHITECTURES,
    PEAGLE_ARCHITECTURE,
    PEAGLE_NORMS,
    PEagleDraftConfig,
    check_architectures,
    config_class,
    default_layer_inputs,
)
from sglang_dflash.srt.configs.fields import Fields, names_taken
from sglang_dflash.srt.configs.json_values import as_object, first_name, is_int, short_repr
from sglang_dflash.srt.configs.layer_fields import ROPES, assumed_values, read_layers, read_rope
from sglang_dflash.srt.configs.quantization import (
    OtherMethodError,
    find_quantization,
    flag_problem,
    read_quantization,
)
from sglang_dflash.srt.configs.speculators_format import (
    is_served,
    is_speculators_config,
    normalize,
    speculators_fields,
    speculators_type,
)
from sglang_dflash.srt.configs.unsupported import (
    BUILTIN_ARCHITECTURES,
    Unsupported,
    draft_problems,
    dspark_heads,
    field_of,
)
from sglang_dflash.srt.environ import DFlashOptions

FLAT_PEAGLE_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "LlamaEagle3DraftModel",
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLMPeagle",
    "PeagleLlamaForCausalLM",
    "PeagleQwen3ForCausalLM",
    "PEagleDraftModel",
)

# Fields that describe a file or its training.
_OF_FILES = {"auto_map", "compression_config", "embed_requires_grad", "norm_output"}
_OF_FILES |= {"speculators_model_type", "speculators_version"}
# Top-level fields of the library's files whose other value in the layers' object is the target's.
_OF_TOP = {"model_type", "tie_word_embeddings", "torch_dtype", "quantization_config"}
# A draft's positions are a text's, so M-RoPE's sections say nothing.
_ROPE_FIELDS = {*names_taken(read_rope), "rope_dim", "mrope_section", "mrope_interleaved"}
_ROPE_FIELDS |= {"full_attention", "sliding_attention"}  # objects of these fields
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
_DEPTHS = ("num_depths", "speculative_tokens", "para_num", "para_depths")
_LAYER_INPUTS = ("eagle_aux_hidden_state_layer_ids", "layer_ids")
_NEUTRAL = {"mlp_bias": (None, False), "logit_scale": (None, 1, 1.0)}
_PEAGLE_FIELDS = {*_MASK_TOKENS, *_DEPTHS, *_LAYER_INPUTS, *_NEUTRAL, *PEAGLE_NORMS}
_PEAGLE_FIELDS |= {"parallel_drafting", "target_hidden_size", "eagle_config"}


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
    elif is_flat_dspark(config):
        flat = flatten_dspark(config, checkpoint)
    else:
        check_architectures(config.get("architectures"), checkpoint, dspark_heads(config))
        flat = dict(config)
    if names_sliding_layers(flat.get("layer_types")):
        flat["use_sliding_window"] = True  # without it transformers drops the window
    fields = Fields(flat, [])
    read_layers(fields)
    fields.raise_problems(checkpoint)
    return flat


def checkpoint_problems(
    config: Mapping[str, Any],
    checkpoint: str,
    revision: str | None = None,
    quantization_flag: str | None = None,
) -> list[Unsupported]:
    """List what ours does not serve of a checkpoint. Other flags and devices may add reasons.

    Faults that make a config invalid are left to the class that reads it, but for those of a quantization:
    the built-in would load such a file, or follow a flag that contradicts it, and draft noise.
    """
    architectures = config.get("architectures")
    kind = config_class(architectures)
    is_known = kind is not None or first_name(architectures) in BUILTIN_ARCHITECTURES
    is_zlabs = is_known and kind is not PEagleDraftConfig
    builtin_reads = is_zlabs and not is_speculators_config(config)
    found = draft_problems(config, (kind or DFlashDraftConfig).nested_fields()) if builtin_reads else []
    try:
        quantization = read_quantization(find_quantization(config, checkpoint, revision))
    except OtherMethodError as error:
        found.append(Unsupported(str(error), builtin_reads))
    except ValueError as error:
        found.append(Unsupported(f"quantization_config: {str(error).rstrip('.')}"))
    else:
        if problem := flag_problem(quantization_flag, quantization):
            found.append(Unsupported(problem, quantization is None and builtin_reads))
    return found


def unread_fields(config: Mapping[str, Any]) -> list[str]:
    """Name the fields of a draft's config.json that are neither read nor refused, nor null."""
    from transformers import PretrainedConfig, Qwen3Config

    kind = config_class(config.get("architectures")) or PEagleDraftConfig
    if is_flat_dspark(config):
        kind = DFlashDraftConfig
    own = kind.nested_fields() | (_PEAGLE_FIELDS if kind is PEagleDraftConfig else set())
    of_layers = {*names_taken(read_layers), *Qwen3Config().to_dict(), "partial_rotary_factor", *_OF_FILES}
    places = [("", config, of_layers | own - NESTED_ONLY | {"dflash_config"})]
    places += [(f"{name}.", as_object(config.get(name)), own) for name in ("dflash_config", "eagle_config")]
    before, layers = "", config
    if is_speculators_config(config):
        before, layers = "transformer_layer_config.", as_object(config.get("transformer_layer_config"))
        same = {name for name in of_layers if config.get(name) == layers.get(name)}
        top = speculators_fields(config) | same | {*PretrainedConfig().to_dict(), *_OF_FILES, *_OF_TOP}
        places = [("", config, top), (before, layers, of_layers)]
    places += [(f"{before}{name}.", as_object(layers.get(name)), _ROPE_FIELDS) for name in ROPES]
    return [
        f"{place}{name}"
        for place, fields, known in places
        for name, value in fields.items()
        if value is not None and name not in known and field_of(name) is None
    ]


def is_converted(config: Mapping[str, Any], checkpoint: str) -> bool:
    """Return True for a config.json that `flat_config` converts, as SGLang cannot read it."""
    return is_served(config) or is_flat_peagle(config, checkpoint) or is_flat_dspark(config)


def is_flat_dspark(config: Mapping[str, Any]) -> bool:
    """Return True for a DeepSpec draft without heads, or whose Markov head is denied."""
    is_named = first_name(config.get("architectures")) == DSPARK_ARCHITECTURES[0]
    if not is_named or is_speculators_config(config):
        return False
    return not any(head.startswith("markov_rank") for head in dspark_heads(config))


def flatten_dspark(config: Mapping[str, Any], checkpoint: str) -> dict[str, Any]:
    """Convert the config of a DSpark draft without heads, DFlash that samples from the anchor.

    It is DeepSpec's `Qwen3DSparkModel`. Its block of `block_size` rows drafts as many tokens. Its rows see
    each other, and layer ids name outputs, as z-lab's do. Source: DeepSpec, `modeling/dspark/qwen3`.

    Raises:
        DraftConfigError: the config has faults. The message names all of them.
    """
    heads = [f"{head}: a confidence head is not supported (only false)" for head in dspark_heads(config)]
    fields, nested = Fields(config, heads), as_object(config.get("dflash_config"))
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        value, inner = fields.find(name), nested.get(name)
        if value is inner is None:
            fields.fault(name, "is missing")
        elif None not in (value, inner) and value != inner:
            fields.fault(name, f"is {short_repr(value)}, but dflash_config.{name} is {short_repr(inner)}")
    anchor = nested.get("sample_from_anchor", True)
    if anchor is not True:
        problem = f"is {short_repr(anchor)}, but every row of the block drafts"
        fields.fault("dflash_config.sample_from_anchor", problem)
    fields.raise_problems(checkpoint)
    return {
        **config,
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"input_embedding_scale": 1.0, **nested, "sample_from_anchor": True},
    }


def is_flat_peagle(config: Mapping[str, Any], checkpoint: str) -> bool:
    """Return True for such a draft. An EAGLE-3 file has no mask tensor."""
    if first_name(config.get("architectures")) not in FLAT_PEAGLE_ARCHITECTURES:
        return False
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        return False
    if config.get("parallel_drafting") is not True and _first_given(_MASK_TOKENS, config) is None:
        return False
    tensors = tensor_shapes(checkpoint)
    return tensors is None or "mask_hidden" in tensors


def flatten_peagle(config: Mapping[str, Any], checkpoint: str, target_layers: int | None) -> dict[str, Any]:
    """Convert the config to the flat one that `PEagleDraftConfig` reads.

    Layers that the config does not name are spread over `target_layers`, the target's depth n: before layers
    2, n // 2 and n - 3, as SGLang has it for EAGLE-3.

    Raises:
        DraftConfigError: the config has faults. The message names all of them.
    """
    fields, eagle = Fields(config, []), as_object(config.get("eagle_config"))
    inputs = layer_inputs(config)
    if inputs is None and target_layers is not None:
        inputs = default_layer_inputs(target_layers)
    if inputs is None:
        fields.fault(_LAYER_INPUTS[0], "is missing, and the target's depth is not known")
    elif not isinstance(inputs, list) or not all(map(is_int, inputs)):
        fields.fault(_LAYER_INPUTS[0], f"must be a list of integers, got {short_repr(inputs)}")
    for name, neutral in _NEUTRAL.items():
        if fields.find(name) not in neutral:
            fields.fault(name, f"is {short_repr(config[name])}, which is not supported")
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if (width := config.get("target_hidden_size")) not in (None, hidden):
        problem = f"is {short_repr(width)}, but hidden_size is {short_repr(hidden)}"
        fields.fault("target_hidden_size", problem)
    depth = _first_given(_DEPTHS, config, default=DEFAULT_DEPTH)
    if not is_int(depth) or depth < 1:
        fields.fault("num_depths", f"must be a positive integer, got {short_repr(depth)}")
    mask = _mask_token(fields)
    fields.raise_problems(checkpoint)
    # Llama's defaults, as the fields of Qwen3 have others.
    sizes = {"num_key_value_heads": heads}
    if is_int(heads) and is_int(hidden) and heads > 0:
        sizes["head_dim"] = hidden // heads
    return flat_draft(
        {**config, **{name: size for name, size in sizes.items() if config.get(name) is None}},
        architecture=PEAGLE_ARCHITECTURE,
        block_size=depth + 1,
        mask_token_id=mask,
        draft_vocab_size=config.get("draft_vocab_size") or config.get("vocab_size"),
        speculative_tokens=depth,
        target_layer_ids=speculators_ids_to_layer_outputs(inputs),
        **{name: _first_given((name,), eagle, config, default=False) for name in PEAGLE_NORMS},
        # `model_type` says nothing: the config is a copy of the target's.
        qk_norm=any(name.endswith(".q_norm.weight") for name in tensor_shapes(checkpoint) or ()),
    )


def layer_inputs(config: Mapping[str, Any]) -> Any:
    """Return the layers whose inputs a P-EAGLE draft reads; None if it names none."""
    return _first_given(_LAYER_INPUTS, config, as_object(config.get("eagle_config")))


def _first_given(names: Sequence[str], *places: Mapping[str, Any], default: Any = None) -> Any:
    return next((place[name] for place in places for name in names if place.get(name) is not None), default)


def _mask_token(fields: Fields) -> int | None:
    """Return the mask token's id, which several fields may give, as digits too."""
    found: dict[str, int] = {}
    for where, values in (("dflash_config.", as_object(fields.find("dflash_config"))), ("", fields.values)):
        for name in _MASK_TOKENS:
            value: Any = values.get(name)
            value = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
            if value is not None and fields.check(where + name, value, int) is not None:
                found[where + name] = value
    if len(set(found.values())) > 1:
        fields.problems.append(f"the mask token is given twice, with different ids: {short_repr(found)}")
    elif not found and not fields.problems:
        fields.fault("mask_token_id", "is missing")
    return next(iter(found.values()), None)


def config_remarks(config: Mapping[str, Any], checkpoint: str) -> list[str]:
    """Say which values of layers a draft's config.json lacks, and which fields are not read.

    Raises:
        ValueError: the config has faults, or is another model's.
    """
    remarks = assumed_values(flat_config(config, checkpoint, DFlashOptions.TARGET_LAYERS.get()))
    if speculators_type(config) == "peagle" and config.get("speculators_config") is None:
        remarks.append(f"speculators_config is missing, {DEFAULT_DEPTH} drafted tokens are assumed")
    if unread := unread_fields(config):
        remarks.append(f"config.json has fields that are not read: {', '.join(unread)}")
    return remarks
