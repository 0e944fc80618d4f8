"""Choice of a draft's attention backend: one that does what the draft was trained with."""

import logging
from typing import Any

from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.target_fit import (
    COUNT_WINDOW_FROM_ANCHOR,
    COUNT_WINDOW_FROM_QUERY,
    DRAFT_ATTENTION_BACKENDS,
    PAGED_BACKENDS,
)

logger = logging.getLogger(__name__)


def choose_draft_attention(
    args: Any, target_backend: str, draft: DFlashDraftConfig, target_text_config: Any
) -> str:
    """Return the requested backend, else the target's prefill one, else the first that suits.

    A backend suits a draft that it runs as trained. If the requested one does not, a warning names the one
    that runs instead. Raises ValueError if none suits.
    """
    suited, unsuited = suited_backends(args, draft, target_text_config)
    requested = args.speculative_draft_attention_backend
    backend = requested or target_backend
    if backend in suited:
        return backend
    if not suited:
        raise ValueError(
            f"DFLASH's draft can run on no attention backend: {'; '.join(sorted(set(unsuited.values())))}."
        )
    logger.log(
        logging.WARNING if requested else logging.INFO,
        "DFLASH: the draft runs on attention backend %s, not on %s %s: %s.",
        suited[0],
        "the requested" if requested else "the target's",
        backend,
        unsuited.get(backend, "it does not run draft blocks"),
    )
    return suited[0]


def suited_backends(
    args: Any, draft: DFlashDraftConfig, target_text_config: Any
) -> tuple[list[str], dict[str, str]]:
    """Return the backends that run this draft as it was trained, and why others do not."""
    unsuited = _unsuited_backends(args, draft, target_text_config)
    return [backend for backend in DRAFT_ATTENTION_BACKENDS if backend not in unsuited], unsuited


def _unsuited_backends(args: Any, draft: DFlashDraftConfig, target_text_config: Any) -> dict[str, str]:
    """Return the backends that would not run this draft as it was trained, with the reasons."""
    found: dict[str, str] = {}
    context = args.context_length or getattr(target_text_config, "max_position_embeddings", None)
    if draft.has_sliding_layers and (context is None or context > draft.sliding_window):
        if draft.window_from_anchor:
            reason = "it counts sliding windows from the query, this draft from the anchor"
            found |= dict.fromkeys(COUNT_WINDOW_FROM_QUERY, reason)
        else:
            reason = "it counts sliding windows from the start of a block, this draft from the query"
            found |= dict.fromkeys(COUNT_WINDOW_FROM_ANCHOR, reason)
    if draft.shifts_request_table and (args.page_size or 1) > 1:
        reason = (
            f"it reads whole pages (--page-size {args.page_size}), and {draft.kind}'s table is the target's "
            "shifted by one slot"
        )
        found |= dict.fromkeys(PAGED_BACKENDS, reason)
    return found
