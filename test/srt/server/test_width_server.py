"""Adaptive verify widths through a live server: grammars, log probabilities, pauses and reports.

The output is the target's at any width: rows of engine/test_lossless.py,
engine/test_penalized_answers.py, test_seeds.py and test_sampled_sequences.py test that.
"""

import json
import threading
from collections.abc import Callable

import pytest
from serving import DRAFT, PEAGLE_DRAFT, WHOLE_BLOCKS, Server, dflash_arguments, heldout_prompts
from support import logprob_checks
from support.grammars import EBNF, SCHEMA, greedy
from support.parity import assert_same
from support.servers import FLOAT32, MEASURED_COSTS, WIDTHS_CHANGE
from support.streaming import stream

pytestmark = pytest.mark.server

# Cycles without drafts, then with; longer than what P-EAGLE may leave pending, twice.
PAUSES = {"schedule": [0] * 60 + [7] * 40}
PAUSE = 12  # single tokens in a row that are not rejections by chance


@pytest.fixture(scope="module")
def server(servers) -> Server:
    flags = *dflash_arguments(), *WIDTHS_CHANGE, "--enable-metrics"
    return servers.get(*FLOAT32, *flags, environment=MEASURED_COSTS)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [p["text"] for p in heldout_prompts() if 10 <= p["num_tokens"] <= 400][::18][:12]


def test_grammars(server, reference, prompts):
    kinds = {"json_schema": json.dumps(SCHEMA)}, {"ebnf": EBNF}, {}
    requests = [greedy(prompt, 48, **kinds[i % 3]) for i, prompt in enumerate(prompts)]
    assert_same(requests, server.generate_many(requests, 6), reference.answers(requests))


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
    assert 0 < report["accept_probs"]["greedy"][0] < 1
    assert report["expected"].keys() == {"1", "2", "4", "8"} and report["expected"]["1"]["cycle_ms"] > 0
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


def cycles_of(
    server: Server, start: dict, length: int, also: Callable = lambda cycles: None
) -> tuple[list[int], list[int]]:
    """Return output ids, and how many of them each cycle committed; the first is the prefill's.

    A chunk is a cycle, except on a busy machine, which may put several into one. The request is then sent
    again.
    """
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    for _ in range(5):
        ids: list[int] = []
        cycles: list[int] = []
        for chunk in stream(server, {**start, "sampling_params": sampling}):
            if len(chunk["output_ids"]) > len(ids):
                cycles.append(len(chunk["output_ids"]) - len(ids))
                ids = chunk["output_ids"]
                also(cycles)
        if sum(chunk["meta_info"]["spec_correct_drafts_histogram"]) == len(cycles) - 1:
            return ids, cycles
    raise AssertionError("five times in a row, cycles came together")


@pytest.mark.parametrize("draft", [DRAFT, PEAGLE_DRAFT], ids=["DFlash", "P-EAGLE"])
def test_acceptance_after_a_pause_equals_that_without_a_pause(draft, servers, tmp_path_factory):
    """Compared cycle by cycle. Another request's prefill falls into the pause."""
    path = tmp_path_factory.mktemp("widths") / "pauses.json"
    path.write_text(json.dumps(PAUSES))
    adaptive = ("--speculative-adaptive", "--speculative-adaptive-config", path)
    server = servers.get(*FLOAT32, *dflash_arguments(draft), *adaptive, "--disable-radix-cache")
    texts = [p["text"] for p in heldout_prompts() if 60 <= p["num_tokens"] <= 120]
    others: list[threading.Thread] = []

    def disturb(cycles: list[int]) -> None:
        if len(cycles) == 1:
            others.clear()
        if not others and len(cycles) > 3 and all(size == 1 for size in cycles[-4:]):
            ask = {"text": texts[1], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
            others.append(threading.Thread(target=lambda: server.generate(**ask)))
            others[0].start()

    prompt_ids = server.post("/tokenize", {"prompt": texts[0]})["tokens"]
    ids, cycles = cycles_of(server, {"input_ids": prompt_ids}, 240, disturb)
    [thread] = others
    thread.join()
    resumed = next(
        i for i in range(PAUSE, len(cycles)) if set(cycles[i - PAUSE : i]) == {1} and cycles[i] > 1
    )
    num_emitted = sum(cycles[:resumed])
    fixed = servers.get(*FLOAT32, WHOLE_BLOCKS, *dflash_arguments(draft), "--disable-radix-cache")
    # The last token before it resumed is the anchor; here a prefill emits it.
    after = cycles[resumed : resumed + 12]
    _, expected = cycles_of(fixed, {"input_ids": prompt_ids + ids[: num_emitted - 1]}, 1 + sum(after))
    assert expected[1:] == after
    assert max(after) > 2, "hardly anything was accepted: this shows little"
