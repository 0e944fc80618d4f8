"""Drafts that are more than a DFlash block: published under the same architecture, with fields that change
the mathematics.

Read as a plain draft such a checkpoint would draft nonsense, without a word. Every such field is refused by
name; what else `dflash_config` holds that we do not know is named in a warning, as it may be a note of the
trainer's."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

# What `dflash_config` may hold and we read, or need not.
_KNOWN = {
    "block_size",
    "causal",
    "draft_vocab_size",
    "fc_norm",
    "final_logit_softcapping",
    "hc_mult",
    "is_causal",
    "layer_types",
    "mask_token",
    "mask_token_id",
    "norm_before_fc",
    "norm_before_residual",
    "num_target_layers",
    "output_multiplier",
    "qk_norm",
    "sample_from_anchor",
    "sliding_is_causal",
    "sliding_window",
    "speculative_tokens",
    "target_layer_ids",
    "window_from_anchor",
}

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
    "selector_": "a candidate selector (DFlash2)",
    "lilicorr_": "a correction head (LiLiCorr)",
    "markov_": "a Markov head (DSpark)",
    "conv_": "convolutions (DFlash2)",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "scaled values",
    "use_gemma_norm": "Gemma's RMSNorm",
    "kv_lora_rank": "latent attention (MLA)",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
}


def variant_problems(config: Any, nested: Mapping[str, Any], served: Sequence[str] = ()) -> list[str]:
    """What of a draft's config describes something we do not run. config: its top level; nested: its
    `dflash_config`, of which the fields in `served` are the caller's."""
    problems = []
    nested = {name: value for name, value in nested.items() if name not in served}
    for where, fields in (("dflash_config.", nested), ("", _top_level(config))):
        for name, value in fields.items():
            meaning = next((meaning for start, meaning in _REFUSED.items() if _is_named(name, start)), None)
            if meaning is not None and value:
                problems.append(f"{where}{name} is {value!r}: {meaning} is not supported")
    unknown = sorted(
        name
        for name in nested
        if name not in _KNOWN and not any(_is_named(name, start) for start in _REFUSED)
    )
    if unknown:
        logger.warning("DFLASH draft: dflash_config has fields that are not read: %s.", ", ".join(unknown))
    return problems + _rope_problems(config)


def _top_level(config: Any) -> Mapping[str, Any]:
    return {name: value for name, value in vars(config).items() if isinstance(name, str)}


def _is_named(name: Any, start: str) -> bool:
    return isinstance(name, str) and (name.startswith(start) if start.endswith("_") else name == start)


def _rope_problems(config: Any) -> list[str]:
    """Rotary embeddings that turn only a part of a head, or interleaved pairs. A config copied from a target
    may carry the target's own partial factor and M-RoPE sections: where `rope_dim` says what was trained, it
    counts."""
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
    for name in ("rope_is_neox_style", "is_neox_style"):
        if getattr(config, name, None) is False:
            problems.append(f"{name} is false: interleaved rotary embeddings are not supported")
    return problems
