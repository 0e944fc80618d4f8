"""Assemble the drafter of a server."""

from typing import Any

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.models.dflash import DFlashDraftModel
from sglang_dflash.srt.models.dflash2 import DFlash2DraftModel
from sglang_dflash.srt.models.peagle import PEagleDraftModel
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.drafters.base import Drafter
from sglang_dflash.srt.speculative.drafters.copy_ahead import CopyAhead
from sglang_dflash.srt.speculative.drafters.copy_stats import CopyStats
from sglang_dflash.srt.speculative.drafters.dflash import DFlashDrafter
from sglang_dflash.srt.speculative.drafters.dflash2 import DFlash2Drafter
from sglang_dflash.srt.speculative.drafters.peagle import PEagleDrafter
from sglang_dflash.srt.speculative.scale_out.dp_attention import DraftRanks, SubgroupDrafter

_DRAFTERS = {
    DFlashDraftModel: DFlashDrafter,
    DFlash2DraftModel: DFlash2Drafter,
    PEagleDraftModel: PEagleDrafter,
}


def drafter_class(draft_model: Any) -> type:
    """Return the class of the innermost drafter."""
    return _DRAFTERS[type(draft_model)]


def build_drafter(
    draft_runner: Any, target_model: Any, block_size: int, ranks: DraftRanks, metrics: DFlashMetrics
) -> tuple[Drafter, CopyAhead | None]:
    """Build the drafter for a draft model, with everything around it that is enabled.

    Returns the outermost drafter, and the copying one if copies are enabled. Raises ValueError if the draft's
    ranks cannot borrow the target's layers."""
    ranks.check_target(target_model)
    drafter: Drafter = drafter_class(draft_runner.model)(draft_runner, target_model, block_size)
    if ranks.layout.local_dp:
        drafter = SubgroupDrafter(drafter, ranks.layout)
    if not DFlashOptions.COPY_AHEAD.get():
        return drafter, None
    copies = CopyAhead(drafter, block_size, CopyStats(metrics))
    return copies, copies
