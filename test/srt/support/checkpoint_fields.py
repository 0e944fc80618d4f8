"""Valid speculators config.json files, and copies of them with one field changed."""

import copy

# As speculators 0.9.0 writes it for a default DFlash draft (all layers sliding), without unread fields.
GOOD = {
    "architectures": ["DFlashDraftModel"],
    "aux_hidden_state_layer_ids": [2, 5, 8, 11],
    "block_size": 8,
    "draft_vocab_size": 1024,
    "mask_token_id": 3,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "some/target"},
    },
    "speculators_model_type": "dflash",
    "target_hidden_size": None,
    "transformer_layer_config": {
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 512,
        "layer_types": ["sliding_attention", "sliding_attention"],
        "model_type": "qwen3",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 2048,
        "vocab_size": 2048,
    },
}

# The same for a DFlash2 draft.
GOOD_DFLASH2 = {
    **{key: value for key, value in GOOD.items() if key != "sliding_window_non_causal"},
    "architectures": ["DFlash2DraftModel"],
    "conv_group_size": 16,
    "conv_kernel_size": 2,
    "draft_vocab_size": 2048,
    "selector_rank": 32,
    "selector_top_k": 8,
    "speculators_config": GOOD["speculators_config"] | {"algorithm": "dflash2"},
    "speculators_model_type": "dflash2",
}

# The same for a P-EAGLE draft.
GOOD_PEAGLE = {
    **{
        key: GOOD[key]
        for key in ("draft_vocab_size", "mask_token_id", "target_hidden_size", "transformer_layer_config")
    },
    "architectures": ["PEagleDraftModel"],
    "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    "embed_requires_grad": True,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "speculators_config": GOOD["speculators_config"] | {"algorithm": "peagle"},
    "speculators_model_type": "peagle",
}


def changed(path: str, value=None, *, remove: bool = False, base: dict = GOOD) -> dict:
    """Return a good config with one field, named by a dotted path, changed or removed."""
    config = copy.deepcopy(base)
    *parents, last = path.split(".")
    owner = config
    for key in parents:
        owner = owner[int(key)] if isinstance(owner, list) else owner[key]
    if remove:
        del owner[last]
    else:
        owner[last] = value
    return config
