"""Comparison of the texts on the device with those on the host, under scheduled.py."""

import json
from pathlib import Path

from sglang_dflash.srt.speculative.cycle.observer import CycleObserver
from sglang_dflash.srt.speculative.drafters import copy_stats


class Watch(CycleObserver):
    """Compares texts after each cycle, and skips drafts as on a GPU.

    It decides by what is known a cycle or two late. path: file for the outcomes.
    """

    def __init__(self, path: Path):
        self.path = path

    def __call__(self, scheduler) -> None:
        """Register in the scheduler's process."""
        self.worker = scheduler.draft_worker
        self.worker.observers.append(self)
        self.worker.drafter.knows_matches_on_host = False
        copy_stats.WHOLE_CYCLES = 2  # sooner, and so more often wrongly

    def on_begun(self, batch):
        """Write the outcomes of the cycles known so far."""
        self.path.write_text(json.dumps(self.worker.copy_report))

    def on_committed(self, batch, cycle, aux_hidden, accepted):
        """Compare the texts."""
        rows = batch.req_pool_indices.tolist(), accepted.committed.tolist()
        for req, slot, length in zip(batch.reqs, *rows, strict=True):
            known = [*req.origin_input_ids, *req.output_ids]  # under overlap a cycle behind
            assert len(known) <= length + 1 or req.finished()
            known = known[: length + 1]
            text = self.worker.drafter.history[slot, : len(known)].tolist()
            assert text == known, f"request {req.rid}"
