"""A round of benchmark/soak.py, and planted faults that it must find."""

import random
import re

import pytest
from serving import dflash_arguments
from soak import Known, draw, known_requests, run_round
from support.servers import FLOAT32, patched, plain_target

pytestmark = [pytest.mark.server, pytest.mark.long]
PROCESSORS = "--enable-custom-logit-processor"


@pytest.fixture(scope="module")
def known() -> list[Known]:
    with plain_target(*FLOAT32, PROCESSORS) as plain:
        return known_requests(plain.server, 80, seed=11)


# The seed draws a tight pool, a draft window and changing widths for the first round, and sampled drafts
# without a prefix cache for the second. Both have mixed batches under overlap scheduling.
@pytest.mark.parametrize("seed", ["suite-12", "suite-13"])
def test_a_round(seed, known, servers):
    arguments = draw(random.Random(seed))[2:]  # less the target
    server = servers.get(*arguments, "--sleep-on-idle")
    counts, wrong = run_round(server, known, 150, seed, concurrency=8)
    assert not wrong, f"{arguments}\n" + "\n".join(wrong)
    assert counts["requests"] == 150 and counts["cycles"] > 100
    assert {"greedy", "streamed", "sampled", "aborted", "walked_away", "bad"} <= set(counts)


@pytest.mark.parametrize(
    "fault, caught_by",
    [
        ("leaked_slot", "the server ended with code .*leak"),
        ("dropped_accept", r"\[[0-9, ]+\] instead of \["),
        ("swapped_request", r"\[[0-9, ]+\] instead of \["),
    ],
)
def test_a_planted_fault_in_a_server_is_caught(fault, caught_by, known, servers):
    server = servers.get(*FLOAT32, PROCESSORS, *dflash_arguments(), environment=patched(fault))
    counts, wrong = run_round(server, known, 80, f"suite-{fault}", concurrency=8)
    assert any(re.search(caught_by, line, re.DOTALL) for line in wrong), "\n".join(wrong) or counts
