"""What configs and tensor headers tell about a draft and its target. Reads no tensor but d2t, t2d and a few
rows of heads."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from sglang_dflash.srt.configs.dflash2_config import DFLASH2_ARCHITECTURES
from sglang_dflash.srt.configs.draft_config import (
    DFlashDraftConfig,
    DraftConfigError,
    check_draft_fits_target,
    spread_target_layer_ids,
)
from sglang_dflash.srt.configs.draft_tensors import is_ignored, tensor_problems
from sglang_dflash.srt.configs.peagle_config import read_draft_config
from sglang_dflash.srt.configs.speculators_format import (
    is_speculators_config,
    normalize,
    served_types,
    speculators_type,
)
from sglang_dflash.srt.doctor.checkpoint import BadInput, Checkpoint
from sglang_dflash.srt.doctor.findings import Finding, fault, note
from sglang_dflash.srt.models.mask_token import find_mask_token

FETCH_AGAIN = "Fetch the draft again, or take one whose tensors and config.json belong together"
OTHER_TARGET = "Serve the target that the draft was trained for, or a draft that was trained for this one"
_FLOATS = ("BF16", "F16", "F32", "F64")
_BLOCK_DRAFTS = {"DFlashDraftModel", *DFLASH2_ARCHITECTURES}
_SAMPLED_ROWS = 64
_SAME_ROWS = 0.9  # cosine; a frozen head gives 1, rows of other tokens about 0
# What to do about a problem of the config, by words of its message; the first match counts.
_CONFIG_ADVICE = (
    (
        "name the last layer",
        "If these ids come from a speculators checkpoint, which counts inputs, subtract one from each",
    ),
    ("leave the target's", OTHER_TARGET),
    ("names layer 0 or less", "If these ids come from a z-lab config, which counts outputs, add one to each"),
    ("ascending", "Put the ids in ascending order, and the columns of fc.weight with them"),
    ("outside the vocabulary", "Set the id of the token that the draft was trained with as mask"),
    ("but the target's", OTHER_TARGET),
)


def flat_config(draft: Checkpoint) -> dict[str, Any]:
    """The draft's config as a flat Qwen3 config. Raises BadInput for what is no draft of ours,
    DraftConfigError for one with faults."""
    config = draft.config
    if is_speculators_config(config):
        if speculators_type(config) not in served_types():
            raise BadInput(
                f"{draft.name}: a draft of kind {speculators_type(config)!r}; DFlash and P-EAGLE are examined here"
            )
        return normalize(config, draft.name)
    if not _BLOCK_DRAFTS.intersection(config.get("architectures") or ()):
        raise BadInput(
            f"{draft.name}: neither a DFlash nor a P-EAGLE draft, its architectures are {config.get('architectures')}"
        )
    return dict(config)


def text_config(target: Checkpoint) -> SimpleNamespace:
    """The target's language model's config. Raises BadInput if there is none."""
    if is_speculators_config(target.config) or _BLOCK_DRAFTS.intersection(
        target.config.get("architectures") or ()
    ):
        raise BadInput(f"{target.name}: is a draft; --model-path is the target")
    text = target.config.get("text_config") or target.config
    missing = [name for name in ("hidden_size", "vocab_size", "num_hidden_layers") if name not in text]
    if missing:
        raise BadInput(f"{target.name}: its config.json has no {', '.join(missing)}: not a language model's")
    return SimpleNamespace(**text)


class Pair:
    """A draft and its target, parsed once. draft_config, hf_config: None where the config cannot be
    understood."""

    def __init__(self, target: Checkpoint, draft: Checkpoint):
        from transformers import Qwen3Config

        self.target, self.draft = target, draft
        self.text_config = text_config(target)
        self.draft_config: DFlashDraftConfig | None = None
        self.hf_config = None
        self.config_faults: list[Finding] = []
        try:
            flat = flat_config(draft)
            self.hf_config = Qwen3Config(**flat)
            config = read_draft_config(self.hf_config, draft.name)
            if config.mask_token_id is None:
                config = replace(config, mask_token_id=find_mask_token(config, target.tokenizer, draft.name))
            self.draft_config = config
            check_draft_fits_target(config, self.text_config, draft.name)
        except DraftConfigError as error:
            self.config_faults = [
                fault(problem, _config_advice(problem), is_fatal=True) for problem in error.problems
            ]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            self.config_faults = [
                fault(f"config.json is not a Qwen3 draft's: {error}", FETCH_AGAIN, is_fatal=True)
            ]


def findings(pair: Pair) -> list[Finding]:
    """Everything that can be told without loading a model; faults first. Raises BadInput for files that
    cannot be read."""
    pair.draft.tensors  # an unreadable file is said before anything else
    found = [*pair.config_faults, *_quantisation(pair), *_provenance(pair)]
    if pair.draft_config is not None:
        for check in (_tensors, _vocabulary_mapping, _heads, _mask_token, _layer_ids, _rope, _dtype):
            found += check(pair)
    return sorted(found, key=lambda finding: finding.level)


def _config_advice(problem: str) -> str:
    if "missing" in problem and "num_target_layers" not in problem:
        return FETCH_AGAIN
    return next(
        (advice for words, advice in _CONFIG_ADVICE if words in problem),
        "Correct it in the draft's config.json",
    )


def _tensors(pair: Pair) -> Iterator[Finding]:
    truncated = set(pair.draft.truncated)
    if truncated:
        first, more = sorted(truncated)[0], len(truncated) - 1
        others = f" and {more} other tensor{'s' * (more > 1)}" if more else ""
        yield fault(
            f"{first}{others}: cut off, the file ends before its bytes do",
            "Fetch the draft again",
            is_fatal=True,
        )
    shapes = {name: tensor.shape for name, tensor in pair.draft.tensors.items() if not is_ignored(name)}
    if not pair.draft_config.has_own_vocabulary:
        shapes.pop("d2t", None)
    quantised = set(_quantised_tensors(pair.draft))
    for problem in tensor_problems(pair.hf_config, pair.draft_config, shapes):
        if problem.split(":")[0] not in quantised:
            yield fault(f"tensor {problem}", FETCH_AGAIN, is_fatal=True)


def _quantised_tensors(checkpoint: Checkpoint) -> list[str]:
    return [
        name
        for name, t in checkpoint.tensors.items()
        if t.dtype not in _FLOATS and name not in ("d2t", "t2d")
    ]


def _quantisation(pair: Pair) -> Iterator[Finding]:
    quantised = _quantised_tensors(pair.draft)
    method = pair.draft.config.get("quantization_config") or pair.draft.config.get("compression_config")
    if quantised or method:
        kind = method.get("quant_method", "unnamed method") if isinstance(method, dict) else ""
        detail = (
            f"{len(quantised)} tensors such as {quantised[0]} ({pair.draft.tensors[quantised[0]].dtype})"
            if quantised
            else ""
        )
        told = ", ".join(part for part in (f"quantization_config: {kind}" if method else "", detail) if part)
        yield fault(
            f"the draft is quantised ({told})",
            "Take the unquantised draft: DFLASH reads its K/V rows directly",
            True,
        )
    if pair.text_config.__dict__.get("quantization_config") or pair.target.config.get("quantization_config"):
        yield note(
            "the target is quantised",
            "Serve the draft with --speculative-draft-model-quantization unquant; it was trained on the unquantised target's "
            "states, so some acceptance is lost",
        )
        if any(pair.target.folder.glob("*.safetensors")) and "lm_head.weight" not in pair.draft.tensors:
            heads = [name for name in _quantised_tensors(pair.target) if "lm_head." in name]
            if heads:
                yield note(
                    f"the target's head, which the draft borrows, is quantised ({heads[0]})",
                    "A target whose quantisation leaves lm_head alone keeps more of the acceptance",
                )


def _provenance(pair: Pair) -> Iterator[Finding]:
    """Signs that the draft was trained for something else."""
    said = pair.draft.config.get("speculators_config")
    verifier = (
        said.get("verifier") if isinstance(said, dict) and isinstance(said.get("verifier"), dict) else {}
    )
    made_for, is_now = verifier.get("architectures"), pair.target.config.get("architectures")
    if made_for and is_now and set(made_for).isdisjoint(is_now):
        yield fault(
            f"the draft was made for a {'/'.join(made_for)}, the target is a {'/'.join(is_now)}", OTHER_TARGET
        )
    name = verifier.get("name_or_path")
    if (
        isinstance(name, str)
        and name.rstrip("/").rsplit("/", 1)[-1].lower() not in str(pair.target.folder.resolve()).lower()
    ):
        yield note(
            f"the draft names {name!r} as its target, this one is {pair.target.name!r}",
            "If it is not the same model under another name, " + OTHER_TARGET[0].lower() + OTHER_TARGET[1:],
        )
    if said is None:  # z-lab's configs repeat the target's
        for key in ("bos_token_id", "eos_token_id"):
            drafted, wanted = pair.draft.config.get(key), getattr(pair.text_config, key, None)
            if drafted is not None and wanted is not None and _as_set(drafted).isdisjoint(_as_set(wanted)):
                yield fault(
                    f"{key} is {drafted} in the draft and {wanted} in the target, as if it were made for another",
                    OTHER_TARGET,
                )


def _vocabulary_mapping(pair: Pair) -> Iterator[Finding]:
    draft, tensors = pair.draft_config, pair.draft.tensors
    if not draft.has_own_vocabulary or not _is_readable(pair.draft, "d2t"):
        return
    offsets = pair.draft.read("d2t").astype(np.int64)
    ids = offsets + np.arange(len(offsets))
    if ids.min() < 0 or ids.max() >= draft.vocab_size:
        absolute = (
            offsets.min() >= 0
            and offsets.max() < draft.vocab_size
            and len(set(offsets.tolist())) == len(offsets)
        )
        hint = (
            "; its entries look like target ids, where offsets (target id - draft id) are needed"
            if absolute
            else ""
        )
        yield fault(
            f"d2t points outside the target's vocabulary of {draft.vocab_size} tokens{hint}",
            FETCH_AGAIN,
            True,
        )
        return
    if len(set(ids.tolist())) < len(ids):
        yield fault(
            f"d2t maps {len(ids) - len(set(ids.tolist()))} draft tokens to target tokens already taken",
            FETCH_AGAIN,
        )
    elif "t2d" in tensors and _is_readable(pair.draft, "t2d"):
        kept = np.flatnonzero(pair.draft.read("t2d"))
        if not np.array_equal(kept, np.sort(ids)):
            yield fault("d2t and t2d speak of different target tokens", FETCH_AGAIN)
        elif not np.array_equal(kept, ids):
            yield fault("d2t maps to the tokens that t2d names, but in another order", FETCH_AGAIN)


def _heads(pair: Pair) -> Iterator[Finding]:
    """The training library freezes a draft's head at the target's rows: another target's, or a wrong d2t,
    shows there."""
    target_head = _target_head(pair)
    if (
        target_head is None
        or not _is_readable(pair.draft, "lm_head.weight")
        or not _is_readable(pair.target, target_head)
    ):
        return
    rows = np.unique(np.linspace(0, pair.draft_config.draft_vocab_size - 1, _SAMPLED_ROWS).astype(int))
    ids = rows
    if pair.draft_config.has_own_vocabulary:
        if (
            not _is_readable(pair.draft, "d2t")
            or len(pair.draft.read("d2t")) != pair.draft_config.draft_vocab_size
        ):
            return
        ids = rows + pair.draft.read("d2t")[rows].astype(np.int64)
    drafts, targets = pair.draft.tensors["lm_head.weight"].shape, pair.target.tensors[target_head].shape
    if drafts[1:] != targets[1:] or drafts[0] <= rows.max() or ids.min() < 0 or ids.max() >= targets[0]:
        return  # said elsewhere
    ours, theirs = pair.draft.read("lm_head.weight", rows), pair.target.read(target_head, ids)
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosine = float(np.mean((ours * theirs).sum(axis=1) / np.maximum(norms, 1e-12)))
    if cosine < _SAME_ROWS:
        mapped = " that d2t maps them to: d2t is wrong, or" if pair.draft_config.has_own_vocabulary else ":"
        yield fault(
            f"the rows of the draft's head are not those of the target's tokens{mapped} it is another target's "
            f"(cosine {cosine:.2f}, a frozen head's is 1)",
            f"{FETCH_AGAIN}; or {OTHER_TARGET[0].lower()}{OTHER_TARGET[1:]}",
        )


def _mask_token(pair: Pair) -> Iterator[Finding]:
    tokenizer, mask = pair.target.tokenizer, pair.draft_config.mask_token_id
    if tokenizer is None:
        yield note(
            "the target has no tokenizer.json, so the mask token has no name here",
            "Check mask_token_id by hand",
        )
        return
    named = tokenizer.mask_tokens()
    if mask in named:
        return
    known = ", ".join(f"{name} is {i}" for i, name in named.items())
    if tokenizer.is_ordinary(mask):
        hint = (
            f"In the target's tokenizer {known}"
            if named
            else "Set the id of the token that the draft was trained with"
        )
        yield fault(f"mask_token_id {mask} is an ordinary piece of text, {tokenizer.name(mask)!r}", hint)
    elif named:
        yield note(
            f"mask_token_id {mask} is {tokenizer.name(mask) or 'no token of the tokenizer'}, though {known}",
            "Make sure that the draft was trained with it; --measure tries the other",
        )


def _layer_ids(pair: Pair) -> Iterator[Finding]:
    ids, depth = pair.draft_config.target_layer_ids, pair.text_config.num_hidden_layers
    if len(ids) < 2 or depth < 4 or pair.draft_config.num_target_layers not in (None, depth):
        return
    usual = spread_target_layer_ids(depth, len(ids))
    is_speculators = is_speculators_config(pair.draft.config)
    shift = -1 if is_speculators else 1
    if ids == tuple(i + shift for i in usual):
        other, do = (
            ("z-lab's", "add one to each")
            if is_speculators
            else ("the speculators library's", "subtract one from each")
        )
        yield note(
            f"the target layers, outputs of {list(ids)}, are the usual spread {'minus' if is_speculators else 'plus'} one, as if "
            f"they were counted in {other} way",
            f"If so, {do}; --measure tells",
        )


def _rope(pair: Pair) -> Iterator[Finding]:
    drafted, wanted = _theta(pair.hf_config.to_dict()), _theta(vars(pair.text_config))
    if drafted is not None and wanted is not None and drafted != wanted:
        yield note(
            f"rope_theta is {drafted:g} in the draft and {wanted:g} in the target",
            "Make sure that it was trained so",
        )
    reach, wanted = (
        pair.hf_config.max_position_embeddings,
        getattr(pair.text_config, "max_position_embeddings", None),
    )
    if wanted is not None and reach < wanted:
        yield note(
            f"the draft was made for up to {reach} positions, the target for {wanted}",
            f"Expect less acceptance beyond {reach} tokens",
        )


def _dtype(pair: Pair) -> Iterator[Finding]:
    kinds = sorted(
        {t.dtype for name, t in pair.draft.tensors.items() if t.dtype in _FLOATS and not is_ignored(name)}
    )
    if len(kinds) > 1:
        yield note(
            f"the draft's tensors are of several types ({', '.join(kinds)})",
            "SGLang serves them all in one --dtype",
        )
    theirs = str(
        getattr(pair.text_config, "dtype", None) or getattr(pair.text_config, "torch_dtype", None) or ""
    )
    if kinds == ["F16"] and theirs == "bfloat16":
        yield note(
            "the draft is float16, the target bfloat16",
            "The draft runs in the target's dtype; export it in bfloat16",
        )


def _target_head(pair: Pair) -> str | None:
    """The name of the target's head among its tensors; None if they are not on this machine."""
    if not any(pair.target.folder.glob("*.safetensors")):
        return None
    tensors = pair.target.tensors
    for end in ("lm_head.weight", "embed_tokens.weight"):
        found = next((name for name in tensors if name == end or name.endswith(f".{end}")), None)
        if found:
            return found
    return None


def _is_readable(checkpoint: Checkpoint, name: str) -> bool:
    return (
        name in checkpoint.tensors
        and name not in checkpoint.truncated
        and (checkpoint.tensors[name].dtype in _FLOATS or name in ("d2t", "t2d"))
    )


def _theta(config: dict[str, Any]) -> float | None:
    rope = config.get("rope_parameters") or {}
    return config.get("rope_theta") or (rope.get("rope_theta") if isinstance(rope, dict) else None)


def _as_set(value: Any) -> set:
    return set(value) if isinstance(value, (list, tuple)) else {value}
