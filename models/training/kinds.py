"""Kinds of target: configuration, captured layers, shape of the draft.

Both are deep and thin. On a CPU a layer of this size costs mostly launch overhead, so depth makes a target
slow compared with its draft, as in a real pair.
"""

from dataclasses import dataclass

from corpus import END_OF_TEXT_ID, VOCAB_SIZE


@dataclass(frozen=True)
class Kind:
    """One bundled pair.

    Layer id i in `target_layer_ids` is the OUTPUT of layer i: transformers' hidden_states[i + 1].
    """

    name: str
    family: str  # as the model card says it
    target_config: dict
    target_layer_ids: tuple[int, ...]
    draft_layers: int
    # The final norm multiplies by 1 + weight instead of weight.
    zero_centered_norm: bool = False


SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT_ID,
    "pad_token_id": END_OF_TEXT_ID,
}

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_theta": 10000.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 12,
    "layer_types": ["full_attention"] * 12,
    **SHARED,
}

# Text only and flat. SGLang reads full_attention_interval, transformers layer_types; likewise rope_theta and
# partial_rotary_factor beside rope_parameters. No mrope_section: positions stay plain.
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 192,
    "intermediate_size": 352,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_ssm_dtype": "float32",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    **SHARED,
}

KINDS = {
    kind.name: kind
    for kind in (
        Kind("qwen3", "Qwen3", QWEN3, (1, 4, 7, 10), draft_layers=3),
        Kind("qwen3_5", "Qwen3.5", QWEN3_5, (1, 3, 6), draft_layers=2, zero_centered_norm=True),
    )
}


def kind_of(target_config: dict) -> Kind:
    """Return the kind whose `model_type` a target's config.json names."""
    return next(
        kind for kind in KINDS.values() if kind.target_config["model_type"] == target_config["model_type"]
    )
