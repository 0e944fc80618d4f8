"""Drafts published as DFlash whose fields change the mathematics.

Read as a plain draft, such a checkpoint would silently draft nonsense. Every such field is named, with
whether SGLang's built-in DFLASH runs it. Other unknown fields of `dflash_config` are named in a warning, as
they may be the trainer's notes.
"""

import logging
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any, get_args

from sglang_dflash.srt.configs.layer_fields import RopeKind, is_int
from sglang_dflash.srt.configs.not_served import NotServed
from sglang_dflash.srt.configs.validation import shown

logger = logging.getLogger(__name__)

# field, or the beginning of several -> what it stands for. Absent, null, false and zero mean that the draft
# has none.
_REFUSED = {
    "projector_type": "a projector behind the draft (Domino)",
    "prefix_gru": "a Domino projector",
    "gru_hidden_dim": "a Domino projector",
    "emb_dim": "a Domino projector",
    "pure_draft_prefix_len": "a Domino projector",
    "shift_label": "a Domino projector",
    "attention_mode": "another kind of attention",
    "selector_": "this option of a candidate selector, under this architecture,",
    "lilicorr_": "a correction head (LiLiCorr)",
    "markov_": "a Markov head (DSpark)",
    "conv_": "this option of convolutions, under this architecture,",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "scaled values",
    "use_gemma_norm": "Gemma's RMSNorm",
    "kv_lora_rank": "latent attention (MLA)",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
}
# Of these, what the built-in does not run under DFLASH either.
_BUILTIN_LACKS = ("markov_", "selector_")
# Targets whose last layer SGLang captures. Others have no next layer, at whose input it would.
_CAPTURES_LAST_LAYER = (
    "BeamForCausalLM",
    "InklingForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "KimiK3LinearForCausalLM",
    "LagunaForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "MiMoV2FlashForCausalLM",
    "MiMoV2ForCausalLM",
    "MiniMaxM3SparseForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration",
    "MuseSparkForConditionalGeneration",
    "NemotronHForCausalLM",
)
# Other models of drafts that the built-in runs under DFLASH.
BUILTIN_ARCHITECTURES = ("DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel")


def variant_problems(config: Any, nested: Mapping[str, Any], served: Collection[str]) -> list[str]:
    """List the fields of a draft's config that describe something we do not run.

    config: its top level. nested: its `dflash_config`, of which `served` are the fields that are read.
    """
    findings, unread = _variant_findings(config, nested, served)
    if unread:
        names = ", ".join(sorted(unread))
        logger.warning("DFLASH draft: fields of dflash_config that are not read: %s.", names)
    return [finding.what for finding in findings]


def draft_findings(config: Mapping[str, Any], served: Collection[str]) -> list[NotServed]:
    """List what we do not run of the draft that this config.json describes.

    served: fields of `dflash_config` that this draft's class reads. Faults that make a config invalid are
    left to the class.
    """
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name in BUILTIN_ARCHITECTURES:
        return [NotServed(f"architectures is {shown(architectures)}: this draft is not supported", True)]
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    findings, _ = _variant_findings(SimpleNamespace(**config), nested, served)
    if config.get("hidden_act") == "swigluoai":
        findings.append(NotServed("hidden_act is 'swigluoai', which is not supported", True))
    for field in ("rope_parameters", "rope_scaling"):
        rope = config.get(field)
        if not isinstance(rope, Mapping):
            continue
        kind = rope.get("rope_type") or rope.get("type")
        if isinstance(kind, str) and kind not in get_args(RopeKind):
            findings.append(NotServed(f"{field} is of kind {shown(kind)}, which is not supported", True))
        if any(isinstance(value, Mapping) for value in rope.values()):
            findings.append(NotServed(f"{field} by layer type: one embedding serves all layers", True))
    return findings + _missing_findings(config, nested)


def _missing_findings(config: Mapping[str, Any], nested: Mapping[str, Any]) -> list[NotServed]:
    """Find missing fields for which the built-in has defaults."""

    def has(name: str) -> bool:
        return nested.get(name) is not None or config.get(name) is not None

    found = []
    if not has("block_size"):
        found.append(NotServed("block_size is missing", True, "the built-in assumes blocks of 16"))
    if not has("target_layer_ids") and not has("num_target_layers"):
        what = "target_layer_ids is missing, and so is num_target_layers, over which to spread layers"
        found.append(NotServed(what, True, "the built-in spreads layers over the target it finds"))
    if not has("mask_token_id") and not has("mask_token"):
        lost = "the built-in adds a mask token to the tokenizer"
        found.append(NotServed("dflash_config.mask_token_id is missing", True, lost))
    return found


def target_findings(config: Mapping[str, Any], target: Mapping[str, Any]) -> list[NotServed]:
    """List what ours does not run of a draft on this target. Both are a config.json."""
    layers = target.get("text_config") or target
    depth, trained_depth = layers.get("num_hidden_layers"), config.get("num_target_layers")
    nested = config.get("dflash_config")
    ids = (nested if isinstance(nested, Mapping) else config).get("target_layer_ids")
    found = []
    if is_int(trained_depth) and is_int(depth) and trained_depth != depth:
        text = f"num_target_layers is {trained_depth}, but the target's num_hidden_layers is {depth}"
        found.append(NotServed(text, True, "tokens drafted for another target are hardly ever kept"))
    if not isinstance(ids, list) or not ids or not all(map(is_int, ids)):
        return found
    if ids != sorted(ids) and len(set(ids)) == len(ids):
        text = f"target_layer_ids must be ascending, got {shown(ids)}"
        lost = "the built-in hands the layers to the draft in ascending order, not in the draft's"
        found.append(NotServed(text, True, lost))
    architecture = next(iter(target.get("architectures") or ()), None)
    if max(ids) + 1 == depth and architecture in _CAPTURES_LAST_LAYER:
        found.append(NotServed(f"target_layer_ids {shown(ids)} name the last layer", True))
    return found


def _variant_findings(
    config: Any, nested: Mapping[str, Any], served: Collection[str]
) -> tuple[list[NotServed], list[str]]:
    """Return what we do not run, and the names of fields that nobody reads."""
    findings, unread = [], []
    nested = {name: value for name, value in nested.items() if name not in served}
    for where, fields in (("dflash_config.", nested), ("", vars(config))):
        for name, value in fields.items():
            start = next((start for start in _REFUSED if _is_named(name, start)), None)
            if start is not None and value:
                what = f"{where}{name} is {shown(value)}: {_REFUSED[start]} is not supported"
                findings.append(NotServed(what, start not in _BUILTIN_LACKS))
            elif start is None and where:
                unread.append(name)
    findings += [NotServed(problem, True) for problem in _rope_problems(config)]
    return findings, unread


def _is_named(name: Any, start: str) -> bool:
    return isinstance(name, str) and (name.startswith(start) if start.endswith("_") else name == start)


def _rope_problems(config: Any) -> list[str]:
    """Find rotary embeddings that turn only a part of a head, or interleaved pairs.

    A config copied from a target may carry the target's own partial factor and M-RoPE sections. `rope_dim`,
    if given, is what was trained, and decides.
    """
    problems = []
    rope = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None)
    rope_dim = rope.get("rope_dim") if isinstance(rope, Mapping) else None
    head_dim = getattr(config, "head_dim", None)
    if rope_dim is not None and rope_dim != head_dim:
        problems.append(
            f"rope_dim is {rope_dim!r} of a head of {head_dim!r}: partial rotary embeddings are not supported"
        )
    partial = getattr(config, "partial_rotary_factor", None)
    if rope_dim is None and partial not in (None, 1, 1.0):
        problems.append(f"partial_rotary_factor is {partial!r}: partial rotary embeddings are not supported")
    fields = rope if isinstance(rope, Mapping) else {}
    nested = fields.get("partial_rotary_factor")
    if rope_dim is None and nested not in (None, 1, 1.0):
        kind = fields.get("rope_type") or fields.get("type") or "default"
        if kind == "default":  # transformers' Qwen3 layers, on which drafts are trained, do not read it
            logger.info("DFLASH draft: the RoPE's partial_rotary_factor, %s, is not read.", nested)
        else:
            problems.append(f"partial_rotary_factor {nested!r} under {kind} is not supported")
    for name in ("rope_is_neox_style", "is_neox_style"):
        if getattr(config, name, None) is False:
            problems.append(f"{name} is false: interleaved rotary embeddings are not supported")
    return problems
