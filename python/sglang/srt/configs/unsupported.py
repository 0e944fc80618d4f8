"""Drafts published as DFlash that we do not serve, by their fields; backends of drafts.

Read as a plain draft, a checkpoint with such fields would silently draft nonsense. Unknown fields are named
in a warning: they may be the trainer's notes.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang_dflash.srt.configs.json_values import as_object, first_name, short_repr
from sglang_dflash.srt.configs.layer_fields import ROPE_KINDS, ROPES

# Backends that run draft blocks, in order of preference if the target's own does not suit the draft.
DRAFT_ATTENTION_BACKENDS = ("flashinfer", "triton", "fa3", "fa4")
# Backends that read whole pages of the KV cache.
PAGED_BACKENDS = ("fa3", "fa4")
# In a verify forward, FlashInfer cuts a sliding layer's keys once per block, the others once per query.
COUNT_WINDOW_FROM_ANCHOR = ("flashinfer",)
COUNT_WINDOW_FROM_QUERY = ("triton", "fa3", "fa4")


def _as_json(value: Any) -> str:
    """Return a value by which types are told apart, but for 1 and 1.0, or for capitals."""
    is_whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if is_whole else value, default=str).lower()


class FieldRule(NamedTuple):
    """A field that makes the draft another model, unless its value is read.

    Attributes:
        means: what the other values stand for.
        read: the values that are read, of which null always is. They have types: true is not 1.
        is_list: whether the field lists such a value for each layer.
    """

    means: str
    read: tuple[Any, ...] = (None, False, 0)  # the draft has none
    is_list: bool = False

    def unread_values(self, value: Any) -> list[Any]:
        """Return the values in the field that are not read."""
        if value is not None and self.is_list != isinstance(value, list):
            return [value]
        values, read = value if isinstance(value, list) else [value], [None, *self.read]
        return [one for one in values if _as_json(one) not in map(_as_json, read)]

    @property
    def words(self) -> str:
        """Name the values that are read, as JSON has them."""
        return ("a list of " if self.is_list else "") + " or ".join(map(_as_json, self.read))


_DOMINO, _DSPARK, _LILICORR = "a Domino projector", "a Markov head (DSpark)", "a correction head (LiLiCorr)"
_DSPARK_HEAD = "another head of DSpark"
_PROJECTOR, _ATTENTION = "another projector behind the draft", "another kind of attention"
_SELECTOR, _MICRO = "this option of a candidate selector, under this architecture,", "a block of blocks"
_MLA, _KDA = "latent attention (MLA)", "linear attention (KDA)"
# Values that have a name.
NAMED = {"domino": _DOMINO, "dspark": _DSPARK, "lilicorr": _LILICORR, "mla": _MLA, "kda": _KDA}
_DOMINO_SIZES = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
# Fields of `dflash_config` and of the top level, by name, or by the beginning of several names.
FIELDS = {
    "projector_type": FieldRule(_PROJECTOR, ("dflash", "dflash2")),
    **dict.fromkeys(("prefix_gru", "shift_label", *_DOMINO_SIZES), FieldRule(_DOMINO)),
    "attention_mode": FieldRule(_ATTENTION, ("gqa", "mha")),
    "attention_modes": FieldRule(_ATTENTION, ("gqa", "mha"), is_list=True),
    "selector_": FieldRule(_SELECTOR),
    "lilicorr_": FieldRule(_LILICORR),
    "markov_": FieldRule(_DSPARK),
    **dict.fromkeys(
        ("enable_confidence_head", "use_confidence_head", "enable_correction_head"), FieldRule(_DSPARK_HEAD)
    ),
    "conv_": FieldRule("this option of convolutions, under this architecture,"),
    "attention_sink_bias": FieldRule("attention sinks"),
    "attention_value_scale": FieldRule("scaled values"),
    "use_gemma_norm": FieldRule("Gemma's RMSNorm"),
    "kv_lora_rank": FieldRule("the width of latent attention (MLA)"),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts"), FieldRule("a mixture of experts")
    ),
    **dict.fromkeys(
        ("rope_is_neox_style", "is_neox_style"), FieldRule("interleaved rotary embeddings", (True,))
    ),
    **dict.fromkeys(("micro_", "max_prev_micro_"), FieldRule(_MICRO)),
    "anchor_len": FieldRule(_MICRO, (1,)),
}
# Settings of a trainer, however they begin. They change no model: a warning names them.
_TRAINING = "loss|mask|noise|warmup|decay|dropout"
_OF_TRAINERS = re.compile(rf".*_(loss_weight|loss_decay\w*|({_TRAINING})(_\w+)?_(gamma|ratio))")
_ROTARY_SHARE = FieldRule("partial rotary embeddings", (1,))
# Of these, what the built-in does not run under DFLASH either.
BUILTIN_LACKS = (_PROJECTOR, _DSPARK, _DSPARK_HEAD, _SELECTOR, _ATTENTION, _MICRO, _MLA, _KDA)
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


def draft_problems(config: Mapping[str, Any], served: Collection[str]) -> list[Unsupported]:
    """List what we do not run of the draft that this config.json describes.

    `served` holds the fields of `dflash_config` that this draft's class reads. Faults that make a config
    invalid are left to the class.
    """
    architectures = config.get("architectures")
    if first_name(architectures) in BUILTIN_ARCHITECTURES:
        what = f"architectures is {short_repr(architectures)}: this draft is not supported"
        return [Unsupported(what, builtin_supports=True)]
    nested = as_object(config.get("dflash_config"))
    is_other = config.get("hidden_act") == "swigluoai"
    problems = ["hidden_act is 'swigluoai', which is not supported"] if is_other else []
    for field in ROPES:
        rope = as_object(config.get(field))
        kind = rope.get("rope_type") or rope.get("type")
        if isinstance(kind, str) and kind not in ROPE_KINDS:
            problems.append(f"{field} is of kind {short_repr(kind)}, which is not supported")
        if any(isinstance(value, Mapping) for value in rope.values()):
            problems.append(f"{field} by layer type: one embedding serves all layers")
    findings = variant_problems(config, nested, served)
    findings += [Unsupported(problem, builtin_supports=True) for problem in problems]
    names = "target_layer_ids", "num_target_layers"
    if all(fields.get(name) is None for fields in (nested, config) for name in names):
        what = "target_layer_ids is missing, and so is num_target_layers, over which to spread layers"
        findings.append(Unsupported(what, True, "the built-in spreads layers over the target it finds"))
    return findings


def variant_problems(
    config: Mapping[str, Any], nested: Mapping[str, Any], served: Collection[str]
) -> list[Unsupported]:
    """List what we do not run of a config and of its `nested` fields, the `served` aside."""
    named = [value for value in (nested.get("projector_type"), config.get("projector_type")) if value]
    if named and not any(map(FIELDS["projector_type"].unread_values, named)):
        served = {*served, *_DOMINO_SIZES}  # which the speculators library writes for every draft
    if 0 in (nested.get("markov_rank"), config.get("markov_rank")):
        served = {*served, "markov_head_type"}  # which the library writes for a draft without the head
    found = []
    for before, fields in (("dflash_config.", nested), ("", config)):
        for name, value in fields.items():
            field = None if name in served else field_of(name)
            if field is not None and (unread := field.unread_values(value)):
                means = NAMED.get(str(unread[0]).lower(), field.means)
                what = f"{before}{name} is {short_repr(value)}: {means} is not supported (only {field.words})"
                found.append(Unsupported(what, means not in BUILTIN_LACKS))
    return found + [Unsupported(problem, True) for problem in _rope_problems(config)]


def dspark_heads(config: Mapping[str, Any]) -> list[str]:
    """Name the heads of a DSpark draft, which has them unless its config.json denies them.

    Without any it is a plain DFlash draft. Sources: DeepSpec, and the speculators library's `dspark`.
    """
    nested = as_object(config.get("dflash_config"))
    found = []
    for name in ("markov_rank", "enable_confidence_head"):
        value = config.get(name) if nested.get(name) is None else nested[name]
        if value is None:
            found.append(f"{name} is missing")
        elif FIELDS["markov_" if name == "markov_rank" else name].unread_values(value):
            found.append(f"{name} is {short_repr(value)}")
    return found


def field_of(name: Any) -> FieldRule | None:
    """Look up a field in FIELDS, where a name that ends in "_" matches by prefix.

    Settings of a trainer have no rule.
    """
    if _OF_TRAINERS.fullmatch(str(name)):
        return None
    return next((f for e, f in FIELDS.items() if name == e or e[-1] == "_" and str(name).startswith(e)), None)


def _rope_problems(config: Mapping[str, Any]) -> list[str]:
    """Find rotary embeddings that turn only a part of a head.

    A config copied from a target may carry the target's own partial factor and M-RoPE sections. `rope_dim`,
    if given, is what was trained, and decides.
    """
    rope = as_object(config.get("rope_scaling") or config.get("rope_parameters"))
    head_dim, rope_dim = config.get("head_dim"), rope.get("rope_dim")
    factor, own = config.get("partial_rotary_factor"), rope.get("partial_rotary_factor")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = "partial rotary embeddings are not supported"
    if rope_dim is not None:
        rotated = f"rope_dim is {rope_dim!r} of a head of {head_dim!r}"
        return [] if rope_dim == head_dim else [f"{rotated}: {partial}"]
    problems = []
    if _ROTARY_SHARE.unread_values(factor):
        doubt = "copied from a target it says nothing of the draft, and doctor --measure tries both"
        problems.append(f"partial_rotary_factor is {factor!r}: {partial} (only 1); {doubt}")
    # transformers' Qwen3 layers, on which drafts are trained, do not read the factor of the default kind.
    if kind != "default" and _ROTARY_SHARE.unread_values(own):
        problems.append(f"partial_rotary_factor {own!r} under {kind}: {partial} (only 1)")
    return problems
