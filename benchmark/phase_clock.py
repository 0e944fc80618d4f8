"""Time the phases of a cycle in a server: an observer for SGLANG_DFLASH_OBSERVERS=phase_clock:PhaseClock."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.observer import CycleObserver


class PhaseClock(CycleObserver):
    """Wall time per phase of the cycle on the host. On CUDA, which it runs ahead of, that is launch time.

    PHASE_TIMES names the file that totals are written to every few cycles, as JSON.
    """

    _WRITE_EVERY = 32

    def __init__(self) -> None:
        self._path = os.environ["PHASE_TIMES"]
        self._seconds: dict[str, float] = {}
        self._cycles = self._rows = 0
        self._last = 0.0

    def on_begun(self, batch: Any) -> None:
        self._last = time.perf_counter()

    def on_length_chosen(self, batch: Any, verify_len: int) -> None:
        self._end("prepare")

    def on_drafted(self, batch: Any, cycle: Cycle, block: DraftBlock) -> None:
        self._end("draft")

    def on_verified(self, batch: Any, block: DraftBlock, logits: torch.Tensor) -> None:
        self._end("verify")

    def on_accepted(self, batch: Any, cycle: Cycle, accepted: AcceptedBlocks) -> None:
        self._end("accept")

    def on_committed(
        self, batch: Any, cycle: Cycle, aux_hidden: torch.Tensor | None, accepted: AcceptedBlocks
    ) -> None:
        self._end("commit")
        self._cycles += 1
        self._rows += cycle.bs
        if self._cycles % self._WRITE_EVERY == 0:
            totals = {"cycles": self._cycles, "rows": self._rows, "seconds": self._seconds}
            partial = f"{self._path}.part"
            Path(partial).write_text(json.dumps(totals))
            os.replace(partial, self._path)

    def _end(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
        self._last = now
