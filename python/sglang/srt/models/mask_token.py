"""What a checkpoint may say of its mask token beside its weights: a name to be looked up, an embedding in a
file of its own."""

from dataclasses import dataclass
from typing import Any

import torch

from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig, DraftConfigError

MASK_EMBEDDING_FILE = "mask_embedding.pt"


@dataclass(frozen=True, slots=True)
class MaskEmbedding:
    """vector: [hidden], on the CPU, in the dtype it was saved in."""

    token_id: int
    vector: torch.Tensor


def find_mask_token(draft: DFlashDraftConfig, tokenizer: Any, checkpoint: str = "draft") -> int:
    """The id of `draft.mask_token` in the target's tokenizer. One that it does not have is the next after its
    last, as adding it would make it: z-lab's own code adds it. Raises DraftConfigError where there is no such
    row."""
    if tokenizer is None:
        raise DraftConfigError(
            checkpoint,
            [
                f"dflash_config.mask_token names {draft.mask_token!r}, and there is no tokenizer to look it up in: give mask_token_id"
            ],
        )
    found = tokenizer.get_vocab().get(draft.mask_token, len(tokenizer))
    if found >= draft.vocab_size:
        raise DraftConfigError(
            checkpoint,
            [
                f"dflash_config.mask_token {draft.mask_token!r} is not in the target's tokenizer, and its embedding of "
                f"{draft.vocab_size} rows has none to spare"
            ],
        )
    return found


def read_mask_embedding(checkpoint: str, revision: str | None = None) -> MaskEmbedding | None:
    """What a checkpoint, a directory or a hub id, has in `mask_embedding.pt`. Raises DraftConfigError for one
    that we do not run."""
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
    saved = torch.load(path, map_location="cpu", weights_only=True)
    problems = []
    if (
        not isinstance(saved, dict)
        or not isinstance(saved.get("embedding"), torch.Tensor)
        or "mask_token_id" not in saved
    ):
        problems.append(f"{MASK_EMBEDDING_FILE} does not hold an embedding and its mask_token_id")
    elif saved.get("per_position"):
        problems.append(f"{MASK_EMBEDDING_FILE} has an embedding per position, which is not supported")
    if problems:
        raise DraftConfigError(checkpoint, problems)
    return MaskEmbedding(int(saved["mask_token_id"]), saved["embedding"].flatten())
