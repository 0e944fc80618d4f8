"""Bounds of committed lengths that the host knows before the device reports them.

Attention backends that plan on the host (FlashInfer) need lengths there. SGLang waits for them before each
step until the last one has accepted, and the device idles while the host plans and launches.

The host has processed every cycle but the last when it prepares a step. The last cycle adds from one token to
its verify length. So the host has bounds, and plans hold for every length within them
(`layers/attention/flashinfer_plans.py`). Lengths are exact after a prefill, after an anchor-only cycle and
after a pause.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.attention.flashinfer_plans import PlanCounts, accepts_bounds
from sglang_dflash.srt.speculative.dflash_info import UNKNOWN

logger = logging.getLogger(__name__)


def plans_within_bounds(backends: Sequence[Any], device: str) -> bool:
    """Return whether all backends plan with bounds; log if one waits for a GPU."""
    waiting = [type(backend).__name__ for backend in backends if not accepts_bounds(backend)]
    if waiting and device != "cpu":
        logger.info(
            "DFLASH: %s plans with exact lengths, so each cycle waits for the last one's accept lengths.",
            " and ".join(waiting),
        )
    return DFlashOptions.PLANS_WITHIN_BOUNDS.get() and not waiting


def bounds_of(batch: Any) -> tuple[list[int], list[int]] | None:
    """Return bounds of a decode batch's lengths, or None if the host knows none.

    They are upper bounds [bs], and by how much each length may be less [bs].
    """
    upper_bounds, spread = [], []
    for req, known in zip(batch.reqs, batch.spec_info.known_lens, strict=True):
        if known == UNKNOWN or req.kv.req_pool_idx is None:
            return None  # or it ended since the batch was chosen
        if isinstance(known, int):
            added, length = 0, known
        elif known.is_complete:
            added, length = 0, req.kv.kv_committed_len
        elif known.previous is None:
            added, length = known.plan.verify_len, req.kv.kv_committed_len
        else:
            return None  # two cycles are in flight
        upper_bounds.append(length + added)
        spread.append(max(added - 1, 0))
    return upper_bounds, spread


class KnownLengthsMap(FutureMap):
    """SGLang's relay between steps, which asks the device only for lengths without bounds."""

    needs_cpu_seq_lens: bool  # an attention backend plans with lengths on the host

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.counts = PlanCounts()

    def resolve_seq_lens_cpu(self, batch: Any, *options: Any, **named: Any) -> None:
        """Give a decode batch its lengths on the host.

        `stream_ordered` is an option from 0.5.23 on.
        """
        draft_input = batch.spec_info
        if not self.needs_cpu_seq_lens or getattr(draft_input, "future_indices", None) is None:
            return super().resolve_seq_lens_cpu(batch, *options, **named)
        bounds = bounds_of(batch)
        if bounds is None:
            if UNKNOWN not in draft_input.known_lens:
                self.counts.add("waits_for_lengths", "two cycles of a request are in flight, or it has ended")
            draft_input.spread = None
            return super().resolve_seq_lens_cpu(batch, *options, **named)
        self.needs_cpu_seq_lens = False
        try:
            super().resolve_seq_lens_cpu(batch, *options, **named)  # gathers them on the device
        finally:
            self.needs_cpu_seq_lens = True
        upper_bounds, draft_input.spread = bounds
        batch.seq_lens_cpu = torch.tensor(upper_bounds, dtype=torch.int64)
        batch.seq_lens_sum = sum(upper_bounds)
