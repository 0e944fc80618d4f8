"""Checkpoints of the `speculators` training library (0.9.0), read without conversion.

Their config.json nests the draft's layers under `transformer_layer_config` and counts target layers
differently. A function per `speculators_model_type` turns one into the flat config that our draft models
read; a checkpoint's tensors need no change."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_dflash.srt.configs.draft_config import DraftConfigError
from sglang_dflash.srt.configs.layer_fields import is_int
from sglang_dflash.srt.configs.peagle_config import PEAGLE_ARCHITECTURE

# What the library can train and we cannot serve.
_SERVED_ELSEWHERE = ("eagle3", "dspark", "dflash2", "mtp")
# Names that P-EAGLE drafts go by, also where nothing else says what they are.
_PEAGLE_ARCHITECTURES = (PEAGLE_ARCHITECTURE, "PEagleSpeculator", "PeagleLlamaForCausalLM")


def speculators_type(config: Mapping[str, Any]) -> Any:
    """What kind of draft a checkpoint says it is, as `speculators_model_type` has it; None if it is none of
    the library's."""
    kind = config.get("speculators_model_type")
    if kind is None and _first_architecture(config) in _PEAGLE_ARCHITECTURES:
        return "peagle"
    return kind


def _first_architecture(config: Mapping[str, Any]) -> Any:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names else None


def is_speculators_config(config: Mapping[str, Any]) -> bool:
    return speculators_type(config) is not None


def served_types() -> tuple[str, ...]:
    """The `speculators_model_type`s that `normalize` converts."""
    return tuple(sorted(_CONVERTERS))


def speculators_ids_to_layer_outputs(speculators_layer_ids: Sequence[int]) -> list[int]:
    """Convert `aux_hidden_state_layer_ids` to `target_layer_ids`, and nothing else converts.

    speculators counts how many layers have run: id i is the INPUT of layer i, Hugging Face's
    `hidden_states[i]`, with 0 the embedding. Ours names the layer whose OUTPUT is taken: id i is
    `hidden_states[i + 1]`. SGLang's capture hook counts inputs again and adds the one back by itself."""
    return [layer_id - 1 for layer_id in speculators_layer_ids]


def normalize(config: Mapping[str, Any], checkpoint: str) -> dict[str, Any]:
    """A speculators config.json as a flat Qwen3 config with a `dflash_config`.

    Raises DraftConfigError naming every missing, ill-typed or contradictory field.
    """
    kind = speculators_type(config)
    convert = _CONVERTERS.get(kind) if isinstance(kind, str) else None
    if convert is None:
        hint = "; SGLang's own implementation may" if kind in _SERVED_ELSEWHERE else ""
        raise DraftConfigError(
            checkpoint,
            [f"speculators_model_type {kind!r} is not served here (only {', '.join(served_types())}){hint}"],
        )
    return convert(config, checkpoint)


def verifier_of(config: Mapping[str, Any], checkpoint: str) -> str:
    """The target a speculators checkpoint was trained for. Raises DraftConfigError if it does not say."""
    problems: list[str] = []
    verifier = _get(config, ("speculators_config", "verifier", "name_or_path"), str, problems)
    if problems or not verifier:
        raise DraftConfigError(
            checkpoint,
            problems or ["speculators_config.verifier.name_or_path is empty"],
        )
    return verifier


def _convert_dflash(config: Mapping[str, Any], checkpoint: str) -> dict[str, Any]:
    problems: list[str] = []
    block_size = _positive(config, ("block_size",), problems)
    sample_from_anchor = bool(_get(config, ("sample_from_anchor",), bool, problems, default=False))
    non_causal = bool(_get(config, ("sliding_window_non_causal",), bool, problems, default=False))
    flat, shared = _convert_shared(config, "dflash", "aux_hidden_state_layer_ids", problems)
    speculative_tokens = shared["speculative_tokens"]
    if block_size and speculative_tokens:
        drafted = block_size if sample_from_anchor else block_size - 1
        if speculative_tokens > drafted:
            problems.append(
                f"speculative_tokens is {speculative_tokens}, but a block of {block_size} with "
                f"sample_from_anchor {str(sample_from_anchor).lower()} drafts {drafted}"
            )
    if problems:
        raise DraftConfigError(checkpoint, problems)
    return {
        **flat,
        "architectures": ["DFlashDraftModel"],
        "block_size": block_size,
        "dflash_config": {
            **shared,
            "sample_from_anchor": sample_from_anchor,
            "sliding_is_causal": not non_causal,
            "window_from_anchor": True,
        },
    }


def _convert_peagle(config: Mapping[str, Any], checkpoint: str) -> dict[str, Any]:
    problems: list[str] = []
    # The library's own defaults. `norm_output` concerns what EAGLE-3 feeds to its next step, of which P-EAGLE
    # has none.
    options = {
        name: bool(_get(config, (name,), bool, problems, default=False))
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm")
    }
    if options["norm_before_fc"] and options["fc_norm"]:
        problems.append("norm_before_fc and fc_norm are both true, but exclude each other")
    flat, shared = _convert_shared(config, "peagle", "eagle_aux_hidden_state_layer_ids", problems)
    style = _get(config, ("transformer_layer_config", "model_type"), str, problems, default="qwen3")
    if style not in ("qwen3", "llama"):
        problems.append(
            f"transformer_layer_config.model_type is {style!r}, but drafts have qwen3 or llama layers"
        )
    if problems:
        raise DraftConfigError(checkpoint, problems)
    return {
        **flat,
        "architectures": [PEAGLE_ARCHITECTURE],
        # The verified block: the newest token, and as many drafted ones as the draft was trained for.
        "block_size": shared["speculative_tokens"] + 1,
        "dflash_config": {**shared, **options, "qk_norm": style == "qwen3"},
    }


def _convert_shared(
    config: Mapping[str, Any], algorithm: str, ids_name: str, problems: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What all kinds have in common: the flat config of their layers, and the entries of `dflash_config`."""
    layers = _get(config, ("transformer_layer_config",), dict, problems) or {}
    shared = {
        "mask_token_id": _get(config, ("mask_token_id",), int, problems),
        "draft_vocab_size": _positive(config, ("draft_vocab_size",), problems),
    }
    layer_ids = _get(config, (ids_name,), list, problems)
    said = _get(config, ("speculators_config", "algorithm"), str, problems)
    if said not in (None, algorithm):
        problems.append(
            f"speculators_config.algorithm is {said!r}, but speculators_model_type is {algorithm!r}"
        )
    shared["speculative_tokens"] = _speculative_tokens(config, problems)
    _get(config, ("speculators_config", "verifier", "name_or_path"), str, problems)
    for name in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    ):
        if layers:
            _positive(layers, (name,), problems, prefix="transformer_layer_config.")
    if layer_ids is not None:
        if not layer_ids or not all(is_int(i) for i in layer_ids):
            problems.append(f"{ids_name} must be a non-empty list of integers, got {layer_ids!r}")
        elif min(layer_ids) < 1:
            problems.append(
                f"{ids_name} {layer_ids} names layer 0 or less: id 0 is the embedding's output, which SGLang cannot capture"
            )
        else:
            shared["target_layer_ids"] = speculators_ids_to_layer_outputs(layer_ids)
    target_hidden_size = _get(config, ("target_hidden_size",), int, problems, default=None)
    if target_hidden_size not in (None, layers.get("hidden_size")):
        problems.append(
            f"target_hidden_size is {target_hidden_size}, but the draft's hidden_size is {layers.get('hidden_size')}: "
            "the library's own model reads aux hidden states of the draft's width only"
        )
    rope = _one_rope(layers, problems)
    flat = {
        **layers,
        **({"rope_parameters": rope} if rope else {}),
        "model_type": "qwen3",
        "tie_word_embeddings": False,
    }
    return flat, shared


_CONVERTERS: dict[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "dflash": _convert_dflash,
    "peagle": _convert_peagle,
}


def _speculative_tokens(config: Mapping[str, Any], problems: list[str]) -> int | None:
    """Drafted tokens a step, by the checkpoint's default proposal method."""
    methods = _get(config, ("speculators_config", "proposal_methods"), list, problems)
    if methods is None:
        return None
    if not methods or not all(isinstance(method, dict) for method in methods):
        problems.append(
            f"speculators_config.proposal_methods must be a non-empty list of objects, got {methods!r}"
        )
        return None
    default = config["speculators_config"].get("default_proposal_method")
    chosen = next((m for m in methods if m.get("proposal_type") == default), methods[0])
    return _positive(
        chosen, ("speculative_tokens",), problems, prefix="speculators_config.proposal_methods[0]."
    )


def _one_rope(layers: Mapping[str, Any], problems: list[str]) -> dict | None:
    """`rope_parameters` may hold one set per layer type; a draft whose layers rotate differently is
    refused."""
    rope = layers.get("rope_parameters")
    if rope is None:
        return None
    if not isinstance(rope, dict):
        problems.append(f"transformer_layer_config.rope_parameters must be an object, got {rope!r}")
        return None
    nested = [value for value in rope.values() if isinstance(value, dict) and "rope_theta" in value]
    if not nested:
        return rope
    if any(value != nested[0] for value in nested):
        problems.append(
            "transformer_layer_config.rope_parameters differ between layer types, which is not supported"
        )
    return nested[0]


def _get(
    config: Mapping, path: tuple[str, ...], kind: type, problems: list[str], prefix: str = "", **default
) -> Any:
    """The value at `path`, or None after noting what is wrong with it."""
    name = prefix + ".".join(path)
    value: Any = config
    for i, key in enumerate(path):
        if not isinstance(value, Mapping):
            problems.append(f"{prefix}{'.'.join(path[:i])} must be an object, got {value!r}")
            return None
        if value.get(key) is None:
            if "default" in default:
                return default["default"]
            missing = f"{prefix}{'.'.join(path[: i + 1])} is missing"
            if missing not in problems:
                problems.append(missing)
            return None
        value = value[key]
    if not isinstance(value, kind) or (kind is int and not is_int(value)):
        problems.append(f"{name} must be {_KIND_NAMES[kind]}, got {value!r}")
        return None
    return value


def _positive(config: Mapping, path: tuple[str, ...], problems: list[str], prefix: str = "") -> int | None:
    value = _get(config, path, int, problems, prefix)
    if value is not None and value < 1:
        problems.append(f"{prefix}{'.'.join(path)} must be positive, got {value}")
        return None
    return value


_KIND_NAMES = {dict: "an object", list: "a list", str: "a string", int: "an integer", bool: "true or false"}
