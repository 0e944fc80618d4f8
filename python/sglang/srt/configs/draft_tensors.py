"""Comparison of a draft checkpoint's tensors with those its config requires."""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.layer_fields import Shapes

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


def is_ignored(name: str) -> bool:
    """Return True for a tensor (named without `model.`) of no use to a server."""
    return name in IGNORED_TENSORS or "rotary_emb." in name


def tensor_problems(
    hf_config: Any, draft: DFlashDraftConfig, found: Mapping[str, tuple[int, ...]], is_whole: bool = True
) -> list[str]:
    """List every tensor that is missing, unknown or of another shape, one line each.

    found: shapes by name, without the ignored tensors. is_whole: no tensor may be missing.
    """
    expected, required = expected_tensors(hf_config, draft)
    return [
        *(f"{name}: this draft has no such tensor" for name in found if name not in expected),
        *(f"{name}: missing" for name in sorted(required - set(found)) if is_whole),
        *(
            f"{name} is {tuple(shape)}, expected {expected[name]}"
            for name, shape in found.items()
            if name in expected and tuple(shape) != expected[name]
        ),
    ]


def expected_tensors(hf_config: Any, draft: DFlashDraftConfig) -> tuple[Shapes, set[str]]:
    """Return the shapes of all tensors that may be there, and the names of those that must."""
    expected = draft.required_tensors(hf_config)
    required = set(expected)
    # Required if the draft has its own vocabulary, except for the embedding; else optional.
    expected["lm_head.weight"] = (draft.draft_vocab_size, draft.hidden_size)
    if draft.has_own_vocabulary:
        expected["d2t"] = (draft.draft_vocab_size,)
        required = set(expected)
    expected["embed_tokens.weight"] = (draft.vocab_size, draft.hidden_size)
    claims = {"lm_head.weight": draft.has_own_lm_head, "embed_tokens.weight": draft.has_embed_tokens}
    required |= {name for name, is_claimed in claims.items() if is_claimed}
    return expected, required


def d2t_problems(d2t: Any, draft: DFlashDraftConfig) -> list[str]:
    """Check the map of a draft's vocabulary.

    d2t: a tensor [draft_vocab_size] of integers, the offsets from draft ids to target ids. They must all be
    zero if the draft has the target's vocabulary.
    """
    import torch

    vocab_size = draft.vocab_size
    if not draft.has_own_vocabulary:
        moved = int(torch.count_nonzero(d2t))
        return [f"d2t maps {moved} tokens to others, but draft_vocab_size equals vocab_size"] if moved else []
    target_ids = d2t.long() + torch.arange(d2t.numel(), device=d2t.device).view(d2t.shape)
    if target_ids.numel() and (target_ids.min() < 0 or target_ids.max() >= vocab_size):
        return [f"d2t points outside the target's vocabulary of {vocab_size} tokens"]
    return []
