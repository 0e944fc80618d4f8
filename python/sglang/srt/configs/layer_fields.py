"""The fields of a draft's layers.

transformers, SGLang and the layers read these fields as well, each with its own assumptions. A value that
does not meet them fails somewhere deep. The ranges here are accepted by all of them.
"""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.srt.configs.fields import Fields
from sglang_dflash.srt.configs.json_values import as_object, is_number, short_repr

MAX_SIZE = 2**24  # of a width or a length, far beyond any model's
ROPES = ("rope_parameters", "rope_scaling")
ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "deepseek_yarn")
# Parameters of a rotary embedding that must be positive, and those that may be zero.
_ROPE_FACTORS = (
    *("rope_theta", "factor", "alpha", "original_max_position_embeddings", "low_freq_factor"),
    *("high_freq_factor", "beta_fast", "beta_slow", "attn_factor"),
)
_ROPE_SCALES = ("extrapolation_factor", "mscale", "mscale_all_dim")
# Limits of values.
_SIZE: dict[str, Any] = {"least": 1, "most": MAX_SIZE}
_COUNT: dict[str, Any] = {"least": 0, "most": MAX_SIZE}  # zero is none
_EPSILON: dict[str, Any] = {"above": 0, "most": 0.1}
_POSITIVE: dict[str, Any] = {"above": 0, "most": 2**62}  # beyond it, integers of 64 bits overflow
_FROM_0: dict[str, Any] = {"least": 0, "most": 2**62}
# Defaults of transformers' Qwen3 and Llama, with which a draft without these fields was trained.
_ASSUMED = {
    "rope_theta": "10000",
    "rms_norm_eps": "1e-06",
    "head_dim": "the default of its model_type",
    "num_key_value_heads": "num_attention_heads",
}


def read_layers(layers: Fields) -> None:
    """Read the fields of a draft's layers, for their faults alone.

    A field without a default must be there: transformers would take another model's value.
    """
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size"):
        layers.take(name, int, **_SIZE)
    heads = layers.take("num_attention_heads", int, **_SIZE)
    kv_heads = layers.take("num_key_value_heads", int, None, **_SIZE)
    if "num_key_value_heads" not in layers.values:
        layers.fault("num_key_value_heads", "is missing")
    elif heads and kv_heads and heads % kv_heads:
        layers.fault(
            "num_key_value_heads", f"is {kv_heads}, which does not divide num_attention_heads, {heads}"
        )
    head_dim = layers.take("head_dim", int, None, **_SIZE)
    if head_dim and head_dim % 2:  # RoPE turns pairs
        layers.fault("head_dim", f"must be a multiple of 2, got {head_dim}")
    positions = layers.take("max_position_embeddings", int, None, **_SIZE)
    read_window(layers)
    for name in ("attention_bias", "tie_word_embeddings"):
        layers.take(name, bool, None)
    for name in ("dtype", "torch_dtype"):
        _check_dtype(layers, name, layers.take(name, str, None))
    layers.take("model_type", str, None)
    layers.take("hidden_act", str, None, one_of=("silu",))
    layers.take("rms_norm_eps", float, None, **_EPSILON)
    layers.take("quantization_config", dict, None)
    _read_ropes(layers, positions or 0)


def read_window(layers: Fields) -> dict[str, Any]:
    """Read the fields of sliding layers. Returns those that are given."""
    window = {
        "layer_types": layers.take_list("layer_types", str, None),
        "sliding_window": layers.take("sliding_window", int, None, **_COUNT),
        "use_sliding_window": layers.take("use_sliding_window", bool, None),
        "max_window_layers": layers.take("max_window_layers", int, None, **_COUNT),
    }
    return {name: value for name, value in window.items() if value is not None}


def _check_dtype(layers: Fields, name: str, value: str | None) -> None:
    import torch

    if value is not None and not isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
        layers.fault(name, f"is {short_repr(value)}, which is no type of PyTorch's")


def _read_ropes(layers: Fields, positions: int) -> None:
    """Read the base of a rotary embedding, and its parameters from either of two fields."""
    theta = layers.take("rope_theta", float, None, **_POSITIVE)
    bases = []
    for name in ROPES:
        numbers = read_rope(layers.take_object(name, None))
        if (base := numbers["rope_theta"]) is not None:
            bases.append(base)
            if theta not in (None, base):
                layers.fault("rope_theta", f"is {theta:g}, but {name}.rope_theta is {base:g}")
        trained, factor = numbers["original_max_position_embeddings"] or positions, numbers["factor"] or 0
        if trained * factor > MAX_SIZE:  # rows of a scaled embedding's table
            layers.fault(name, f"has factor {factor} for {trained} positions, more than {MAX_SIZE} in all")
    if "rope_theta" in layers.values and layers.values["rope_theta"] is None and not bases:
        layers.fault("rope_theta", "is null")
    parameters, scaling = (layers.values.get(name) for name in ROPES)
    if None not in (parameters, scaling) and parameters != scaling:
        layers.fault("rope_scaling", "and rope_parameters are both given, and differ")


def read_rope(rope: Fields) -> dict[str, Any]:
    """Read the parameters of a rotary embedding. Returns the numbers, None for absent ones."""
    for name in ("rope_type", "type"):
        rope.take(name, str, None, one_of=ROPE_KINDS)
    rope.take("truncate", bool, None)
    rope.take("use_fope", bool, None, one_of=(False,))  # Fourier embeddings are not supported
    numbers = {name: rope.take(name, float, None, **_POSITIVE) for name in _ROPE_FACTORS}
    numbers |= {name: rope.take(name, float, None, **_FROM_0) for name in _ROPE_SCALES}
    for name, value in rope.values.items():
        if name in numbers and value is None:
            rope.fault(name, "is null")  # which `get_rope` takes for a number
        # Such a value would be parameters by layer type. One rotary embedding serves all layers.
        is_nested = isinstance(value, dict) or isinstance(value, list) and not all(map(is_number, value))
        if name not in rope.names and is_nested:
            rope.fault(name, f"cannot be {short_repr(value)}")
    return numbers


def assumed_values(config: Mapping[str, Any]) -> list[str]:
    """Say which values of a draft's layers are missing, and what transformers assumes."""
    ropes = [as_object(config.get(name)) for name in ROPES]
    places = {"rope_theta": [config, *ropes]}
    missing = (name for name in _ASSUMED if all(p.get(name) is None for p in places.get(name, [config])))
    return [f"{name} is missing, {_ASSUMED[name]} is assumed" for name in missing]
