"""Random requests of benchmark/soak.py, and planted faults that it must find."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving import DRAFT, dflash_arguments, serve
from soak import ENVIRONMENT, Configuration, Pair, Resources, problems_after, run_round, write_schedules
from soak_requests import Known, Wrong, compare_with_known, known_requests
from support.servers import FLOAT32, patched, plain_target, warm_start

SEED = "suite"
# The seed draws a tight pool, a draft window and changing widths for the first round, and sampled drafts
# without a prefix cache for the second. Both have mixed batches under overlap scheduling.
ROUNDS = (12, 13)


PROCESSORS = "--enable-custom-logit-processor"


@pytest.fixture(scope="module")
def known() -> list[Known]:
    with plain_target(*FLOAT32, PROCESSORS) as plain:
        return known_requests(plain.server, 80, seed=11)


@pytest.mark.server
@pytest.mark.long
@pytest.mark.parametrize("number", ROUNDS)
def test_a_round(number, known, servers):
    configuration = Configuration.draw(random.Random(f"{SEED}-{number}"))
    server = servers.get(*configuration.arguments[2:], "--sleep-on-idle")
    counts, wrong = run_round(server, known, 150, f"{SEED}-{number}", concurrency=8)
    assert not wrong, f"{configuration.arguments}\n" + "\n".join(wrong)
    assert counts["requests"] == 150 and counts["cycles"] > 100
    assert {"greedy", "streamed", "sampled", "aborted", "walked_away", "bad"} <= set(counts)


@pytest.mark.server
@pytest.mark.long
def test_a_round_with_pictures(tmp_path):
    """The hybrid pair with a vision tower, and widths that change every cycle."""
    pair = Pair.hybrids(tmp_path / "target")[0]
    with serve(*pair.plain, "--sleep-on-idle", env=ENVIRONMENT, start=warm_start()) as plain:
        known = known_requests(plain, 60, 12, pair.image_tokens)
    schedules = write_schedules(tmp_path)
    drawn = (Configuration.draw(random.Random(f"{SEED}-{n}"), pair, schedules) for n in range(100))
    configuration = next(one for one in drawn if "1280" in one.arguments)
    with serve(*configuration.arguments, "--sleep-on-idle", env=ENVIRONMENT, start=warm_start()) as server:
        counts, wrong = run_round(server, known, 100, f"{SEED}-pictures", concurrency=32)
    assert not wrong, f"{configuration.arguments}\n" + "\n".join(wrong)
    assert counts["compared, with pictures"] > 8 and counts["cycles"] > 100
    assert counts["across the grid"]


@pytest.mark.server
@pytest.mark.long
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
    counts, wrong = run_round(server, known, 80, f"{SEED}-{fault}", concurrency=8)
    assert any(re.search(caught_by, line, re.DOTALL) for line in wrong), "\n".join(wrong) or counts


ANSWER = {
    "output_ids": [5, 6, 7],
    "text": "abc",
    "meta_info": {"completion_tokens": 3, "finish_reason": {"type": "length"}},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"output_ids": [5, 7, 6]},
        {"output_ids": [5, 6]},
        {"output_ids": [5, 6, 7, 8]},
        {"text": "abd"},
        {"meta_info": {"completion_tokens": 3, "finish_reason": {"type": "stop"}}},
        {"meta_info": {"completion_tokens": 2, "finish_reason": {"type": "length"}}},
    ],
)
def test_a_planted_fault_in_an_answer_is_seen(changes):
    known = Known({}, [5, 6, 7], "abc", {"type": "length"}, is_whole=True)
    compare_with_known(known, ANSWER)
    with pytest.raises(Wrong):
        compare_with_known(known, ANSWER | changes)


def test_tokensproblems_after_a_near_tie_are_not_compared():
    known = Known({}, [5], "abc", {"type": "length"}, is_whole=False)
    compare_with_known(known, ANSWER | {"text": "axy"})
    with pytest.raises(Wrong):
        compare_with_known(known, ANSWER | {"output_ids": [4, 6, 7]})


def test_picture_tokens_of_an_answer_stay_out_of_prompts():
    sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    known = Known({"input_ids": [8], "sampling_params": sampling}, [5, 6, 7], "", {}, is_whole=True)
    assert known.continued(random.Random(1)).request["input_ids"][:2] == [8, 5]
    known = replace(known, reserved=frozenset({6}))
    assert known.continued(random.Random(1)) is known


def test_hybrids_change_widths_in_every_round_and_have_tight_pools(tmp_path):
    pair = Pair(("--plain",), (DRAFT,), is_hybrid=True)
    schedules = write_schedules(tmp_path)
    tight = 0
    for seed in range(50):
        arguments = Configuration.draw(random.Random(seed), pair, schedules).arguments
        flags = dict(zip(arguments, arguments[1:]))
        widths = json.loads(Path(flags["--speculative-adaptive-config"]).read_text())["schedule"]
        assert max(widths) == min(int(flags.get("--speculative-num-draft-tokens", 8)), 8) - 1
        tight += int(flags["--max-total-tokens"]) < 3072
    assert tight > 20


def test_leaks_are_seen():
    before = Resources(threads=50, handles=100, memory_mb=900.0)
    assert Resources(55, 110, 950.0).leaks_since(before) == []
    for leaking in (Resources(90, 100, 900.0), Resources(50, 300, 900.0), Resources(50, 100, 2000.0)):
        assert len(leaking.leaks_since(before)) == 1


class PlantedServer(SimpleNamespace):
    """The part of a server that `problems_after` uses."""

    def flush_cache(self):
        pass

    def get(self, path):
        return {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": self.used}]}


@pytest.mark.parametrize(
    "used, log, found", [(0, "all is well", 0), (16, "", 1), (0, "Traceback (most recent call last)\n  x", 1)]
)
def test_a_leaked_slot_and_a_traceback_are_seen(used, log, found):
    assert len(problems_after(PlantedServer(used=used), None, log)) == found
