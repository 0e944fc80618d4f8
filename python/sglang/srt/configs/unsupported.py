"""Drafts published as DFlash that we do not serve, by their fields; backends of drafts.

Read as a plain draft, a checkpoint with such fields would silently draft nonsense. Other unknown fields of
`dflash_config` are named in a warning, as they may be the trainer's notes.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from sglang_dflash.srt.configs.fields import RopeKind, as_object, first_name, shown

logger = logging.getLogger(__name__)

# Backends that run draft blocks, in order of preference if the target's own does not suit the draft.
DRAFT_ATTENTION_BACKENDS = ("flashinfer", "triton", "fa3", "fa4")
# Backends that read whole pages of the KV cache.
PAGED_BACKENDS = ("fa3", "fa4")
# In a verify forward, FlashInfer cuts a sliding layer's keys once per block, the others once per query.
COUNT_WINDOW_FROM_ANCHOR = ("flashinfer",)
COUNT_WINDOW_FROM_QUERY = ("triton", "fa3", "fa4")

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
# Other models of drafts that the built-in runs under DFLASH.
BUILTIN_ARCHITECTURES = ("DFlashLagunaForCausalLM", "MuseGlimmerAssistantModel")


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One reason why our implementation cannot run a server.

    Attributes:
        what: the field, flag or device, and what is not supported.
        builtin_supports: whether SGLang's built-in DFLASH runs such a server.
        drawback: what the built-in is known to do worse here, if anything.
    """

    what: str
    builtin_supports: bool = False
    drawback: str = ""


def draft_findings(config: Mapping[str, Any], served: Collection[str]) -> list[Unsupported]:
    """List what we do not run of the draft that this config.json describes.

    `served` holds the fields of `dflash_config` that this draft's class reads. Faults that make a config
    invalid are left to the class.
    """
    architectures = config.get("architectures")
    if first_name(architectures) in BUILTIN_ARCHITECTURES:
        return [Unsupported(f"architectures is {shown(architectures)}: this draft is not supported", True)]
    nested = as_object(config.get("dflash_config"))
    findings = variant_findings(config, nested, served)
    if config.get("hidden_act") == "swigluoai":
        findings.append(Unsupported("hidden_act is 'swigluoai', which is not supported", True))
    for field in ("rope_parameters", "rope_scaling"):
        rope = as_object(config.get(field))
        kind = rope.get("rope_type") or rope.get("type")
        if isinstance(kind, str) and kind not in get_args(RopeKind):
            findings.append(Unsupported(f"{field} is of kind {shown(kind)}, which is not supported", True))
        if any(isinstance(value, Mapping) for value in rope.values()):
            findings.append(Unsupported(f"{field} by layer type: one embedding serves all layers", True))
    names = "target_layer_ids", "num_target_layers"
    if all(fields.get(name) is None for fields in (nested, config) for name in names):
        what = "target_layer_ids is missing, and so is num_target_layers, over which to spread layers"
        findings.append(Unsupported(what, True, "the built-in spreads layers over the target it finds"))
    return findings


def variant_findings(
    config: Mapping[str, Any], nested: Mapping[str, Any], served: Collection[str]
) -> list[Unsupported]:
    """List what we do not run of a config and of its `nested` fields, the `served` aside."""
    fields = [(f"dflash_config.{name}", name, nested[name]) for name in nested if name not in served]
    fields += [(name, name, value) for name, value in config.items()]
    findings = [
        Unsupported(
            f"{place} is {shown(value)}: {_REFUSED[entry]} is not supported", entry not in _BUILTIN_LACKS
        )
        for place, name, value in fields
        if value and (entry := _entry(name)) is not None
    ]
    return findings + [Unsupported(problem, True) for problem in _rope_problems(config)]


def warn_of_unread_fields(nested: Mapping[str, Any], served: Collection[str]) -> None:
    """Name the fields of `dflash_config` that are neither read nor refused."""
    if unread := sorted(str(name) for name in nested if name not in served and _entry(name) is None):
        logger.warning("DFLASH draft: fields of dflash_config that are not read: %s.", ", ".join(unread))


def _entry(name: Any) -> str | None:
    """Return a field's entry in `_REFUSED`; one that ends in "_" is that of all that begin so."""
    return next((e for e in _REFUSED if name == e or e.endswith("_") and str(name).startswith(e)), None)


def _rope_problems(config: Mapping[str, Any]) -> list[str]:
    """Find rotary embeddings that turn only a part of a head, or interleaved pairs.

    A config copied from a target may carry the target's own partial factor and M-RoPE sections. `rope_dim`,
    if given, is what was trained, and decides.
    """
    problems = []
    rope = as_object(config.get("rope_scaling") or config.get("rope_parameters"))
    head_dim, rope_dim = config.get("head_dim"), rope.get("rope_dim")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = "partial rotary embeddings are not supported"
    if rope_dim not in (None, head_dim):
        problems.append(f"rope_dim is {rope_dim!r} of a head of {head_dim!r}: {partial}")
    if rope_dim is None and (factor := config.get("partial_rotary_factor")) not in (None, 1):
        problems.append(f"partial_rotary_factor is {factor!r}: {partial}")
    # transformers' Qwen3 layers, on which drafts are trained, do not read the factor of the default kind.
    if (
        rope_dim is None
        and kind != "default"
        and (factor := rope.get("partial_rotary_factor")) not in (None, 1)
    ):
        problems.append(f"partial_rotary_factor {factor!r} under {kind}: {partial}")
    for name in ("rope_is_neox_style", "is_neox_style"):
        if config.get(name) is False:
            problems.append(f"{name} is false: interleaved rotary embeddings are not supported")
    return problems
