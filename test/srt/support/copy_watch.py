"""A look at what is known of texts on the device, on a scheduler of scheduled.py's."""

import json
from pathlib import Path

from sglang_dflash.srt.speculative.drafters import copy_stats as outcomes


class Watch:
    """Called in the scheduler's process: holds the texts on the device against those on the host, and has the
    draft left out by what is known a cycle or two late, as on a GPU. path: where the outcomes go."""

    def __init__(self, path: Path):
        self.path = path

    def __call__(self, scheduler) -> None:
        worker = scheduler.draft_worker
        drafter, decode, kept = worker._drafter, worker._decode, worker._copies.kept
        drafter._sees = False
        outcomes.WHOLE_CYCLES = 2  # sooner, and so more often wrongly

        def decode_and_compare(batch, *rest):
            result = decode(batch, *rest)
            for req, slot, length in zip(
                batch.reqs, batch.req_pool_indices.tolist(), result.new_seq_lens.tolist(), strict=True
            ):
                known = [*req.origin_input_ids, *req.output_ids]  # under overlap a cycle behind
                assert len(known) <= length + 1 or req.finished()
                known = known[: length + 1]
                assert drafter._history[slot, : len(known)].tolist() == known, f"request {req.rid}"
            return result

        def kept_and_noted(*given):
            kept(*given)
            self.path.write_text(json.dumps(worker.copy_report))

        worker._decode, worker._copies.kept = decode_and_compare, kept_and_noted
