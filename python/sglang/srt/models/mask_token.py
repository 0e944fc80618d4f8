"""Mask token of a checkpoint: a name to look up, or an embedding in a file."""

from dataclasses import dataclass
from typing import Any

import torch

from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig, DraftConfigError

MASK_EMBEDDING_FILE = "mask_embedding.pt"


@dataclass(frozen=True, slots=True)
class MaskEmbedding:
    """Embedding [hidden] of a mask token, on the CPU, in the saved dtype."""

    token_id: int
    vector: torch.Tensor


def find_mask_token(
    draft: DFlashDraftConfig, tokenizer: Any, checkpoint: str = "draft", target_tokens: int | None = None
) -> int:
    """Return the id of `draft.mask_token` in the target's tokenizer.

    A token that the tokenizer lacks gets the id after its last, as z-lab's code adds it. `target_tokens` is
    the size of the target's vocabulary, or None if it is the draft's.

    Raises:
        DraftConfigError: the embedding has no such row, or there is no tokenizer.
    """
    rows = target_tokens or draft.vocab_size
    name = f"dflash_config.mask_token {draft.mask_token!r}"
    if tokenizer is None:
        raise DraftConfigError(
            checkpoint, [f"{name}: there is no tokenizer to look it up in, give mask_token_id"]
        )
    found = tokenizer.get_vocab().get(draft.mask_token, len(tokenizer))
    if found >= rows:
        full = f"its embedding of {rows} rows has none to spare"
        raise DraftConfigError(checkpoint, [f"{name} is not in the target's tokenizer, and {full}"])
    return found


def read_mask_embedding(checkpoint: str, revision: str | None = None) -> MaskEmbedding | None:
    """Read `mask_embedding.pt` of a folder or hub id; raise DraftConfigError if unusable."""
    from transformers.utils import cached_file

    path = cached_file(
        checkpoint,
        MASK_EMBEDDING_FILE,
        revision=revision,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if path is None:
        return None
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    saved = loaded if isinstance(loaded, dict) else {}
    if not isinstance(saved.get("embedding"), torch.Tensor) or "mask_token_id" not in saved:
        problem = f"{MASK_EMBEDDING_FILE} does not hold an embedding and its mask_token_id"
        raise DraftConfigError(checkpoint, [problem])
    if saved.get("per_position"):
        problem = f"{MASK_EMBEDDING_FILE} has an embedding per position, which is not supported"
        raise DraftConfigError(checkpoint, [problem])
    return MaskEmbedding(int(saved["mask_token_id"]), saved["embedding"].flatten())
