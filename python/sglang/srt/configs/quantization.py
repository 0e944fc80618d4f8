"""Quantized draft checkpoints: which modules are quantized, and in which tensors.

Read from `quantization_config`, `compression_config` or `hf_quant_config.json`, as the compressed-tensors
library, ModelOpt and plain FP8 exports (`quant_method` "fp8") write them. What a file says of activations, or
of the KV cache, which has the target's type, is not read.
"""

import fnmatch
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sglang_dflash.srt.configs.checkpoint import FLOATS, read_file
from sglang_dflash.srt.configs.fields import DraftConfigError
from sglang_dflash.srt.configs.json_values import is_int, short_repr

MODELOPT_FILE = "hf_quant_config.json"
# The attribute of a draft's config, in SGLang's hands, that holds the raw object.
ATTRIBUTE = "draft_quantization"

Shape = tuple[int, ...]
Patterns = tuple[re.Pattern[str], ...]
# Names of modules: the compressed-tensors library's; with `*`, as ModelOpt's; whole parts of names, from a
# dot to a dot, as in plain FP8 exports. In all of them an expression may stand behind "re:".
Syntax = Literal["library", "wildcards", "parts"]
Packing = Literal["pack-quantized", "int8", "fp8", "nvfp4", "mxfp4", "modelopt-nvfp4", "modelopt-fp8"]

# Element types by safetensors' names.
_FP8 = ("F8_E4M3",)
_MXFP4_SCALES = ("U8", "F8_E8M0")


class OtherMethodError(ValueError):
    """A quantization by a library whose files are not read here, but by SGLang."""


@dataclass(frozen=True, slots=True)
class SchemeTensor:
    """One tensor of a quantized module: its possible element types and shapes."""

    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage of a module's weight [rows, columns].

    Attributes:
        bits: of an integer.
        group: columns that share a scale, if strategy is "group".
        block: rows and columns that share a scale, if strategy is "block".
        has_order: whether `weight_g_idx` holds the group of each column.
    """

    packing: Packing
    bits: int
    strategy: str = "group"
    group: int = 0
    block: tuple[int, int] = (128, 128)
    is_symmetric: bool = True
    has_order: bool = False
    scale: str = "weight_scale"

    @property
    def name(self) -> str:
        """A short name for messages."""
        if self.packing == "pack-quantized":
            return f"W{self.bits}"
        return self.packing.upper().replace("MODELOPT-", "ModelOpt ")

    def shape_problem(self, rows: int, columns: int) -> str | None:
        """Return why a weight of this shape cannot be stored so, or None."""
        if self.strategy == "group" and not self.has_order and columns % self.group:
            return f"group size {self.group} does not divide its {columns} columns"
        if self.packing in ("nvfp4", "mxfp4", "modelopt-nvfp4") and columns % 2:
            return f"its {columns} columns cannot be packed in pairs"
        return None

    def parts(self, rows: int, columns: int) -> dict[str, SchemeTensor]:
        """Return the tensors of a weight of this shape, by the last part of their names."""
        scales = self._scale_shapes(rows, columns)
        one = ((1,), ())
        halves = SchemeTensor(("U8",), ((rows, columns // 2),))
        found: dict[str, SchemeTensor]
        if self.packing == "pack-quantized":
            words = math.ceil(columns * self.bits / 32)
            found = {
                "weight_packed": SchemeTensor(("I32",), ((rows, words),)),
                "weight_scale": SchemeTensor(FLOATS, scales),
                "weight_shape": SchemeTensor(("I64", "I32"), ((2,),)),
            }
            if not self.is_symmetric:
                zero_rows = math.ceil(rows * self.bits / 32)
                found["weight_zero_point"] = SchemeTensor(("I32",), ((zero_rows, *scales[0][1:]),))
            if self.has_order:
                found["weight_g_idx"] = SchemeTensor(("I32", "I64"), ((columns,),))
        elif self.packing in ("int8", "fp8", "modelopt-fp8"):
            stored = ("I8",) if self.packing == "int8" else _FP8
            found = {
                "weight": SchemeTensor(stored, ((rows, columns),)),
                self.scale: SchemeTensor(FLOATS, scales),
            }
            if not self.is_symmetric:
                found["weight_zero_point"] = SchemeTensor(("I8",), scales)
        elif self.packing == "mxfp4":
            found = {"weight_packed": halves, "weight_scale": SchemeTensor(_MXFP4_SCALES, scales)}
        else:  # ModelOpt's own names differ
            weight, factor = "weight_packed", "weight_global_scale"
            if self.packing == "modelopt-nvfp4":
                weight, factor = "weight", "weight_scale_2"
            found = {
                weight: halves,
                "weight_scale": SchemeTensor(_FP8, scales),
                factor: SchemeTensor(("F32",), one),
            }
        unread = SchemeTensor((*FLOATS, *_FP8), (*one, *scales), is_required=False)
        names = "input_scale", "input_global_scale", "k_scale", "v_scale"
        return found | dict.fromkeys(names, unread)

    def _scale_shapes(self, rows: int, columns: int) -> tuple[Shape, ...]:
        row_blocks, column_blocks = math.ceil(rows / self.block[0]), math.ceil(columns / self.block[1])
        if self.packing == "modelopt-fp8":
            blocks = (row_blocks, 1, column_blocks, 1), (row_blocks, column_blocks)
            return ((), (1,), (rows,), (rows, 1), *blocks)
        return {
            "tensor": ((1,), ()),
            "channel": ((rows, 1), (rows,)),
            "group": ((rows, math.ceil(columns / self.group) if self.group else 0),),
            "block": ((row_blocks, column_blocks),),
        }[self.strategy]


@dataclass(frozen=True, slots=True)
class DraftQuantization:
    """The schemes of a checkpoint.

    Attributes:
        method: as the file has it.
        names: values of --speculative-draft-model-quantization that name the method.
        groups: expressions of names of modules, and the scheme of the modules. None: they are dense.
        ignore: expressions of modules that are not quantized.
    """

    method: str
    names: tuple[str, ...]
    groups: tuple[tuple[Patterns, Scheme | None], ...]
    ignore: Patterns = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a linear module, named without `model.`; None if dense."""
        names = module, f"model.{module}"

        def are_named(patterns: Patterns) -> bool:
            return any(pattern.match(name) for pattern in patterns for name in names)

        groups = () if are_named(self.ignore) else self.groups
        return next((scheme for targets, scheme in groups if are_named(targets)), None)


ALL_LINEAR = (re.compile(""),)
_COMPRESSED_TENSORS = ("compressed-tensors", "compressed_tensors")  # names of the method
# The library's format, number of bits and type -> packing
_PACKINGS: dict[Any, Packing] = {
    ("pack-quantized", 4, "int"): "pack-quantized",
    ("pack-quantized", 8, "int"): "pack-quantized",
    ("int-quantized", 8, "int"): "int8",
    ("naive-quantized", 8, "int"): "int8",
    ("float-quantized", 8, "float"): "fp8",
    ("naive-quantized", 8, "float"): "fp8",
    ("nvfp4-pack-quantized", 4, "float"): "nvfp4",
    ("mxfp4-pack-quantized", 4, "float"): "mxfp4",
}


def flag_problem(named: str | None, quantization: DraftQuantization | None) -> str | None:
    """Say how `--speculative-draft-model-quantization` contradicts the file.

    Args:
        named: the flag's value. None: not given, or "unquant", which fits every file.
        quantization: the file's; None if it is dense.
    """
    flag = f"--speculative-draft-model-quantization {named}"
    if named is None:
        return None
    if quantization is None:
        return f"{flag} is not served for a draft that is not quantized: leave it out."
    if named not in quantization.names:
        method = f"the draft is quantized by {quantization.method}"
        return f"{flag}: {method}. Leave the flag out: its layers are dequantized at load."
    return None


def find_quantization(config: Mapping[str, Any], checkpoint: str, revision: str | None = None) -> Any:
    """Return the raw quantization object of a checkpoint with this config.json, or None.

    Raises:
        DraftConfigError: ModelOpt's file cannot be read.
    """
    for key in ("quantization_config", "compression_config", "quantization"):
        if config.get(key):
            return config[key]
    return read_file(checkpoint, revision, MODELOPT_FILE)


def quantization_of(hf_config: Any, checkpoint: str = "draft") -> DraftQuantization | None:
    """Read the quantization of a draft's config. Raises DraftConfigError if it is not served."""
    try:
        return read_quantization(getattr(hf_config, ATTRIBUTE, None))
    except ValueError as error:
        raise DraftConfigError(checkpoint, [f"quantization_config: {error}"]) from error


def read_quantization(raw: Any) -> DraftQuantization | None:
    """Read a checkpoint's quantization object, if any. Raises ValueError if it is not served."""
    if not raw:
        return None
    if not isinstance(raw, dict):
        raise ValueError(f"must be an object, got {type(raw).__name__}")
    inner = raw.get("quantization")
    if isinstance(inner, dict):  # hf_quant_config.json
        raw = {"quant_method": "modelopt", **inner}
    method = raw.get("quant_method") or ("modelopt" if raw.get("quant_algo") else None)
    if method is None and "bits" in raw:
        raise ValueError(f"{short_repr(raw)} is of an MLX file: convert it to PyTorch's safetensors")
    if method in _COMPRESSED_TENSORS:
        return _read_compressed_tensors(raw)
    if isinstance(method, str) and method.startswith("modelopt"):
        return _read_modelopt(raw)
    if method == "fp8":
        return _read_fp8(raw)
    raise OtherMethodError(
        f"quant_method {short_repr(method)} is not served, only compressed-tensors, modelopt and fp8"
    )


def _read_compressed_tensors(raw: Mapping[str, Any]) -> DraftQuantization:
    sparsity = raw.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise ValueError(f"sparsity_config {short_repr(sparsity)} is not served")
    if transforms := raw.get("transform_config"):
        raise ValueError(f"transform_config {short_repr(transforms)} is not served: weights are rotated")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(g, dict) for g in groups.values()):
        raise ValueError(f"config_groups must map names to groups, got {short_repr(groups)}")
    found = []
    for name, group in groups.items():
        try:
            scheme = _compressed_scheme(group.get("weights"), group.get("format") or raw.get("format"))
        except ValueError as error:
            raise ValueError(f"config_groups.{name} {error}") from error
        found.append((_patterns(group.get("targets"), f"config_groups.{name}.targets"), scheme))
    ignore = _patterns(raw.get("ignore"), "ignore")
    return DraftQuantization("compressed-tensors", _COMPRESSED_TENSORS, tuple(found), ignore)


def _compressed_scheme(weights: Any, packing: Any) -> Scheme | None:
    if weights is None:
        return None
    if not isinstance(weights, dict):
        raise ValueError(f"has weights {short_repr(weights)}, which must be an object")
    fields: Any = (weights.get(name) for name in ("num_bits", "type", "strategy", "group_size"))
    bits, kind, strategy, group = fields
    if strategy is None:
        strategy = "group" if group else "tensor"
    is_named = isinstance(packing, str) and isinstance(kind, str) and is_int(bits)
    found = _PACKINGS.get((packing, bits, kind)) if is_named else None
    if found is None:
        raise ValueError(
            f"has format {short_repr(packing)}, num_bits {short_repr(bits)}, type {short_repr(kind)}: "
            "not served"
        )
    if found in ("nvfp4", "mxfp4"):
        strategy, group = "group", group or {"nvfp4": 16, "mxfp4": 32}[found]
    if not isinstance(strategy, str) or strategy not in ("tensor", "channel", "group", "block"):
        raise ValueError(f"has strategy {short_repr(strategy)}: not served")
    if strategy == "group":
        _check_group(group)
    block = _block(weights.get("block_structure") or (128, 128), "block_structure")
    is_symmetric = weights.get("symmetric", True) is not False
    has_zero_points = found == "pack-quantized" and strategy != "tensor" or found == "int8"
    if not is_symmetric and not has_zero_points:
        raise ValueError(f"is asymmetric with strategy {strategy}: not served")
    has_order = weights.get("actorder") in ("group", "dynamic", True) and found == "pack-quantized"
    return Scheme(
        found,
        bits=bits,
        strategy=strategy,
        group=group if strategy == "group" else 0,
        block=block,
        is_symmetric=is_symmetric,
        has_order=has_order,
    )


def _check_group(size: Any) -> None:
    if not is_int(size) or size < 1:
        raise ValueError(f"has group_size {short_repr(size)}, which must be a positive integer")


def _block(value: Any, name: str) -> tuple[int, int]:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(is_int(size) and size > 0 for size in value):
        raise ValueError(f"has {name} {short_repr(value)}, which must be two positive integers")
    return value[0], value[1]


def _read_fp8(raw: Mapping[str, Any]) -> DraftQuantization:
    """Read an FP8 export without a library's name, as Qwen's and DeepSeek's.

    With blocks the scales are named `weight_scale_inv`, but are factors, too.
    """
    kind = raw.get("fmt") or "e4m3"
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"has fmt {short_repr(kind)}: not served, only e4m3")
    scheme = Scheme("fp8", 8, "tensor")
    if raw.get("weight_block_size") is not None:
        block = _block(raw["weight_block_size"], "weight_block_size")
        scheme = Scheme("fp8", bits=8, strategy="block", block=block, scale="weight_scale_inv")
    fields = ("ignored_layers", "modules_to_not_convert")
    ignore = tuple(name for field in fields for name in _patterns(raw.get(field), field, "parts"))
    return DraftQuantization("fp8", ("fp8",), ((ALL_LINEAR, scheme),), ignore)


# ModelOpt's quant_algo -> packing
_MODELOPT: dict[str, Packing] = {
    "NVFP4": "modelopt-nvfp4",
    "W4A16_NVFP4": "modelopt-nvfp4",
    "FP8": "modelopt-fp8",
    "FP8_PB_WO": "modelopt-fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt-fp8",
}


def _read_modelopt(raw: Mapping[str, Any]) -> DraftQuantization:
    ignore = _patterns(raw.get("exclude_modules") or raw.get("ignore"), "exclude_modules", "wildcards")
    if raw.get("quant_algo") == "MIXED_PRECISION":
        layers = raw.get("quantized_layers")
        if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
            raise ValueError(f"quantized_layers must map modules to objects, got {short_repr(layers)}")
        schemes = [
            (_patterns([name], "quantized_layers", "wildcards"), layer) for name, layer in layers.items()
        ]
    else:
        schemes = [(ALL_LINEAR, raw)]
    groups = tuple((targets, _modelopt_scheme(fields)) for targets, fields in schemes)
    names = ("modelopt", "modelopt_fp4", "modelopt_fp8", "modelopt_mixed")
    return DraftQuantization("modelopt", names, groups, ignore)


def _modelopt_scheme(fields: Mapping[str, Any]) -> Scheme:
    algorithm = fields.get("quant_algo")
    packing = _MODELOPT.get(algorithm) if isinstance(algorithm, str) else None
    if packing is None:
        raise ValueError(f"quant_algo {short_repr(algorithm)} is not served, only {', '.join(_MODELOPT)}")
    if packing == "modelopt-fp8":
        return Scheme(packing, 8, "tensor")
    group = fields.get("group_size") or 16
    _check_group(group)
    return Scheme(packing, 4, "group", group)


def _patterns(value: Any, where: str, syntax: Syntax = "library") -> Patterns:
    """Read names of modules as expressions. Raises ValueError if they are no list."""
    value = [] if value is None else value
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{where} must be a list of names, got {short_repr(value)}")
    found = []
    for name in value:
        if name.startswith("re:"):
            expression = name[3:]
        elif syntax == "wildcards":
            expression = fnmatch.translate(name)
        elif syntax == "parts":
            expression = rf"(.*\.)?{re.escape(name.strip('.'))}(\.|$)"
        else:
            expression = "" if name == "Linear" else re.escape(name) + "$"
        try:
            found.append(re.compile(expression))
        except re.error as error:
            raise ValueError(f"{where}: {short_repr(name)} is no regular expression: {error}") from error
    return tuple(found)
