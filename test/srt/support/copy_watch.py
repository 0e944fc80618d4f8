"""Comparison of the texts on the device with those on the host, and costs by rule, under scheduled.py."""

import json
from pathlib import Path

import numpy as np

from sglang_dflash.srt.speculative.cycle.observer import CycleObserver
from sglang_dflash.srt.speculative.drafters import copies
from sglang_dflash.srt.speculative.width.estimates import CostTable


class Outcomes(CycleObserver):
    """Writes what became of copied and drafted tokens to a file."""

    def __init__(self, path: Path):
        self.path = path

    def __call__(self, scheduler) -> None:
        """Register in the scheduler's process."""
        self.worker = scheduler.draft_worker
        self.worker.observers.append(self)

    def on_begun(self, batch):
        """Write the outcomes of the cycles known so far."""
        self.path.write_text(json.dumps(self.worker.copy_report))


class Watch(Outcomes):
    """Compares texts after each cycle, and skips drafts as on a GPU.

    It decides by what is known a cycle or two late.
    """

    def __call__(self, scheduler) -> None:
        """Register in the scheduler's process."""
        super().__call__(scheduler)
        self.worker.copies.knows_matches_on_host = False
        copies.WHOLE_CYCLES = 2  # sooner, and so more often wrongly

    def on_committed(self, batch, cycle, aux_hidden, accepted):
        """Compare the texts."""
        rows = batch.req_pool_indices.tolist(), accepted.committed.tolist()
        for req, slot, length in zip(batch.reqs, *rows, strict=True):
            known = [*req.origin_input_ids, *req.output_ids]  # under overlap a cycle behind
            assert len(known) <= length + 1 or req.finished()
            known = known[: length + 1]
            text = self.worker.copies.history[slot, : len(known)].tolist()
            assert text == known, f"request {req.rid}"


class KnownCosts(Watch):
    """Also makes widths cost the same on every machine: a row a hundredth, a draft 0.3 of a plain cycle.

    late: whether the host learns of matches a cycle or two late, as on a GPU.
    """

    def __init__(self, path: Path, late: bool):
        super().__init__(path)
        self.late = late

    def __call__(self, scheduler) -> None:
        """Register in the scheduler's process."""
        super().__call__(scheduler)
        self.worker.copies.knows_matches_on_host = not self.late
        if chooser := getattr(self.worker._planner, "chooser", None):  # else whole blocks
            loads, verify_lens = np.array([1, 64]), chooser.costs.verify_lens
            verify = 1 + 0.01 * loads[:, None] * (verify_lens - 1)
            chooser.costs = CostTable(loads, verify_lens, verify, np.array([0.3, 0.3]))

    def on_begun(self, batch):
        """Write the outcomes, with those of the widths."""
        self.path.write_text(json.dumps({**self.worker.copy_report, "widths": self.worker.width_report}))
