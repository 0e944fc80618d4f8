"""Greedy output over HTTP equals the target's own, as tokens and as text.

No mismatch is tolerated before a near tie, as in engine/test_lossless.py, which has the drafts and settings.
Near ties are rare, and counted.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from serving import DRAFT, WHOLE_BLOCKS, Server, dflash_arguments
from support.drafts import always_wrong, make_deepseek_draft
from support.parity import assert_same, near_tie, undecided_from
from support.servers import COPIES, FLOAT32
from support.streaming import stream
from support.target_answers import requests_from_prompts, target_answers

pytestmark = pytest.mark.server

# Allowed share of different cycles in float32: near ties of the draft may fall either way. Wrong draft KV
# costs far more.
NEARLY_SAME = 0.01


@pytest.fixture(scope="module")
def requests() -> list[dict]:
    requests = requests_from_prompts()
    assert len(requests) >= 200
    return requests


@pytest.fixture(scope="module")
def answers_alone() -> list[dict]:
    """Answers of the target alone to `requests`."""
    return target_answers()


@pytest.fixture(scope="module")
def server(servers) -> Server:
    return servers.get(*FLOAT32, WHOLE_BLOCKS, *dflash_arguments())


def test_the_stored_answers_are_the_targets(requests, answers_alone, reference):
    """Compare every ninth stored answer with a live server without speculation."""
    live = reference.answers(requests[::9])
    assert_same(requests[::9], live, answers_alone[::9])
    for answer, stored in zip(live, answers_alone[::9]):
        places = range(undecided_from(stored) or len(stored["output_ids"]))
        assert [near_tie(answer, i) for i in places] == pytest.approx(
            [near_tie(stored, i) for i in places], 0.01, 1e-4
        )


def test_float32_alone_and_in_batches(requests, answers_alone, server):
    """Send prompts alone and with 15 others; the prefix cache must not change the number of cycles.

    Wrong draft KV cannot change the output, but it makes the draft guess worse. So equal cycles show that the
    draft's KV from the prefix cache is right.
    """
    server.flush_cache()
    alone, cached = (server.generate_many(requests[::40], concurrency) for concurrency in (1, 16))
    assert all(a["meta_info"]["cached_tokens"] >= a["meta_info"]["prompt_tokens"] - 1 for a in cached)
    for answers in (alone, cached):
        assert_same(requests[::40], answers, answers_alone[::40])
    assert_same(requests[1::27], server.generate_many(requests[1::27], 16), answers_alone[1::27])
    undecided = [
        request for request, answer in zip(requests, answers_alone) if undecided_from(answer) is not None
    ]
    assert len(undecided) <= 0.02 * len(requests), (
        f"{len(undecided)} answers of the target depend on float32 rounding"
    )
    alone_cycles, cached_cycles = (sum(map(_cycles, answers)) for answers in (alone, cached))
    assert abs(cached_cycles - alone_cycles) <= NEARLY_SAME * alone_cycles, (alone_cycles, cached_cycles)
    assert_pool_is_whole(server)


def test_float32_continuations_read_the_kv_that_decoding_wrote(requests, reference, server):
    """Continue a prompt and its answer on cached KV of verified tokens.

    Computed without the cache, the same prompt must take the same number of cycles. This shows that draft KV
    written while decoding is as good as draft KV written by prefill.
    """
    first = [request for request in requests if "input_ids" in request][:72:12]
    sampling = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
    continued = [
        {"input_ids": request["input_ids"] + answer["output_ids"] + [10, 20, 30], "sampling_params": sampling}
        for request, answer in zip(first, server.generate_many(first, 8))
    ]
    warm = server.generate_many(continued, 8)
    for request, answer in zip(continued, warm):
        # All but the answer's last token, which was never an input, and the three new tokens.
        assert answer["meta_info"]["cached_tokens"] >= len(request["input_ids"]) - 5, f"not cached: {request}"
    server.flush_cache()
    cold = server.generate_many(continued, 8)
    expected = reference.answers(continued)
    assert_same(continued, warm, expected)
    assert_same(continued, cold, expected)
    warm_cycles, cold_cycles = (sum(map(_cycles, answers)) for answers in (warm, cold))
    assert abs(warm_cycles - cold_cycles) <= NEARLY_SAME * cold_cycles, (
        f"{warm_cycles} cycles on cached KV, {cold_cycles} on fresh KV"
    )


def test_float32_aborts_leave_the_others_alone(requests, answers_alone, reference, server):
    """Abort half of the requests by /abort_request or by a closed connection."""
    bystanders, expected = requests[60:72:2], answers_alone[60:72:2]
    answers: list[dict] = []
    others = threading.Thread(target=lambda: answers.extend(server.generate_many(bystanders, 8)))
    others.start()
    aborted = []
    for number, request in enumerate(requests[120:124]):
        sampling = {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}
        victim = {**request, "sampling_params": sampling, "rid": f"victim-{number}"}
        chunks = stream(server, victim)
        last = next(chunks)
        while last["meta_info"]["completion_tokens"] < 12:
            last = next(chunks)
        if number % 2:
            chunks.close()
        else:
            server.post("/abort_request", {"rid": victim["rid"]})
            *_, last = chunks
            assert last["meta_info"]["finish_reason"]["type"] == "abort", (
                f"{victim} ended as {last['meta_info']}"
            )
            aborted.append((request, last))
    others.join()
    assert_same(bystanders, answers, expected)
    for request, last in aborted:
        length = len(last["output_ids"])
        assert 12 <= length < 3000, f"{length} tokens before the abort"
        longer = {**request, "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}}
        [want] = reference.answers([longer])
        compared = min(length, 64)
        assert last["output_ids"][:compared] == want["output_ids"][:compared], f"{request} before its abort"
    assert_pool_is_whole(server)


@pytest.mark.parametrize("count, swaps", [(36, 2), pytest.param(500, 10, marks=pytest.mark.long)])
def test_drafts_are_swapped_under_traffic(requests, answers_alone, server, tmp_path, count, swaps):
    """Swap between the bundled draft and one that is always wrong. Requests in flight go on."""
    sent, expected = ((3 * each)[:count] for each in (requests, answers_alone))
    drafts = [always_wrong(tmp_path / "wrong"), DRAFT]
    before = server.generate_many(requests[:10], 8)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(server.generate, **request) for request in sent]
        for number in range(swaps):
            futures[(number + 1) * count // (swaps + 1)].result()
            swap(server, drafts[number % 2], f"swap-{number}")
        answers = [future.result() for future in futures]
    assert_same(sent, answers, expected)
    in_flight = [a for a in answers if len(a["meta_info"].get("weight_versions", ())) > 1]
    assert len(in_flight) >= swaps, "no request was in flight"
    swap(server, DRAFT, "back")
    server.flush_cache()  # the cached prompts have the other draft's KV
    after = server.generate_many(requests[:10], 8)
    assert abs(sum(map(_cycles, after)) - sum(map(_cycles, before))) <= NEARLY_SAME * sum(
        map(_cycles, before)
    )
    assert_pool_is_whole(server)


@pytest.mark.long
def test_a_draft_of_deepseeks(requests, answers_alone, servers, tmp_path):
    """Verify lengths and copies are chosen, as a user gets them."""
    draft = make_deepseek_draft(tmp_path / "draft")
    server = servers.get(*FLOAT32, *COPIES, *dflash_arguments(draft))
    assert_same(requests, server.generate_many(requests, 16), answers_alone)
    assert_pool_is_whole(server)


def swap(server: Server, draft: Path, version: str) -> None:
    server.post("/pause_generation", {"mode": "in_place"})
    body = {"model_path": str(draft), "weight_version": version, "flush_cache": False}
    answer = server.post("/update_weights_from_disk", body)
    server.post("/continue_generation", {})
    assert answer["success"], answer["message"]


def assert_pool_is_whole(server: Server) -> None:
    """Check that nothing runs and no KV slot is lost.

    The scheduler counts slots when it is idle and exits on a leak (support/servers.py).
    """
    server.flush_cache()
    load = server.get("/v1/loads")["loads"][0]
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_used_tokens"] == 0, load
    assert server.get("/health") == "", "the server is not healthy"


def _cycles(answer: dict) -> int:
    """Count cycles by the histogram, because a block of 1 has no `spec_verify_ct`."""
    return sum(answer["meta_info"].get("spec_correct_drafts_histogram") or [])
