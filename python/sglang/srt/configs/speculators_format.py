"""Checkpoints of the `speculators` training library (0.9.0), made flat for our models.

Their config.json nests the draft's layers and counts target layers differently.
"""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.srt.configs.checkpoint import tensor_shapes
from sglang_dflash.srt.configs.draft_config import flat_draft, speculators_ids_to_layer_outputs
from sglang_dflash.srt.configs.draft_kinds import (
    DEFAULT_DEPTH,
    PEAGLE_ARCHITECTURE,
    PEAGLE_NORMS,
    default_layer_inputs,
)
from sglang_dflash.srt.configs.fields import MAX_LAYERS, REQUIRED, DraftConfigError, Fields, names_taken
from sglang_dflash.srt.configs.json_values import as_object, first_name, short_repr
from sglang_dflash.srt.configs.layer_fields import read_layers, read_window
from sglang_dflash.srt.configs.unsupported import dspark_heads, variant_problems

# Types that we serve, and the architectures of their flat configs. DSpark is served without heads.
_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
_ARCHITECTURES |= {"dspark": "DFlashDraftModel", "peagle": PEAGLE_ARCHITECTURE}
# Types the library can train and we cannot serve. SGLang reads none of the library's files.
_SERVED_ELSEWHERE = ("eagle3", "dspark", "mtp")  # dspark: with heads
_DEFAULT_VOCABULARY = 32_000  # the library's, for a file whose tensors are not here
# Names of P-EAGLE drafts, which may be all that says what they are.
_PEAGLE_ARCHITECTURES = (PEAGLE_ARCHITECTURE, "PEagleSpeculator", "PeagleLlamaForCausalLM")


def speculators_type(config: Mapping[str, Any]) -> Any:
    """Return a checkpoint's `speculators_model_type`; None if it is not the library's."""
    kind = config.get("speculators_model_type")
    is_flat = "hidden_size" in config and "transformer_layer_config" not in config
    is_peagle = first_name(config.get("architectures")) in _PEAGLE_ARCHITECTURES
    return "peagle" if kind is None and not is_flat and is_peagle else kind


def is_served(config: Mapping[str, Any]) -> bool:
    """Return True for a config.json that `normalize` converts."""
    kind = speculators_type(config)
    return (
        isinstance(kind, str) and kind in _ARCHITECTURES and not (kind == "dspark" and dspark_heads(config))
    )


def is_speculators_config(config: Mapping[str, Any]) -> bool:
    """Return True for a config.json of the library."""
    return speculators_type(config) is not None or "transformer_layer_config" in config


def speculators_fields(config: Mapping[str, Any]) -> set[str]:
    """Return the fields that are read at the top level of a config.json of the library."""
    return names_taken(lambda fields: _read(fields, speculators_type(config)))


def normalize(config: Mapping[str, Any], checkpoint: str, target_layers: int | None = None) -> dict[str, Any]:
    """Convert a speculators config.json to a flat Qwen3 config with a `dflash_config`.

    `target_layers` is the target's depth, for a P-EAGLE draft that does not name the layers it reads.

    Raises:
        DraftConfigError: fields are missing, ill-typed or contradictory. The message names every one.
    """
    kind = speculators_type(config)
    if not is_served(config):
        hint = "; vLLM may serve it" if kind in _SERVED_ELSEWHERE else ""
        problem = f"{kind!r} is not served here (only {', '.join(_ARCHITECTURES)})"
        if kind == "dspark":
            problem = f"'dspark' is not served here with heads: {', '.join(dspark_heads(config))}"
        raise DraftConfigError(checkpoint, [f"speculators_model_type {problem}{hint}"])
    if found := variant_problems(config, {}, speculators_fields(config)):
        raise DraftConfigError(checkpoint, [finding.what for finding in found])
    fields = Fields(config, [])
    rows = None if config.get("draft_vocab_size") is not None else _rows_of_head(config, checkpoint)
    layers, entries = _read(fields, kind, rows, target_layers)
    fields.raise_problems(checkpoint)
    return flat_draft(layers, _ARCHITECTURES[kind], **entries)


def _read(
    fields: Fields, kind: Any, rows_of_head: Any = None, target_layers: int | None = None
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Read a config.json into the draft's layers and the other arguments of `flat_draft`.

    `rows_of_head` is the size of the draft's vocabulary, if the file does not say.
    """
    layers, tokens = _read_layers(fields), _read_proposal(fields, kind)
    entries: dict[str, Any] = {
        "speculative_tokens": tokens,
        "mask_token_id": fields.take("mask_token_id", int),
        "draft_vocab_size": fields.take("draft_vocab_size", int, rows_of_head, least=1),
    }
    inputs, default = "aux_hidden_state_layer_ids", REQUIRED
    if kind != "peagle":
        entries |= _read_dflash(fields, kind, tokens)
    else:
        inputs = f"eagle_{inputs}"
        default = REQUIRED if target_layers is None else default_layer_inputs(target_layers)
        entries |= {norm: fields.take(norm, bool, False) for norm in PEAGLE_NORMS}
        if entries["norm_before_fc"] and entries["fc_norm"]:
            fields.fault("fc_norm", "is not possible: norm_before_fc and fc_norm are both true")
        entries["qk_norm"] = layers.take("model_type", str, "qwen3", one_of=("qwen3", "llama")) != "llama"
        # The block is the newest token and the number of drafted tokens of the training.
        entries["block_size"] = (tokens or DEFAULT_DEPTH) + 1
    ids = fields.take_list(inputs, int, default) or []
    if ids and min(ids) < 1:
        embedding = "id 0 is the embedding, which SGLang does not capture"
        fields.fault(inputs, f"{short_repr(ids)} names layer 0 or less: {embedding}")
    width, hidden = fields.take("target_hidden_size", int, None), layers.values.get("hidden_size")
    if width not in (None, hidden):
        reads = "the library's own model reads aux hidden states of the draft's width only"
        fields.fault("target_hidden_size", f"is {width}, but the draft's hidden_size is {hidden}: {reads}")
    return layers.values, entries | {"target_layer_ids": speculators_ids_to_layer_outputs(ids)}


def _read_layers(fields: Fields) -> Fields:
    """Read the draft's layers, and fields of windows at the top level, as vLLM's reader does."""
    layers = fields.take_object("transformer_layer_config")
    ropes = as_object(layers.values.get("rope_parameters")).values()
    if by_type := [rope for rope in ropes if "rope_theta" in as_object(rope)]:
        layers.values = {**layers.values, "rope_parameters": by_type[0]}
        if any(rope != by_type[0] for rope in by_type):
            problem = "has rope_parameters that differ between layer types, which is not supported"
            fields.fault("transformer_layer_config", problem)
    read_layers(layers)
    window = read_window(fields)
    for name, value in window.items():
        if (inner := layers.values.get(name)) not in (None, value):
            place = f"{layers.where}{name} is {short_repr(inner)}"
            fields.fault(name, f"is {short_repr(value)}, but {place}")
    layers.values = {**layers.values, **window}
    return layers


def _read_proposal(fields: Fields, kind: Any) -> int | None:
    """Return the tokens that the default method drafts, or the first; None without methods."""
    given = fields.take_object("speculators_config", None)
    if (algorithm := given.take("algorithm", str)) not in (None, kind):
        problem = f"has algorithm {algorithm!r}, but speculators_model_type is {kind!r}"
        fields.fault("speculators_config", problem)
    given.take_object("verifier").take("name_or_path", str)
    if (methods := given.take_list("proposal_methods", dict)) is None:
        return None
    default = given.values.get("default_proposal_method")
    chosen = next((method for method in methods if method.get("proposal_type") == default), methods[0])
    place = f"{given.where}proposal_methods.{methods.index(chosen)}."
    return Fields(chosen, fields.problems, place).take("speculative_tokens", int, least=1)


def _read_dflash(fields: Fields, kind: Any, tokens: int | None) -> dict[str, Any]:
    """Read what P-EAGLE drafts do not have, of a draft that drafts `tokens`."""
    size = fields.take("block_size", int, least=1)
    # The anchor of DSpark drafts, and the sliding layers of DFlash2 see their whole block, unless denied.
    drafts_first = fields.take("sample_from_anchor", bool, kind == "dspark")
    is_causal = not fields.take("sliding_window_non_causal", bool, kind == "dflash2")
    entries = {"block_size": size, "sample_from_anchor": drafts_first, "sliding_is_causal": is_causal}
    if kind == "dspark":
        fields.take("markov_rank", int, one_of=(0,))
        fields.take("enable_confidence_head", bool, one_of=(False,))
        drafted = (size or 0) - (not drafts_first)
        if size and tokens not in (None, drafted):
            problem = f"is {size}, which drafts {drafted}, but speculative_tokens is {tokens}"
            fields.fault("block_size", problem)
    if kind == "dflash2":
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        entries |= {name: fields.take(name, int, least=1) for name in names}
        if size and (taps := entries["conv_kernel_size"] or 0) > size:
            fields.fault("conv_kernel_size", f"is {taps}, longer than a block of {size}")
    return entries | {"window_from_anchor": True}


def _rows_of_head(config: Mapping[str, Any], checkpoint: str) -> Any:
    """Return the size of the draft's vocabulary by its tensors, or the library's default."""
    if (shapes := tensor_shapes(checkpoint)) is None:
        return _DEFAULT_VOCABULARY
    whole = as_object(config.get("transformer_layer_config")).get("vocab_size")
    return next((shapes[name][0] for name in ("d2t", "lm_head.weight") if shapes.get(name)), whole)


def verifier_of(config: Mapping[str, Any], checkpoint: str) -> str:
    """Return a checkpoint's target. Raises DraftConfigError if it names none."""
    normalize(config, checkpoint, target_layers=MAX_LAYERS)  # the depth is the target's, so any will do
    verifier = as_object(as_object(config.get("speculators_config")).get("verifier")).get("name_or_path")
    if not verifier:
        problem = "speculators_config.verifier.name_or_path is missing or empty, which names the target"
        give = "give it: --model-path TARGET --speculative-draft-model-path CHECKPOINT"
        raise DraftConfigError(checkpoint, [f"{problem}; {give}"])
    return verifier
