"""Field types and messages that the configs share, and the fields of a draft's layers.

transformers, SGLang and the layers read these fields as well, each with its own assumptions. A value that
does not meet them fails somewhere deep. The ranges here are accepted by all of them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeGuard, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo

MAX_LAYERS = 10_000  # far beyond any model; keeps a garbled config from being allocated for
MAX_PROBLEMS = 20  # shown

Positive = Annotated[int, Field(ge=1)]
NumLayers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
LayerIds = Annotated[tuple[int, ...], Field(min_length=1, strict=False)]  # a list in JSON

# Pydantic's types of errors in the words of JSON.
_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "a non-empty list",
    "dict_type": "an object",
    "model_type": "an object",
}


class DraftConfigError(ValueError):
    """A draft checkpoint that cannot be served. The message names up to MAX_PROBLEMS faults."""

    def __init__(self, checkpoint: str, problems: Sequence[str]):
        self.problems = tuple(problems)
        listed = [*problems[:MAX_PROBLEMS]]
        if len(problems) > len(listed):
            listed.append(f"and {len(problems) - len(listed)} more")
        super().__init__(f"DFLASH draft {checkpoint!r} cannot be served:\n  - " + "\n  - ".join(listed))


class StrictModel(BaseModel):
    """A frozen model of JSON: no conversions between types, no infinity or NaN."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, validate_default=True)


Model = TypeVar("Model", bound=StrictModel)
Shapes = dict[str, tuple[int, ...]]

MAX_SIZE = 2**24  # far beyond any model's width or length; keeps a garbled config from being allocated for

Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Count = Annotated[int, Field(ge=0, le=MAX_SIZE)]  # zero is none
Above0 = Annotated[float, Field(gt=0, lt=2**63)]
From0 = Annotated[float, Field(ge=0, lt=2**63)]  # zero is none
RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "deepseek_yarn"]


def short_repr(value: Any) -> str:
    """Return the value's `repr`, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def problems_of(error: ValidationError, names: Mapping[str, str] | None = None) -> list[str]:
    """List what is wrong, a line for each field.

    `names` are the names in the file, if different.
    """
    problems = []
    for fault in error.errors(include_url=False):
        first, *rest = map(str, fault["loc"])
        name = ".".join(((names or {}).get(first, first), *rest))
        kind = fault["type"]
        if kind == "missing":
            problems.append(f"{name} is missing")
        elif kind == "value_error":  # raised by a validator of ours
            problems.append(f"{name} {fault['ctx']['error']}")
        else:
            message = re.sub(r"^\w+ should", "must", fault["msg"])
            wanted = f"must be {_WANTED[kind]}" if kind in _WANTED else message
            problems.append(f"{name} {wanted}, got {short_repr(fault['input'])}")
    return problems


def validated(model: type[Model], values: Any, checkpoint: str) -> Model:
    """Read values of a checkpoint's config. Raises DraftConfigError naming all faults."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise DraftConfigError(checkpoint, problems_of(error)) from error


def is_int(value: Any) -> TypeGuard[int]:
    """Return True for an integer of JSON, which its booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def as_object(value: Any) -> Mapping[str, Any]:
    """Return an object of JSON; an empty one for any other value."""
    return value if isinstance(value, Mapping) else {}


def first_name(architectures: Any) -> str | None:
    """Return the first of a config's `architectures`; None if they are no list of names."""
    is_named = isinstance(architectures, list) and architectures and isinstance(architectures[0], str)
    return architectures[0] if is_named else None


# Defaults of transformers' Qwen3 and Llama, with which a draft without these fields was trained.
_ASSUMED = {
    "rope_theta": "10000",
    "rms_norm_eps": "1e-06",
    "head_dim": "the default of its model_type",
    "num_key_value_heads": "num_attention_heads",
}


def _is_number(value: Any) -> bool:
    return is_int(value) and abs(value) < 2**63 or isinstance(value, float) and math.isfinite(value)


def _plain(value: Any) -> Any:
    """Refuse what would be parameters by layer type: one rotary embedding serves all layers."""
    if isinstance(value, dict) or isinstance(value, list) and not all(map(_is_number, value)):
        raise ValueError(f"cannot be {short_repr(value)}")
    return value


class RopeFields(StrictModel):
    """Parameters of a rotary embedding, without null, which `get_rope` takes for a number."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_plain)]]

    rope_type: RopeKind | None = None
    type: RopeKind | None = None
    rope_theta: Above0 = 1.0
    factor: Above0 = 1.0
    alpha: Above0 = 1.0
    original_max_position_embeddings: Above0 = Field(0.0, validate_default=False)
    low_freq_factor: Above0 = 1.0
    high_freq_factor: Above0 = 1.0
    beta_fast: Above0 = 1.0
    beta_slow: Above0 = 1.0
    attn_factor: Above0 = 1.0
    extrapolation_factor: From0 = 0.0
    mscale: From0 = 0.0
    mscale_all_dim: From0 = 0.0
    truncate: bool | None = None
    use_fope: Literal[False] | None = None  # Fourier embeddings are not supported


def _check_table(rope: RopeFields | None, info: ValidationInfo) -> RopeFields | None:
    """Limit the table of a scaled embedding, which has `factor` times the positions."""
    if rope is not None and "factor" in rope.model_fields_set:
        positions = rope.original_max_position_embeddings or info.data.get("max_position_embeddings") or 0
        if positions * rope.factor > MAX_SIZE:
            raise ValueError(
                f"has factor {rope.factor} for {positions} positions, more than {MAX_SIZE} in all"
            )
    return rope


def _check_theta(value: float | None, info: ValidationInfo) -> float | None:
    """Check a base that is given, maybe by an embedding's own parameters too."""
    ropes = {name: rope for name in ROPES if (rope := info.data.get(name)) is not None}
    given = {name: rope.rope_theta for name, rope in ropes.items() if "rope_theta" in rope.model_fields_set}
    if value is None and not given:
        raise ValueError("is null")
    for name, theta in given.items():
        if value not in (None, theta):
            raise ValueError(f"is {value:g}, but {name}.rope_theta is {theta:g}")
    return value


def _check_one_rope(scaling: RopeFields | None, info: ValidationInfo) -> RopeFields | None:
    parameters = info.data.get("rope_parameters")
    if None not in (scaling, parameters) and scaling != parameters:
        raise ValueError("and rope_parameters are both given, and differ")
    return scaling


ROPES = ("rope_parameters", "rope_scaling")
Rope = Annotated[RopeFields | None, AfterValidator(_check_table)]


def _check_dtype(value: str) -> str:
    import torch

    if not isinstance(getattr(torch, value.removeprefix("torch."), None), torch.dtype):
        raise ValueError(f"is {short_repr(value)}, which is no type of PyTorch's")
    return value


DType = Annotated[str, AfterValidator(_check_dtype)]


def _check_kv_heads(value: int | None, info: ValidationInfo) -> int | None:
    heads = info.data.get("num_attention_heads")
    if value and heads and heads % value:
        raise ValueError(f"is {value}, which does not divide num_attention_heads, {heads}")
    return value


class LayerFields(StrictModel):
    """Fields of a draft's layers.

    Fields without a default must be there: transformers would take another model's value.
    """

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Annotated[Size | None, AfterValidator(_check_kv_heads)]
    vocab_size: Size
    head_dim: Annotated[Size, Field(multiple_of=2)] | None = None  # RoPE turns pairs
    max_position_embeddings: Size | None = None
    layer_types: list[str] | None = None
    sliding_window: Count | None = None
    max_window_layers: Count | None = None
    attention_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    use_sliding_window: bool | None = None
    model_type: str | None = None
    dtype: DType | None = None
    torch_dtype: DType | None = None
    hidden_act: Literal["silu"] | None = None
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] | None = None
    quantization_config: dict[str, Any] | None = None
    rope_parameters: Rope = None
    rope_scaling: Annotated[Rope, AfterValidator(_check_one_rope)] = None
    rope_theta: Annotated[Above0 | None, AfterValidator(_check_theta)] = Field(1.0, validate_default=False)


def assumed_values(config: Mapping[str, Any]) -> list[str]:
    """Say which values of a draft's layers are missing, and what transformers assumes."""
    ropes = [config.get(name) or {} for name in ROPES]
    places = {"rope_theta": [config, *ropes]}
    missing = (name for name in _ASSUMED if all(p.get(name) is None for p in places.get(name, [config])))
    return [f"{name} is missing, {_ASSUMED[name]} is assumed" for name in missing]


def layer_shapes(config: Any, input_size: int, has_qk_norm: bool) -> Shapes:
    """Return the shapes of a layer's tensors, whose attention reads `input_size` channels."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes: Shapes = {
        "self_attn.q_proj.weight": (q_size, input_size),
        "self_attn.k_proj.weight": (kv_size, input_size),
        "self_attn.v_proj.weight": (kv_size, input_size),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if has_qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    if getattr(config, "attention_bias", False):
        sizes = {"q": q_size, "k": kv_size, "v": kv_size, "o": hidden}
        shapes |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    return shapes
