"""Accept lengths simulated by request, on SGLang's own scheduler: the verify lengths follow them."""

import json
from pathlib import Path

import numpy as np
import pytest
from serving import TARGET, dflash_arguments
from support.scheduled import Job, run
from support.servers import FLOAT32, patched

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.hardware_backend.cpu import runtime
from sglang_dflash.srt.speculative.acceptance.simulation import FIXED_TOKEN_ID
from sglang_dflash.srt.speculative.cycle.host import table_rows
from sglang_dflash.srt.speculative.cycle.observer import CycleObserver

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not runtime.needs_stand_in(), reason="own lengths are served on a CPU"),
]

MEANS = (6.5, 2.5, 1.05)
REQUESTS, CYCLES = 9, 70
FIRST_CYCLES = 20  # in which verify lengths are learned


class Lengths(CycleObserver):
    """Writes each request's row, verified and accepted drafted tokens, a line per cycle."""

    def __init__(self, path: Path):
        self.path = path

    def __call__(self, scheduler) -> None:
        """Register in the scheduler's process."""
        scheduler.draft_worker.observers.append(self)

    def on_accepted(self, batch, cycle, accepted):
        """Append the cycle."""
        lengths = cycle.layout.num_draft_tokens.tolist(), accepted.accept_len.tolist()
        with self.path.open("a") as file:
            file.write(json.dumps([table_rows(batch).tolist(), *lengths]) + "\n")


def test_requests_that_accept_more_verify_more(tmp_path):
    # A scheduler's first request has row 1. All take about as many cycles.
    lengths = [int(CYCLES * MEANS[(1 + number) % len(MEANS)]) for number in range(REQUESTS)]
    jobs = [Job((7 + number, 8, 9), new) for number, new in enumerate(lengths)]
    arguments = ["--model-path", TARGET, *FLOAT32, *dflash_arguments()]
    means = {DFlashOptions.SIMULATE_ACC_LENS.variable: ",".join(map(str, MEANS))}
    environment = patched("cheap_rows") | means
    [answers] = run(arguments, [jobs], environment=environment, prepare=Lengths(tmp_path / "lengths"))
    for new, answer in zip(lengths, answers, strict=True):
        assert len(answer.output_ids) == new and set(answer.output_ids[1:]) == {FIXED_TOKEN_ID}
    lines = (tmp_path / "lengths").read_text().splitlines()
    cycles = [np.array(json.loads(line)) for line in lines]
    assert any(len(set(verified)) > 1 for _, verified, _ in cycles), "no ragged cycle"
    assert all((accepted <= verified).all() for _, verified, accepted in cycles)
    rows, verified, _ = np.concatenate(cycles[FIRST_CYCLES:CYCLES], axis=1)
    often, sometimes, never = (verified[rows % len(MEANS) == entry].mean() for entry in range(len(MEANS)))
    assert never < 2 and 4 < sometimes < often - 0.5
