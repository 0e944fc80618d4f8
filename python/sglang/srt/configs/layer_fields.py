"""What a draft's config.json says of its layers and their rotary embedding, checked as it stands in the file.

transformers, SGLang and the layers read these fields as well, each with assumptions of its own, and what does
not meet them fails somewhere deep. Here is what every one of them can live with."""

import math
from collections.abc import Callable, Mapping
from typing import Any

MAX_SIZE = 2**24  # far beyond any model's width or length; keeps a garbled config from being allocated for
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_COUNTS = ("sliding_window", "max_window_layers")  # zero is none
_SWITCHES = ("attention_bias", "tie_word_embeddings", "use_sliding_window")
_NAMES = ("model_type", "dtype", "torch_dtype")
_ROPES = ("rope_parameters", "rope_scaling")
_ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "deepseek_yarn")
# What get_rope reads of it, which takes null for a number.
_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "alpha",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attn_factor",
)
_ROPE_WEIGHTS = ("extrapolation_factor", "mscale", "mscale_all_dim")  # zero is none


def is_int(value: Any) -> bool:
    """JSON's integers, without its booleans."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """One that a float can hold."""
    return is_int(value) and abs(value) < 2**63 or isinstance(value, float) and math.isfinite(value)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def layer_problems(config: Mapping[str, Any], where: str = "") -> list[str]:
    """What is wrong with the fields that are there; which have to be, others say. where: put before a field's
    name."""
    check = _Check(config, where)
    for name in _SIZES:
        check(name, lambda v: is_int(v) and 1 <= v <= MAX_SIZE, f"a positive integer of at most {MAX_SIZE}")
    for name in _COUNTS:
        check(name, lambda v: is_int(v) and 0 <= v <= MAX_SIZE, f"an integer of 0 to {MAX_SIZE}")
    for name in _SWITCHES:
        check(name, lambda v: isinstance(v, bool), "true or false")
    for name in _NAMES:
        check(name, lambda v: isinstance(v, str), "a string")
    check("hidden_act", lambda v: v == "silu", "'silu'")
    check("rms_norm_eps", lambda v: is_number(v) and 0 < v < 1, "a number between 0 and 1")
    check("rope_theta", lambda v: is_number(v) and v > 0, "a positive number")
    check("quantization_config", lambda v: isinstance(v, dict), "an object")
    for name in _ROPES:
        check(name, lambda v: isinstance(v, dict), "an object")
    ropes = {name: config[name] for name in _ROPES if isinstance(config.get(name), dict)}
    if config.get("rope_theta", 1) is None and not any("rope_theta" in rope for rope in ropes.values()):
        check.problems.append(f"{where}rope_theta is null")
    for name, rope in ropes.items():
        check.problems += _rope_problems(rope, config.get("max_position_embeddings"), f"{where}{name}.")
    return check.problems


class _Check:
    """Collects what is wrong with the fields of an object, leaving out those that are not there."""

    def __init__(self, fields: Mapping[str, Any], where: str):
        self.problems: list[str] = []
        self._fields, self._where = fields, where

    def __call__(self, name: str, is_right: Callable[[Any], bool], wanted: str) -> None:
        value = self._fields.get(name)
        if value is not None and not is_right(value):
            self.problems.append(f"{self._where}{name} must be {wanted}, got {shown(value)}")


def _rope_problems(rope: Mapping[str, Any], positions: Any, where: str) -> list[str]:
    """positions: the config's `max_position_embeddings`."""
    check = _Check(rope, where)
    for name in ("rope_type", "type"):
        check(name, lambda v: v in _ROPE_KINDS, f"one of {', '.join(_ROPE_KINDS)}")
    for name in _ROPE_NUMBERS:
        check(name, lambda v: is_number(v) and v > 0, "a positive number")
    for name in _ROPE_WEIGHTS:
        check(name, lambda v: is_number(v) and v >= 0, "a number, not negative")
    check("truncate", lambda v: isinstance(v, bool), "true or false")
    check("use_fope", lambda v: v is False, "false: Fourier embeddings are not supported")
    nulls = [name for name in (*_ROPE_NUMBERS, *_ROPE_WEIGHTS) if rope.get(name, 0) is None]
    check.problems += [f"{where}{name} is null" for name in nulls]
    # One rotary embedding serves all layers: no parameters by layer type, no lists of anything but numbers.
    check.problems += [
        f"{where}{name} cannot be {shown(value)}" for name, value in rope.items() if not _is_plain(value)
    ]
    # Scaled, it has a table of `factor` times as many positions.
    length, factor = rope.get("original_max_position_embeddings", positions), rope.get("factor")
    if is_number(length) and is_number(factor) and length * factor > MAX_SIZE:
        check.problems.append(
            f"{where}factor is {factor} for {length} positions, more than {MAX_SIZE} in all"
        )
    return check.problems


def _is_plain(value: Any) -> bool:
    return all(map(is_number, value)) if isinstance(value, list) else not isinstance(value, dict)
