"""Ranks, layers, graph memory and request rows that the target and the draft share."""

import logging
from typing import Any

from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

logger = logging.getLogger(__name__)

# The draft's graphs and their workspaces take a few hundred MB. Without them a step still runs.
DRAFT_GRAPHS_NEED_GB = 1.0


def check_borrowed_layers(draft_ranks: Any, target_model: Any) -> None:
    """Raise ValueError if a layer that the draft borrows is missing, or on other ranks."""
    head = getattr(target_model, "lm_head", None)
    if head is None:
        raise ValueError(
            f"DFLASH borrows the LM head of the target, and {type(target_model).__name__} has none."
        )
    if not draft_ranks.local_dp:
        return
    for name, layer in ("embedding", target_model.get_input_embeddings()), ("LM head", head):
        # A plain embedding is whole on every rank.
        if getattr(unwrap_lora_layer(layer), "tp_size", draft_ranks.attn_tp_size) != draft_ranks.attn_tp_size:
            raise ValueError(
                f"DFLASH with DP attention does not support {type(target_model).__name__}: its {name} is "
                "split over all ranks, and the draft that borrows it is on the ranks that share requests."
            )


def has_room_for_draft_graphs(tp_sync: Any, device: str, gpu_id: int) -> bool:
    """Return whether enough memory is left for the draft's CUDA graphs, the same on all ranks."""
    if device != "cuda":
        return True  # SGLang knows whether such a device has any
    free = tp_sync.available_memory_gb(
        SpecTpSyncSite.DFLASH_MEM, device, gpu_id, group=get_parallel().tp_group
    )
    if free < DRAFT_GRAPHS_NEED_GB:
        logger.warning(
            "DFLASH: the draft runs without CUDA graphs, as only %.2f GB of GPU memory are left for them "
            "(wanted: %.0f). A lower --mem-fraction-static makes room.",
            free,
            DRAFT_GRAPHS_NEED_GB,
        )
    return free >= DRAFT_GRAPHS_NEED_GB


def defer_row_reuse(target_runner: Any) -> None:
    """Let SGLang wait for the whole step before it gives a row of a request to another one.

    SGLang otherwise rewrites rows as soon as the target's forward has read them. Call this after that
    forward, before work that reads or writes a table of SGLang's by request row.
    """
    target_runner.shared_read_done_event = None
