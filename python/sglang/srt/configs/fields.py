"""A cursor over the fields of a config, and the fields of a draft's layers.

transformers, SGLang and the layers read the fields of layers as well, each with its own assumptions. A value
that does not meet them fails somewhere deep. The ranges here are accepted by all of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

MAX_LAYERS = 10_000  # far beyond any model; keeps a garbled config from being allocated for
MAX_SIZE = 2**24  # of a width or a length, for the same reason
MAX_PROBLEMS = 20  # shown
Shapes = dict[str, tuple[int, ...]]


class DraftConfigError(ValueError):
    """A draft checkpoint that cannot be served. The message names up to MAX_PROBLEMS faults."""

    def __init__(self, checkpoint: str, problems: Sequence[str]):
        self.problems = tuple(problems)
        listed = [*problems[:MAX_PROBLEMS]]
        if len(problems) > len(listed):
            listed.append(f"and {len(problems) - len(listed)} more")
        super().__init__(f"DFLASH draft {checkpoint!r} cannot be served:\n  - " + "\n  - ".join(listed))


def short_repr(value: Any) -> str:
    """Return the value's `repr`, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_int(value: Any) -> TypeGuard[int]:
    """Return True for an integer of JSON, which its booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return is_int(value) and abs(value) < 2**63 or isinstance(value, float) and math.isfinite(value)


def as_object(value: Any) -> Mapping[str, Any]:
    """Return an object of JSON; an empty one for any other value."""
    return value if isinstance(value, Mapping) else {}


def first_name(architectures: Any) -> str | None:
    """Return the first of a config's `architectures`; None if they are no list of names."""
    is_named = isinstance(architectures, list) and architectures and isinstance(architectures[0], str)
    return architectures[0] if is_named else None


REQUIRED: Any = object()  # in place of a default
# Types of JSON, in Python's words: what a message calls one, and the test of a value.
_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: ("an integer", is_int),
    float: ("a number", _is_number),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("a string", lambda value: isinstance(value, str)),
    list: ("a list", lambda value: isinstance(value, list | tuple)),
    dict: ("an object", lambda value: isinstance(value, dict)),
}


class Fields:
    """A cursor over an object of config.json.

    A reader takes one field after another. Each fault becomes a line of `problems`, so that one error names
    all of them, and the field reads as None. Null is the same as absent.

    Attributes:
        values: the object.
        problems: shared with the cursors of the objects inside.
        where: the place of the object in the file, with a dot behind it. Empty for the file itself.
        names: the fields that were taken.
    """

    def __init__(self, values: Mapping[str, Any], problems: list[str], where: str = ""):
        self.values, self.problems, self.where = values, problems, where
        self.names: set[str] = set()

    def find(self, name: str) -> Any:
        """Return what a field holds, unchecked."""
        return self.values.get(name)

    def fault(self, name: str, text: str) -> None:
        self.problems.append(f"{self.where}{name} {text}")

    def take(self, name: str, kind: type, default: Any = REQUIRED, **limits: Any) -> Any:
        """Return the value of a field, or `default` if it is absent.

        Args:
            name: of the field.
            kind: its type in JSON. An integer is a number too.
            default: not checked. Without one the field must be there.
            limits: of the value, as `check` has them.
        """
        self.names.add(name)
        if (value := self.find(name)) is not None:
            return self.check(name, value, kind, **limits)
        if default is REQUIRED:
            self.fault(name, "is missing")
        return None if default is REQUIRED else default

    def take_list(self, name: str, kind: type, default: Any = REQUIRED, **limits: Any) -> Any:
        """Return a field that lists values, at least one. The arguments are those of `take`."""
        values = self.take(name, list, default)
        if values is None or values is default:
            return values
        if not values:
            self.fault(name, f"must be a non-empty list, got {values!r}")
        found = [self.check(f"{name}.{place}", value, kind, **limits) for place, value in enumerate(values)]
        return None if None in found else found or None

    def check(
        self,
        name: str,
        value: Any,
        kind: type,
        *,
        least: float | None = None,
        above: float | None = None,
        most: float | None = None,
        one_of: Sequence[Any] = (),
    ) -> Any:
        """Return a value; None, with a fault, if it is of another kind or beyond a limit.

        Args:
            name: of the field that holds the value.
            value: what the field holds.
            kind: as for `take`.
            least: the smallest value.
            above: a limit that the value must exceed.
            most: the largest value.
            one_of: all possible values, if they are few.
        """
        wanted, is_kind = _KINDS[kind]
        if one_of:
            *others, last = map(repr, one_of)
            wanted = f"{', '.join(others)} or {last}" if others else last
        if not is_kind(value) or one_of and value not in one_of:
            pass
        elif least is not None and value < least:
            wanted = f"greater than or equal to {least}"
        elif above is not None and value <= above:
            wanted = f"greater than {above}"
        elif most is not None and value > most:
            wanted = f"less than or equal to {most}"
        else:
            return value
        self.fault(name, f"must be {wanted}, got {short_repr(value)}")
        return None

    def take_object(self, name: str, default: Any = REQUIRED) -> "Fields":
        """Return a cursor over a field that is an object; one without fields if it is not."""
        value = self.take(name, dict, default)
        problems = self.problems if value is not None else []
        return Fields(value or {}, problems, f"{self.where}{name}.")

    def raise_problems(self, checkpoint: str) -> None:
        """Raise DraftConfigError if there are faults."""
        if self.problems:
            raise DraftConfigError(checkpoint, self.problems)


def names_taken(read: Callable[[Fields], Any]) -> set[str]:
    """Return the fields that a reader takes, by letting it read nothing."""
    fields = Fields({}, [])
    read(fields)
    return fields.names


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
        is_nested = isinstance(value, dict) or isinstance(value, list) and not all(map(_is_number, value))
        if name not in rope.names and is_nested:
            rope.fault(name, f"cannot be {short_repr(value)}")
    return numbers


def assumed_values(config: Mapping[str, Any]) -> list[str]:
    """Say which values of a draft's layers are missing, and what transformers assumes."""
    ropes = [as_object(config.get(name)) for name in ROPES]
    places = {"rope_theta": [config, *ropes]}
    missing = (name for name in _ASSUMED if all(p.get(name) is None for p in places.get(name, [config])))
    return [f"{name} is missing, {_ASSUMED[name]} is assumed" for name in missing]


def layer_shapes(config: Any, input_size: int, has_qk_norm: bool) -> Shapes:
    """Return the shapes of a layer's tensors, whose attention reads `input_size` channels."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    sizes = {"q": config.num_attention_heads * head_dim, "k": config.num_key_value_heads * head_dim}
    sizes |= {"v": sizes["k"], "o": hidden}
    shapes: Shapes = {
        **{f"self_attn.{name}_proj.weight": (sizes[name], input_size) for name in "qkv"},
        "self_attn.o_proj.weight": (hidden, sizes["q"]),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    if getattr(config, "attention_bias", False):
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    return shapes
