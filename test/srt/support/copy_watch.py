"""Comparison of the texts on the device with those on the host, under scheduled.py."""

import json
from pathlib import Path

from sglang_dflash.srt.speculative.cycle.observer import CycleObserver


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
        reports = self.worker.reports
        report = {**reports["speculative_copy_ahead"], "widths": reports["speculative_width"]}
        self.path.write_text(json.dumps(report))


class Watch(Outcomes):
    """Compares texts after each cycle.

    late: whether the host learns of matches a cycle or two late, as on a GPU.
    """

    def __init__(self, path: Path, late: bool = True):
        super().__init__(path)
        self.late = late

    def __call__(self, scheduler) -> None:
        """Register in the scheduler's process."""
        super().__call__(scheduler)
        self.worker.copies.knows_matches_on_host = not self.late

    def on_committed(self, batch, cycle, aux_hidden, accepted):
        """Compare the texts."""
        rows = batch.req_pool_indices.tolist(), accepted.committed.tolist()
        for req, slot, length in zip(batch.reqs, *rows, strict=True):
            known = [*req.origin_input_ids, *req.output_ids]  # under overlap a cycle behind
            assert len(known) <= length + 1 or req.finished()
            known = known[: length + 1]
            text = self.worker.copies.history[slot, : len(known)].tolist()
            assert text == known, f"request {req.rid}"
