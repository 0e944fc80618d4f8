"""Comparison of a draft checkpoint's tensors with the config."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_dflash.srt.configs.checkpoint import FLOATS, INTEGERS, StoredTensor
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.fields import Shapes
from sglang_dflash.srt.configs.quantization import DraftQuantization, Scheme, quantization_of

_QUANTIZED_TYPES = ("I8", "U8", "I32", "F8_E4M3", "F8_E5M2")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# A row for each target id. Rows beyond the vocabulary are padding.
_ROWS_BY_ID = (
    EMBEDDING,
    "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook",
)
_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale")
VOCABULARY_MAPS = ("d2t", "t2d")
# What a file is that lacks this tensor.
_LACKED_BY = {"mask_hidden": ", as in an EAGLE-3 checkpoint, which cannot draft in parallel"}
# The training library's own copies of the target's tensors.
IGNORED_TENSORS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


# Other names of a draft's tensors: EAGLE-3's first layer, and the native exports of Muse's DFlash draft.
_ALIASES = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}


def canonical_name(name: str) -> str:
    """Return our name of a checkpoint's tensor."""
    name = name.removeprefix("model.")
    for alias, ours in _ALIASES.items():
        if name.startswith(alias):
            return ours + name.removeprefix(alias)
    return name


def _is_quantized_part(part: str) -> bool:
    """Return True for the last part of a name that only a quantized module's tensors have."""
    return part.startswith("weight_") or part.endswith("_scale")


def is_ignored(name: str) -> bool:
    """Return True for a tensor (named without `model.`) of no use to a server."""
    return name in IGNORED_TENSORS or "rotary_emb." in name


@dataclass(frozen=True, slots=True)
class ExaminedTensors:
    """A checkpoint's tensors as a dense one would have them.

    Attributes:
        shapes: by name.
        schemes: of each quantized module.
        maps: `d2t` and `t2d`, as far as they are there.
        problems: one line each. If there are any, the other fields are partial.
        unknown: names of tensors that the draft does not have.
    """

    shapes: Shapes = field(default_factory=dict)
    schemes: dict[str, Scheme] = field(default_factory=dict)
    maps: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def examine_tensors(
    hf_config: Any,
    draft: DFlashDraftConfig,
    tensors: Iterable[tuple[str, StoredTensor]],
    checkpoint: str = "draft",
    is_update: bool = False,
) -> ExaminedTensors:
    """Compare a checkpoint's tensors with the tensors that the config requires.

    Args:
        hf_config: the draft's, with the sizes of its layers.
        draft: its config.
        tensors: by their names in the file.
        checkpoint: its name, for errors of the quantization.
        is_update: nothing need be there, and any module may be dense.

    Returns:
        The tensors without ignored ones. Problems name each tensor that is missing, there twice, or of
        another type or shape, or whose values no writer means. Then they name unknown ones too.
    """
    quantization = quantization_of(hf_config, checkpoint)
    expected, required = expected_tensors(hf_config, draft)
    found, read = ExaminedTensors(), dict[str, StoredTensor]()
    try:
        for full_name, stored in tensors:
            name = canonical_name(full_name)
            if name in read:
                twice = f"which is in {read[name].file} too" if stored.file else "which is there twice"
                found.problems.append(f"{stored.where}{full_name} stands for {name}, {twice}")
            read[name] = stored
            if name in VOCABULARY_MAPS and stored.shape and stored.dtype in (*INTEGERS, "BOOL"):
                found.maps[name] = stored.values[...]
            elif not is_ignored(name) and (len(stored.shape) == 1 or name.rpartition(".")[2] in _SCALES):
                problems = value_problems(name, stored.values[...])
                found.problems.extend(f"{stored.where}{problem}" for problem in problems)
    except ValueError as error:  # a file that cannot be read
        found.problems.append(str(error))
        return found
    modules: dict[str, dict[str, StoredTensor]] = {}
    for name, stored in read.items():
        if not is_ignored(name) and (name != "d2t" or draft.has_own_vocabulary):
            module, _, part = name.rpartition(".")
            modules.setdefault(module, {})[part] = stored
    before = len(found.problems)
    for module, parts in modules.items():
        _add_module(
            quantization, module=module, parts=parts, expected=expected, may_be_dense=is_update, found=found
        )
    if len(found.problems) == before:
        if not is_update:
            missing = sorted(required - set(found.shapes))
            found.problems.extend(f"{name}: missing{_LACKED_BY.get(name, '')}" for name in missing)
        found.problems.extend(
            f"{name} is {shape}, expected {expected[name]}"
            for name, shape in found.shapes.items()
            if not _fits(name, shape, expected[name], draft)
        )
    if found.problems:
        found.problems.extend(f"{name}: this draft has no such tensor" for name in found.unknown)
    return found


def _add_module(
    quantization: DraftQuantization | None,
    module: str,
    parts: Mapping[str, StoredTensor],
    expected: Shapes,
    may_be_dense: bool,
    found: ExaminedTensors,
) -> None:
    """Add a module's tensors, by the last part of their names, to what was found."""
    shape, weight = expected.get(f"{module}.weight", ()), parts.get("weight")
    is_linear = len(shape) == 2
    is_quantized = any(map(_is_quantized_part, parts)) or weight and weight.dtype in _QUANTIZED_TYPES
    scheme = quantization.scheme_of(module) if quantization is not None else None
    if is_linear and is_quantized:
        problems = list(_quantized_problems(scheme, module, parts, shape))
        found.problems.extend(problems)
        if "bias" in parts:
            found.shapes[f"{module}.bias"] = parts["bias"].shape
        if scheme is not None and not problems:
            found.schemes[module] = scheme
            found.shapes[f"{module}.weight"] = shape
        return
    for part, stored in parts.items():
        name = f"{module}.{part}" if module else part
        if name not in expected:
            found.unknown.append(name)
            continue
        wanted = INTEGERS if name == "d2t" else FLOATS
        if stored.dtype not in wanted:
            kind = f"{stored.dtype}, expected one of {', '.join(wanted)}"
            found.problems.append(f"{stored.where}{name} is {kind}")
        found.shapes[name] = stored.shape
    # The projections that every writer quantizes unless told otherwise.
    in_layer = module.startswith("layers.") and (".self_attn." in module or ".mlp." in module)
    must_be_quantized = is_linear and (module == "fc" or in_layer) and not may_be_dense
    if must_be_quantized and scheme is not None and weight is not None:
        dense = f"{weight.where}{module}.weight is dense"
        found.problems.append(f"{dense}, but the quantization config names it ({scheme.name})")


def _quantized_problems(
    scheme: Scheme | None, module: str, parts: Mapping[str, StoredTensor], shape: tuple[int, ...]
) -> Iterator[str]:
    """List faults of a quantized module's tensors, given by the last part of their names."""
    if scheme is None:
        part = next(filter(_is_quantized_part, parts), "weight")
        name = f"{parts[part].where}{module}.{part} ({parts[part].dtype})"
        yield f"{name}: the config names no quantization for it in its quantization_config"
        return
    rows, columns = shape
    if (problem := scheme.shape_problem(rows, columns)) is not None:
        yield f"{module} ({scheme.name}): {problem}"
        return
    known = scheme.parts(rows, columns) if (rows and columns) else {}
    for part, stored in parts.items():
        name = f"{stored.where}{module}.{part}"
        if part == "bias":
            continue
        if part not in known:
            yield f"{name}: {scheme.name} has no such tensor"
        elif stored.dtype not in known[part].dtypes:
            yield f"{name} is {stored.dtype}, expected {', '.join(known[part].dtypes)} of {scheme.name}"
        elif stored.shape not in known[part].shapes:
            listed = " or ".join(dict.fromkeys(map(str, known[part].shapes)))
            yield f"{name} is {stored.shape}, expected {listed} of {scheme.name}"
        elif part == "weight_shape" and (values := tuple(stored.values[...].tolist())) != shape:
            yield f"{name} holds {values}, expected {shape}"
    where = next(iter(parts.values())).where
    for part in (part for part in known if known[part].is_required and part not in parts):
        yield f"{where}{module}.{part}: missing, {scheme.name} needs it"


def _fits(name: str, shape: tuple[int, ...], expected: tuple[int, ...], draft: DFlashDraftConfig) -> bool:
    if shape == expected:
        return True
    is_by_target_id = name in _ROWS_BY_ID or name == HEAD and not draft.has_own_vocabulary
    return is_by_target_id and shape[1:] == expected[1:] and shape[:1] > expected[:1]  # padded


def expected_tensors(hf_config: Any, draft: DFlashDraftConfig) -> tuple[Shapes, set[str]]:
    """Return the shapes of all tensors that may be there, and the names of those that must."""
    expected = draft.required_tensors(hf_config)
    required = set(expected)
    # Required if the draft has its own vocabulary, except for the embedding; else optional.
    expected[HEAD] = (draft.draft_vocab_size, draft.hidden_size)
    if draft.has_own_vocabulary:
        expected["d2t"] = (draft.draft_vocab_size,)
        required = set(expected)
    expected[EMBEDDING] = (draft.vocab_size, draft.hidden_size)
    claims = {HEAD: draft.has_own_lm_head, EMBEDDING: draft.has_embed_tokens}
    required |= {name for name, is_claimed in claims.items() if is_claimed}
    return expected, required


def d2t_problems(
    d2t: Any, draft: DFlashDraftConfig, t2d: Any = None, target_tokens: int | None = None
) -> list[str]:
    """Check the map of a draft's vocabulary.

    Args:
        d2t: A tensor [draft_vocab_size] of integers, the offsets from draft ids to target ids. They must all
            be zero if the draft has the target's vocabulary.
        draft: The draft's config.
        t2d: A tensor [vocab_size], true for each target id that the draft has; None if the file has none.
        target_tokens: Size of the target's vocabulary; None if it is the draft's.
    """
    import torch

    if not draft.has_own_vocabulary:
        moved = int(torch.count_nonzero(d2t))
        return [f"d2t maps {moved} tokens to others, but draft_vocab_size equals vocab_size"] if moved else []
    offsets = d2t.long().flatten()
    ids = offsets + torch.arange(offsets.numel(), device=offsets.device)
    size = min(draft.vocab_size, target_tokens or draft.vocab_size)
    if ids.numel() and (ids.min() < 0 or ids.max() >= size):
        problem = f"d2t points outside the target's vocabulary of {size} tokens"
        if offsets.min() >= 0 and offsets.max() < size and len(offsets.unique()) == len(offsets):
            problem += "; its entries look like target ids, where offsets (target id - draft id) are needed"
        return [problem]
    if t2d is not None and not torch.equal(t2d.flatten().nonzero().flatten(), ids.unique()):
        return ["d2t and t2d name different target tokens"]
    return []


def vocabulary_problems(
    draft: DFlashDraftConfig, target_tokens: int, own: Collection[str], d2t: Any = None, t2d: Any = None
) -> list[str]:
    """List why a draft does not fit the target's vocabulary, which may have another size.

    A draft that borrows embedding and head fits: such a draft proposes the target's ids.

    Args:
        draft: Its config.
        target_tokens: Size of the target's vocabulary.
        own: Names of the draft's tensors.
        d2t: The map of the draft's vocabulary, see `d2t_problems`, or None.
        t2d: As there.
    """
    problems = [] if d2t is None else d2t_problems(d2t, draft, t2d, target_tokens)
    if draft.vocab_size == target_tokens:
        return problems
    lacks_rows = draft.vocab_size < target_tokens
    parts = (
        ("embedding", lacks_rows and EMBEDDING in own),
        ("head", HEAD in own and not draft.has_own_vocabulary),
        ("candidate selector", lacks_rows and draft.kind == "DFlash2"),
    )
    if unusable := [name for name, is_unusable in parts if is_unusable]:
        problems.append(
            f"vocab_size is {draft.vocab_size}, but the target's vocab_size is {target_tokens}, which the "
            f"draft's own {' and '.join(unusable)} cannot serve"
        )
    return problems


def value_problems(name: str, tensor: Any) -> list[str]:
    """List the values of a norm, a bias or a scale that no writer means."""
    import torch

    part = name.rpartition(".")[2]
    if tensor.dtype in (torch.int32, torch.int64, torch.bool):
        return []
    values = tensor.float()
    if tensor.dtype == torch.uint8:  # exponents, of which the last stands for NaN
        values = values.masked_fill(tensor == 255, torch.nan)
    if wrong := int((~values.isfinite()).sum()):
        return [f"{name} holds {wrong} values that are not finite"]
    if part in _SCALES and (wrong := int((values < 0).sum())):
        return [f"{name} holds {wrong} negative values"]
    if (part in _SCALES or name.endswith("norm.weight")) and not values.any():
        return [f"{name} is zero throughout"]
    # The largest weight of a module is 2688 over the one, or 2688 times the other.
    if part == "weight_global_scale" and values.max() < 1:
        return [f"{name} is {values.max():g}, as if it were a factor: this format has a divisor"]
    if part == "weight_scale_2" and values.min() > 1:
        return [f"{name} is {values.min():g}, as if it were a divisor: this format has a factor"]
    return []
