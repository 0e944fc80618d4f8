"""Which tensors a draft checkpoint holds, and in which shapes: from its config alone."""

from typing import Any

from sglang_dflash.srt.configs.dflash2_config import DFlash2DraftConfig
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.peagle_config import PEagleDraftConfig

# What the training library keeps of the target for itself.
IGNORED_TENSORS = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def is_ignored(name: str) -> bool:
    """Whether a tensor (without `model.` before its name) is of no use to a server."""
    return name in IGNORED_TENSORS or "rotary_emb." in name


def required_shapes(hf_config: Any, draft: DFlashDraftConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint must hold and its shape, the vocabulary's aside, before any fusing or
    tensor-parallel split."""
    hidden, num_aux = hf_config.hidden_size, len(draft.target_layer_ids)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, draft.aux_width), "norm.weight": (hidden,)}
    if isinstance(draft, PEagleDraftConfig):
        shapes["mask_hidden"] = (1, 1, num_aux * hidden)
        if draft.norm_before_fc:
            shapes["input_norm.weight"] = (num_aux * hidden,)
        if draft.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(num_aux)}
    else:
        shapes["hidden_norm.weight"] = (hidden,)
    if isinstance(draft, DFlash2DraftConfig):
        rank = draft.selector_rank
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        shapes |= {
            f"candidate_selector.{side}_codebook": (draft.vocab_size, rank)
            for side in ("predecessor", "successor")
        }
    for i in range(draft.num_hidden_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(hf_config, draft, i).items()}
    return shapes


def vocabulary_shapes(draft: DFlashDraftConfig) -> dict[str, tuple[int, ...]]:
    """What a checkpoint may bring of its own; required, but for the embedding, where its vocabulary is
    reduced."""
    shapes = {
        "embed_tokens.weight": (draft.vocab_size, draft.hidden_size),
        "lm_head.weight": (draft.draft_vocab_size, draft.hidden_size),
    }
    return shapes | ({"d2t": (draft.draft_vocab_size,)} if draft.has_own_vocabulary else {})


def tensor_problems(hf_config: Any, draft: DFlashDraftConfig, found: dict[str, tuple[int, ...]]) -> list[str]:
    """Every tensor that is missing, unknown or of another shape, one line each. found: shapes by name,
    ignored ones left out."""
    expected, optional = required_shapes(hf_config, draft), vocabulary_shapes(draft)
    required = set(expected) | set(optional if draft.has_own_vocabulary else ()) - {"embed_tokens.weight"}
    expected |= optional
    return [
        *(f"{name}: this draft has no such tensor" for name in found if name not in expected),
        *(f"{name}: missing" for name in sorted(required - set(found))),
        *(
            f"{name} is {tuple(shape)}, expected {expected[name]}"
            for name, shape in found.items()
            if name in expected and tuple(shape) != expected[name]
        ),
    ]


def d2t_problems(d2t: Any, vocab_size: int) -> list[str]:
    """d2t: a tensor [draft_vocab_size] of integers, the offsets from draft ids to target ids."""
    import torch

    target_ids = d2t.long() + torch.arange(d2t.numel(), device=d2t.device).view(d2t.shape)
    if target_ids.numel() and (target_ids.min() < 0 or target_ids.max() >= vocab_size):
        return [f"d2t points outside the target's vocabulary of {vocab_size} tokens"]
    return []


def _layer_shapes(config: Any, draft: DFlashDraftConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    is_peagle = isinstance(draft, PEagleDraftConfig)
    # P-EAGLE's first layer reads the token's embedding and the fused state side by side.
    wide = 2 * hidden if is_peagle and layer == 0 else hidden
    q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes = {
        "self_attn.q_proj.weight": (q_size, wide),
        "self_attn.k_proj.weight": (kv_size, wide),
        "self_attn.v_proj.weight": (kv_size, wide),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if not is_peagle or draft.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    if getattr(config, "attention_bias", False):
        shapes |= {
            f"self_attn.{p}_proj.bias": (size,)
            for p, size in zip("qkv", (q_size, kv_size, kv_size), strict=True)
        }
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if is_peagle and layer == 0:
        shapes["hidden_norm.weight"] = (hidden,)
    if isinstance(draft, DFlash2DraftConfig) and draft.conv_kernel_size:
        taps, groups = draft.conv_kernel_size, hidden // draft.conv_group_size
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{name}.base_kernel"] = (2, taps, hidden)
            shapes[f"{name}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    return shapes
