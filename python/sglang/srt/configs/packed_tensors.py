"""Comparison of a quantized draft's tensors with those its scheme requires."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sglang_dflash.srt.configs.draft_quantization import FLOATS, DraftQuantization, Scheme
from sglang_dflash.srt.configs.layer_fields import Shapes

# Last parts of the names of a packed module's tensors. A dense one has `weight` alone.
_PACKED_PARTS = (
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "input_global_scale",
    "k_scale",
    "v_scale",
)
_PACKED_TYPES = ("I8", "U8", "I32", "F8_E4M3", "F8_E5M2")
INTEGERS = ("I64", "I32")  # of the map of a vocabulary


@dataclass(frozen=True, slots=True)
class Header:
    """A tensor's element type by safetensors' name, its shape, and the file that holds it.

    `values` are the entries of `weight_shape`, if they were read.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    values: tuple[int, ...] | None = None

    @property
    def where(self) -> str:
        return f"{self.file}: " if self.file else ""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A checkpoint's tensors as a dense one would have them.

    Attributes:
        shapes: by name.
        schemes: of each packed module.
        problems: one line each. If there are any, the other fields are partial.
        unknown: names of tensors that the draft does not have.
    """

    shapes: Shapes = field(default_factory=dict)
    schemes: dict[str, Scheme] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def unpack_headers(
    quantization: DraftQuantization | None,
    headers: Mapping[str, Header],
    expected: Shapes,
    may_be_dense: bool = False,
) -> Unpacked:
    """Check all element types, and the shapes of packed modules.

    `headers` are the file's, by name without `model.`. `expected` are the shapes of a dense checkpoint, by
    name. With `may_be_dense`, any module may come as a plain weight.
    """
    found = Unpacked()
    modules: dict[str, dict[str, Header]] = {}
    for name, header in headers.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = header
    for module, parts in modules.items():
        shape = expected.get(f"{module}.weight")
        is_linear = shape is not None and len(shape) == 2
        if shape is not None and is_linear and _is_packed(parts):
            _unpack_module(quantization, module, parts, shape, found)
            continue
        dense = {f"{module}.{part}" if module else part: header for part, header in parts.items()}
        for name, header in dense.items():
            if name not in expected:
                found.unknown.append(name)
                continue
            wanted = INTEGERS if name == "d2t" else FLOATS
            if header.dtype not in wanted:
                listed = ", ".join(wanted)
                found.problems.append(f"{header.where}{name} is {header.dtype}, expected one of {listed}")
            found.shapes[name] = header.shape
        scheme = quantization.scheme_of(module) if quantization and _is_packable(module) else None
        if scheme is not None and is_linear and "weight" in parts and not may_be_dense:
            found.problems.append(
                f"{parts['weight'].where}{module}.weight is dense, but the quantization config names it "
                f"({scheme.name})"
            )
    return found


def _is_packed(parts: Mapping[str, Header]) -> bool:
    weight = parts.get("weight")
    return (
        any(part in _PACKED_PARTS for part in parts) or weight is not None and weight.dtype in _PACKED_TYPES
    )


def _is_packable(module: str) -> bool:
    """Return True for the projections that every writer packs unless told otherwise."""
    return module == "fc" or module.startswith("layers.") and (".self_attn." in module or ".mlp." in module)


def _unpack_module(
    quantization: DraftQuantization | None,
    module: str,
    parts: Mapping[str, Header],
    shape: tuple[int, ...],
    found: Unpacked,
) -> None:
    scheme = None if quantization is None else quantization.scheme_of(module)
    if scheme is None:
        part = next((p for p in parts if p in _PACKED_PARTS), "weight")
        found.problems.append(
            f"{parts[part].where}{module}.{part} ({parts[part].dtype}): the config names no quantization "
            "for it in its quantization_config"
        )
        return
    rows, columns = shape
    problem = scheme.shape_problem(rows, columns)
    if problem is not None:
        found.problems.append(f"{module} ({scheme.name}): {problem}")
        return
    known = scheme.parts(rows, columns) if (rows and columns) else {}
    where = next(iter(parts.values())).where
    before = len(found.problems)
    for part, header in parts.items():
        name = f"{header.where}{module}.{part}"
        if part == "bias":
            found.shapes[f"{module}.bias"] = header.shape
        elif part not in known:
            found.problems.append(f"{name}: {scheme.name} has no such tensor")
        elif header.dtype not in known[part].dtypes:
            listed = ", ".join(known[part].dtypes)
            found.problems.append(f"{name} is {header.dtype}, expected {listed} of {scheme.name}")
        elif header.shape not in known[part].shapes:
            listed = _listed(known[part].shapes)
            found.problems.append(f"{name} is {header.shape}, expected {listed} of {scheme.name}")
        elif header.values not in (None, shape):
            found.problems.append(f"{name} holds {header.values}, expected {shape}")
    missing = (name for name, part in known.items() if part.is_required and name not in parts)
    found.problems.extend(f"{where}{module}.{name}: missing, {scheme.name} needs it" for name in missing)
    if len(found.problems) == before:
        found.schemes[module] = scheme
        found.shapes[f"{module}.weight"] = shape


def _listed(shapes: Iterable[tuple[int, ...]]) -> str:
    return " or ".join(dict.fromkeys(map(str, shapes)))
