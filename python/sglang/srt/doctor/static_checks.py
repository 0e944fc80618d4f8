"""Checks of a draft and its target by configs and tensor headers.

Reads no tensor but d2t, t2d and a few rows of both heads.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from sglang_dflash.srt.configs.checkpoint import FLOATS
from sglang_dflash.srt.configs.draft_config import spread_target_layer_ids
from sglang_dflash.srt.configs.draft_formats import unread_fields
from sglang_dflash.srt.configs.draft_kinds import differences
from sglang_dflash.srt.configs.draft_tensors import vocabulary_problems
from sglang_dflash.srt.configs.json_values import as_object
from sglang_dflash.srt.configs.speculators_format import is_speculators_config
from sglang_dflash.srt.doctor.pair import (
    FETCH_AGAIN,
    OR_OTHER_TARGET,
    OTHER_TARGET,
    Checkpoint,
    Finding,
    Pair,
    config_advice,
    fault,
    mask_tokens,
    note,
)

_SAMPLED_ROWS = 64
_SAME_ROWS = 0.9  # cosine; a frozen head gives 1, rows of other tokens about 0


def findings(pair: Pair) -> list[Finding]:
    """List all findings that need no model, faults first. Raises BadInput."""
    found = [*pair.config_faults, *_quantisation_findings(pair), *_provenance_findings(pair)]
    if unread := unread_fields(pair.draft.config):
        problem = f"config.json has fields that are not read: {', '.join(unread)}"
        found.append(note(problem, "If one of them changes the model, it is of another format"))
    if pair.is_parsed:
        found += _tensor_findings(pair)
        found += [*_vocabulary_findings(pair), *_head_findings(pair), *_mask_token_findings(pair)]
        found += [*_layer_id_findings(pair), *_rope_findings(pair)]
    return sorted(found, key=lambda finding: finding.level)


def _tensor_findings(pair: Pair) -> Iterator[Finding]:
    found = pair.examined_tensors
    for problem in found.problems:
        yield fault(f"tensor {problem}", FETCH_AGAIN, is_fatal=True)
    if found.unknown and not found.problems:
        problem = f"tensors that are not read: {', '.join(found.unknown)}"
        yield fault(problem, "If the draft was trained with them, it is of another format")


def _quantisation_findings(pair: Pair) -> Iterator[Finding]:
    if pair.is_parsed and (schemes := pair.examined_tensors.schemes):
        counts = Counter(scheme.name for scheme in schemes.values())
        listed = ", ".join(f"{count} layers {name}" for name, count in sorted(counts.items()))
        yield note(
            f"the draft is quantised ({listed})",
            "It is dequantised at load; --measure shows its acceptance",
        )
    configs = (vars(pair.text_config), pair.target.config)
    if any(config.get("quantization_config") for config in configs):
        yield note(
            "the target is quantised",
            "The draft was trained on the unquantised target's states, so some acceptance is lost",
        )


def _provenance_findings(pair: Pair) -> Iterator[Finding]:
    """Look for signs that the draft was trained for another target."""
    speculators = pair.draft.config.get("speculators_config")
    verifier = as_object(as_object(speculators).get("verifier"))
    made_for, actual = verifier.get("architectures"), pair.target.config.get("architectures")
    if isinstance(made_for, list) and made_for and actual and set(map(str, made_for)).isdisjoint(actual):
        problem = (
            f"the draft was made for a {'/'.join(map(str, made_for))}, the target is a {'/'.join(actual)}"
        )
        yield fault(problem, OTHER_TARGET)
    name = verifier.get("name_or_path")
    folder = str(pair.target.folder.resolve()).lower()
    if isinstance(name, str) and name.rstrip("/").rsplit("/", 1)[-1].lower() not in folder:
        yield note(
            f"the draft names {name!r} as its target, this one is {pair.target.name!r}",
            f"If it is not the same model under another name, {OR_OTHER_TARGET}",
        )
    if speculators is not None:
        return
    for key in ("bos_token_id", "eos_token_id"):  # z-lab's configs repeat the target's
        ours, theirs = pair.draft.config.get(key), getattr(pair.text_config, key, None)
        if ours is not None and theirs is not None and _as_set(ours).isdisjoint(_as_set(theirs)):
            problem = (
                f"{key} is {ours} in the draft and {theirs} in the target, as if it were made for another"
            )
            yield fault(problem, OTHER_TARGET)


def _vocabulary_findings(pair: Pair) -> Iterator[Finding]:
    config, tokens = pair.config, pair.text_config.vocab_size
    maps = pair.examined_tensors.maps
    d2t, t2d = maps.get("d2t"), maps.get("t2d")
    problems = vocabulary_problems(config, target_tokens=tokens, own=pair.draft.tensors, d2t=d2t, t2d=t2d)
    yield from (fault(problem, FETCH_AGAIN, is_fatal=True) for problem in problems)
    if difference := differences(config, pair.text_config).get("vocab_size"):
        yield fault(difference, f"Unless only rows were added or cut off, {OR_OTHER_TARGET}")
    if problems or d2t is None or not config.has_own_vocabulary:
        return
    ids = d2t.long() + torch.arange(len(d2t))
    duplicates = len(ids) - len(ids.unique())
    if duplicates:
        yield fault(f"d2t maps {duplicates} draft tokens to target tokens already taken", FETCH_AGAIN)
    elif t2d is not None and not torch.equal(t2d.nonzero()[:, 0], ids):
        yield fault("d2t maps to the tokens that t2d names, but in another order", FETCH_AGAIN)


def _head_findings(pair: Pair) -> Iterator[Finding]:
    """Compare the draft's head with the target's rows, at which training freezes it."""
    config, head = pair.config, "lm_head.weight"
    target_head = _target_head(pair)
    if target_head is None or not (_has_floats(pair.draft, head) and _has_floats(pair.target, target_head)):
        return
    rows = ids = torch.linspace(0, config.draft_vocab_size - 1, _SAMPLED_ROWS).long().unique()
    if config.has_own_vocabulary:
        offsets = pair.examined_tensors.maps.get("d2t")
        if offsets is None or len(offsets) != config.draft_vocab_size:
            return
        ids = rows + offsets[rows].long()
    drafts, targets = pair.draft.tensors[head].shape, pair.target.tensors[target_head].shape
    if drafts[1:] != targets[1:] or drafts[0] <= rows.max() or ids.min() < 0 or ids.max() >= targets[0]:
        return  # reported by other checks
    ours = pair.draft.tensors[head].values[rows.tolist()]
    theirs = pair.target.tensors[target_head].values[ids.tolist()]
    cosine = torch.cosine_similarity(ours.float(), theirs.float()).mean().item()
    if cosine < _SAME_ROWS:
        mapped = " that d2t maps them to: d2t is wrong, or" if config.has_own_vocabulary else ":"
        yield fault(
            f"the rows of the draft's head are not those of the target's tokens{mapped} it is another "
            f"target's (cosine {cosine:.2f}, a frozen head's is 1)",
            f"{FETCH_AGAIN}; or {OR_OTHER_TARGET}",
        )


def _mask_token_findings(pair: Pair) -> Iterator[Finding]:
    tokenizer, mask = pair.target.tokenizer, pair.config.mask_token_id
    if tokenizer is None:
        problem = "the target has no tokenizer.json, so the mask token has no name here"
        yield note(problem, "Check mask_token_id by hand")
        return
    named, name = mask_tokens(tokenizer), tokenizer.convert_ids_to_tokens(mask)
    if mask in named:
        return
    known = ", ".join(f"{name} is {i}" for i, name in named.items())
    if name is not None and mask not in tokenizer.added_tokens_decoder:
        otherwise = "Set the id of the token that the draft was trained with"
        yield fault(
            f"mask_token_id {mask} is an ordinary piece of text, {name!r}",
            f"In the target's tokenizer {known}" if named else otherwise,
        )
    elif named:
        yield note(
            f"mask_token_id {mask} is {name or 'no token of the tokenizer'}, though {known}",
            "Make sure that the draft was trained with it; --measure tries the other",
        )


def _layer_id_findings(pair: Pair) -> Iterator[Finding]:
    config, depth = pair.config, pair.text_config.num_hidden_layers
    ids = config.target_layer_ids
    if problem := differences(config, pair.text_config).get("num_target_layers"):
        yield fault(problem, config_advice(problem))
    if len(ids) < 2 or depth < 4 or config.num_target_layers not in (None, depth):
        return
    shift, sign, other, advice = 1, "plus", "the speculators library's", "subtract one from each"
    if is_speculators_config(pair.draft.config):
        shift, sign, other, advice = -1, "minus", "z-lab's", "add one to each"
    if ids == tuple(i + shift for i in spread_target_layer_ids(depth, len(ids))):
        yield note(
            f"the target layers, outputs of {list(ids)}, are the usual spread {sign} one, as if they were "
            f"counted in {other} way",
            f"If so, {advice}; --measure tells",
        )


def _rope_findings(pair: Pair) -> Iterator[Finding]:
    if len(pair.rotary_shares) > 1:
        share = min(pair.rotary_shares)
        problem = f"partial_rotary_factor is {share:g}, as the target's may be"
        yield note(
            problem, "The config cannot tell whether the draft was trained with it; --measure tries both"
        )
    ours, theirs = _rope_theta(pair.hf_config.to_dict()), _rope_theta(vars(pair.text_config))
    if ours is not None and theirs is not None and ours != theirs:
        problem = f"rope_theta is {ours:g} in the draft and {theirs:g} in the target"
        yield note(problem, "Make sure that it was trained so")


def _target_head(pair: Pair) -> str | None:
    """Return the name of the target's head; None if its tensors are not on this machine."""
    ends = (".lm_head.weight", ".embed_tokens.weight") if pair.target.has_tensors else ()
    return next((name for end in ends for name in pair.target.tensors if f".{name}".endswith(end)), None)


def _has_floats(checkpoint: Checkpoint, name: str) -> bool:
    return name in checkpoint.tensors and checkpoint.tensors[name].dtype in FLOATS


def _rope_theta(config: dict[str, Any]) -> float | None:
    return config.get("rope_theta") or as_object(config.get("rope_parameters")).get("rope_theta")


def _as_set(value: Any) -> set:
    return set(value) if isinstance(value, (list, tuple)) else {value}
