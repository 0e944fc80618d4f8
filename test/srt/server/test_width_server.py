"""Adaptive verify widths through a live server: log probabilities and reports.

The output is the target's at any width: rows of engine/test_lossless.py, test_penalized_answers.py,
test_seeds.py and test_sampled_sequences.py test that, and engine/test_own_lengths.py grammars.
"""

import pytest
from plot_acceptance import read_counts
from serving import Server, dflash_arguments, heldout_prompts
from support import logprob_checks
from support.length_fields import OBSERVED, assert_fields_are_observed
from support.servers import COPIES, FLOAT32, MEASURED_COSTS, WIDTHS_CHANGE

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(servers) -> Server:
    flags = *dflash_arguments(), *WIDTHS_CHANGE, *COPIES, "--enable-metrics"
    return servers.get(*FLOAT32, *flags, environment=MEASURED_COSTS | OBSERVED)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [p["text"] for p in heldout_prompts() if 10 <= p["num_tokens"] <= 400][::18][:12]


def test_log_probabilities(server, reference, prompts):
    logprob_checks.assert_answers(
        server, reference, [logprob_checks.greedy(prompt, 30) for prompt in prompts]
    )


def test_widths_in_log_server_info_and_metrics(server, prompts):
    """The three agree."""
    sampling = {"sampling_params": {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}}
    server.generate_many([{"text": prompt, **sampling} for prompt in prompts], 4)
    [state, *_] = server.get("/server_info")["internal_states"]
    report = state["speculative_width"]
    assert report["candidates"] == [1, 2, 4, 8]
    assert set(report["blocks_per_length"]) == {"0", "1", "3", "7"}
    assert 0 < report["accept_probs"][0] < 1
    page = server.get("/metrics")
    [count] = [
        float(line.split()[-1])
        for line in page.splitlines()
        if line.startswith("sglang:spec_verify_width_count")
    ]
    assert count == sum(report["cycles_per_width"].values())
    assert (
        "DFLASH verifies" in server.log() and "DFLASH adaptive: widths [1, 2, 4, 8] measured" in server.log()
    )


def copies_of(server: Server) -> int:
    [state, *_] = server.get("/server_info")["internal_states"]
    return state["speculative_copy_ahead"]["blocks"].get("copy", 0)


def test_length_fields_are_the_slots_that_an_observer_saw(server, prompts):
    """Own lengths, copies and caps."""
    before = copies_of(server)
    repeating = [f"{prompt}\n{prompt}\n{prompt[: len(prompt) // 2]}" for prompt in prompts]
    slots = assert_fields_are_observed(server, repeating, lambda: read_counts(server.get("/metrics")))
    found = {n for each in slots.values() for n in each}
    assert found >= {1, 3, 8} and len(found) > 3, found
    assert copies_of(server) > before, "nothing was copied"
