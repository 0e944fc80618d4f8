"""Checks of a draft checkpoint's files in the main process, before SGLang reads them.

A fault ends the start with an error that names the checkpoint, the file and the fault.
"""

import logging
import os
from typing import Any

from sglang_dflash.srt.configs.checkpoint import find_file, read_config, read_object, tensors_of
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.draft_formats import flat_config, unread_fields
from sglang_dflash.srt.configs.draft_tensors import examine_tensors, vocabulary_problems
from sglang_dflash.srt.configs.fields import DraftConfigError, assumed_values
from sglang_dflash.srt.environ import DFlashOptions

logger = logging.getLogger(__name__)


def check_draft_config(checkpoint: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return a draft's flat config; None without a config.json. Raises ValueError for faults."""
    path = find_file(checkpoint, revision)
    if path is None:
        return None  # SGLang has other formats, or reports it
    try:
        config = read_object(path)
    except ValueError as error:
        raise DraftConfigError(checkpoint, [str(error)]) from error
    return flat_config(config, checkpoint, DFlashOptions.TARGET_LAYERS.get())


def remarks_on_config(checkpoint: str, revision: str | None = None) -> list[str]:
    """Say which values of layers config.json lacks, and which of its fields are not read."""
    flat, config = check_draft_config(checkpoint, revision), read_config(checkpoint, revision)
    if flat is None or config is None:
        return []
    unread = ", ".join(unread_fields(config))
    return [
        *assumed_values(flat),
        *([f"config.json has fields that are not read: {unread}"] if unread else ()),
    ]


def are_files_read(args: Any) -> bool:
    """Return True if the load format reads the checkpoint's files as they are."""
    return (args.speculative_draft_load_format or args.load_format) in ("auto", "safetensors", "pt")


def check_draft_tensors(
    checkpoint: str, hf_config: Any, draft: DFlashDraftConfig, target_tokens: int | None = None
) -> None:
    """Raise DraftConfigError naming each tensor of a local checkpoint that does not fit.

    The loader checks a hub id, whose files need not be here yet. `target_tokens` is the size of the target's
    vocabulary, or None if it is the draft's.
    """
    if not os.path.isdir(os.path.expanduser(checkpoint)):
        return
    found = examine_tensors(hf_config, draft, tensors_of(checkpoint), checkpoint)
    tokens = draft.vocab_size if target_tokens is None else target_tokens
    if problems := [*found.problems, *vocabulary_problems(draft, tokens, found.shapes, **found.maps)]:
        raise DraftConfigError(checkpoint, [*remarks_on_config(checkpoint), *draft.assumed(), *problems])
