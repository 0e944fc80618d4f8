"""Greedy output equals the target's own for any draft and server setting.

In float32 only the order of additions differs between speculation and plain decoding, by about 1e-6 in a
logit. So no mismatch is tolerated before a near tie: the first position whose best two tokens are closer than
that in the reference. Near ties are rare, and counted. To test another draft or server setting, add a row to
CONFIGURATIONS.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from serving import (
    DFLASH2_DRAFT,
    DRAFT,
    PEAGLE_DRAFT,
    SPECULATORS_DRAFT,
    WHOLE_BLOCKS,
    Server,
    dflash_arguments,
)
from support.drafts import always_wrong, random_draft
from support.families import VOCAB, write_draft, write_peagle_draft, write_target
from support.parity import FLOAT32_TIE, assert_same, near_tie, undecided_from
from support.scheduled import Job, Oracle, run
from support.servers import FLOAT32, WIDTHS_CHANGE, patched
from support.streaming import stream
from support.target_answers import requests_from_prompts, target_answers

pytestmark = pytest.mark.server

COPY_AHEAD = ("--speculative-copy-ahead",)
# Allowed share of different cycles in float32: near ties of the draft may fall either way. Wrong draft KV
# costs far more.
NEARLY_SAME = 0.01


@dataclass(frozen=True)
class Configuration:
    """A server setting under test.

    Attributes:
        name: The name of the test case.
        arguments: Server flags.
        every: Step through the list of prompts. Together the rows cover every prompt more than once.
        offset: First prompt.
        concurrency: Requests in flight.
        draft: Makes the draft in a folder; None is the trained draft.
        accept_length: Bounds on tokens per cycle, bonus included.
        comparable: No mixed batches, retraction or other block size, so that the cycles of a request equal
            those of the default server.
    """

    name: str
    arguments: tuple[str, ...]
    every: int = 5
    offset: int = 0
    concurrency: int = 16
    draft: Callable[[Path], Path] | None = None
    accept_length: tuple[float, float] = (1.0, 16.0)
    comparable: bool = False


CONFIGURATIONS = (
    Configuration(
        "chunked-prefill", (WHOLE_BLOCKS, "--chunked-prefill-size", "64"), offset=0, comparable=True
    ),
    Configuration("page-16", (WHOLE_BLOCKS, "--page-size", "16"), offset=1, comparable=True),
    Configuration(
        "page-16-draft-window-24",
        ("--page-size", "16", "--speculative-draft-window-size", "24"),
        offset=2,
        accept_length=(1.5, 8.0),
    ),
    Configuration(
        "speculators", (), offset=3, draft=lambda folder: SPECULATORS_DRAFT, accept_length=(1.8, 8.0)
    ),
    Configuration(
        "dflash2-mixed-batches",
        ("--chunked-prefill-size", "64", "--enable-mixed-chunk"),
        offset=4,
        draft=lambda folder: DFLASH2_DRAFT,
        accept_length=(2.2, 8.0),
    ),
    Configuration("peagle", (), offset=4, draft=lambda folder: PEAGLE_DRAFT, accept_length=(2.2, 8.0)),
    Configuration(
        "peagle-page-16-mixed-batches",
        ("--page-size", "16", "--chunked-prefill-size", "64", "--enable-mixed-chunk"),
        offset=0,
        draft=lambda folder: PEAGLE_DRAFT,
        accept_length=(2.2, 8.0),
    ),
    Configuration(
        "peagle-3-tokens-no-overlap",
        ("--speculative-num-draft-tokens", "4", "--disable-overlap-schedule"),
        offset=1,
        draft=lambda folder: PEAGLE_DRAFT,
        accept_length=(1.6, 4.0),
    ),
    Configuration(
        "block-16-mixed-batches",
        ("--speculative-num-draft-tokens", "16", "--chunked-prefill-size", "64", "--enable-mixed-chunk"),
        offset=2,
    ),
    Configuration(
        "block-2-no-overlap",
        ("--speculative-dflash-block-size", "2", "--disable-overlap-schedule"),
        offset=3,
        accept_length=(1.0, 2.0),
    ),
    Configuration("block-1", ("--speculative-num-draft-tokens", "1"), offset=4, accept_length=(1.0, 1.0)),
    Configuration(
        "widths-change",
        (*WIDTHS_CHANGE, "--page-size", "16", "--chunked-prefill-size", "64", "--enable-mixed-chunk"),
        offset=1,
        accept_length=(1.3, 8.0),
    ),
    Configuration(
        "peagle-widths-change",
        (*WIDTHS_CHANGE, "--chunked-prefill-size", "64", "--enable-mixed-chunk"),
        offset=2,
        draft=lambda folder: PEAGLE_DRAFT,
        accept_length=(1.3, 8.0),
    ),
    Configuration(
        "copy-ahead",
        (*COPY_AHEAD, "--page-size", "16", "--chunked-prefill-size", "64", "--enable-mixed-chunk"),
        every=9,
        offset=2,
        accept_length=(2.2, 8.0),
    ),
    Configuration(
        "peagle-copy-ahead-widths-change",
        (*COPY_AHEAD, *WIDTHS_CHANGE, "--chunked-prefill-size", "64"),
        every=9,
        offset=3,
        draft=lambda folder: PEAGLE_DRAFT,
        accept_length=(1.3, 8.0),
    ),
    Configuration("random-draft", (), every=12, offset=0, draft=random_draft, accept_length=(1.0, 1.3)),
    Configuration(
        "always-wrong", (), every=12, offset=1, concurrency=4, draft=always_wrong, accept_length=(1.0, 1.01)
    ),
)


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
def cycle_counts() -> dict[str, dict[int, int]]:
    """Cycles per request number, for each comparable setting."""
    return {}


def speculative_arguments(configuration: Configuration, tmp_path_factory) -> list[str]:
    draft = DRAFT
    if configuration.draft is not None:
        draft = configuration.draft(tmp_path_factory.mktemp("drafts") / configuration.name)
    return [*FLOAT32, *dflash_arguments(draft), *configuration.arguments]


def test_the_stored_answers_are_the_targets(requests, answers_alone, reference):
    """Compare every ninth stored answer with a live server without speculation."""
    live = reference.answers(requests[::9])
    assert_same(requests[::9], live, answers_alone[::9])
    for answer, stored in zip(live, answers_alone[::9]):
        places = range(undecided_from(stored) or len(stored["output_ids"]))
        assert [near_tie(answer, i) for i in places] == pytest.approx(
            [near_tie(stored, i) for i in places], 0.01, 1e-4
        )


# What others cover too.
COVERED = ("peagle", "peagle-widths-change", "random-draft")


@pytest.mark.parametrize(
    "configuration",
    [pytest.param(c, id=c.name, marks=pytest.mark.long if c.name in COVERED else ()) for c in CONFIGURATIONS],
)
def test_float32_output_is_the_targets(
    configuration, requests, answers_alone, servers, cycle_counts, tmp_path_factory
):
    """Send requests twice: the second pass reads KV from the prefix cache."""
    numbers = range(configuration.offset, len(requests), configuration.every)
    chosen, expected = [requests[i] for i in numbers], [answers_alone[i] for i in numbers]
    server = servers.get(*speculative_arguments(configuration, tmp_path_factory))

    cold = server.generate_many(chosen, configuration.concurrency)
    assert_same(chosen, cold, expected)
    _check_accept_length(cold, configuration.accept_length)
    warm = server.generate_many(chosen[::3], configuration.concurrency)
    assert_same(chosen[::3], warm, expected[::3])
    for request, answer in zip(chosen[::3], warm):
        meta = answer["meta_info"]
        # SGLang always computes the last prompt token, and shares whole pages only.
        page = 16 if "--page-size" in configuration.arguments else 1
        reusable = (meta["prompt_tokens"] - 1) // page * page
        assert meta["cached_tokens"] >= reusable, f"no prefix-cache hit: {meta} for {request}"
    if configuration.comparable:
        _compare_cycles(cycle_counts, configuration.name, dict(zip(numbers, cold)))
        _compare_cycles(cycle_counts, configuration.name + ", cached", dict(zip(numbers[::3], warm)))
    assert_pool_is_whole(server)


def test_float32_retracted_requests_resume_as_the_target_would(requests, reference, servers):
    """A pool of a third of the needed size retracts requests."""
    chosen = [
        {**request, "sampling_params": {"temperature": 0, "max_new_tokens": 160, "ignore_eos": True}}
        for request in requests[100:180:5]
    ]
    expected = reference.answers(chosen)
    needed = sum(answer["meta_info"]["prompt_tokens"] + 160 for answer in expected)
    pool = ("--max-total-tokens", needed // 3)
    server = servers.get(*FLOAT32, *dflash_arguments(), *pool, environment=patched("overcommit"))
    answers = server.generate_many(chosen, len(chosen))
    assert_same(chosen, answers, expected)
    retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    assert retractions > 0, (
        f"a pool of {needed // 3} tokens for {needed} retracted nothing, so the test proves nothing"
    )
    assert_pool_is_whole(server)


def test_float32_all_prompts(requests, answers_alone, servers, cycle_counts):
    """Send every prompt, alone or with 15 others; server settings must not change the number of cycles.

    Wrong draft KV cannot change the output, but it makes the draft guess worse. So equal cycles show that the
    draft's KV is right after chunked prefill, with pages, and from the prefix cache. This test itself
    compares the prefix cache. The last test to run compares the other settings.
    """
    server = servers.get(*FLOAT32, WHOLE_BLOCKS, *dflash_arguments())
    server.flush_cache()
    numbers = range(len(requests))
    alone, cached = (server.generate_many(requests[::9], concurrency) for concurrency in (1, 16))
    assert all(a["meta_info"]["cached_tokens"] >= a["meta_info"]["prompt_tokens"] - 1 for a in cached)
    by_number = dict(zip(numbers[::9], alone))
    others = [i for i in numbers if i % 9]
    by_number |= zip(others, server.generate_many([requests[i] for i in others], 16))
    in_order = [by_number[i] for i in numbers]
    assert_same(requests, in_order, answers_alone)
    assert_same(requests[::9], cached, answers_alone[::9])
    undecided = [
        request for request, answer in zip(requests, answers_alone) if undecided_from(answer) is not None
    ]
    assert len(undecided) <= 0.02 * len(requests), (
        f"{len(undecided)} answers of the target depend on float32 rounding"
    )
    _check_accept_length(in_order, (1.0, 8.0))

    _compare_cycles(cycle_counts, "default", by_number)
    _compare_cycles(cycle_counts, "default, cached", dict(zip(numbers[::9], cached)))


def test_float32_continuations_read_the_kv_that_decoding_wrote(requests, reference, servers):
    """Continue a prompt and its answer on cached KV of verified tokens.

    Computed without the cache, the same prompt must take the same number of cycles. This shows that draft KV
    written while decoding is as good as draft KV written by prefill.
    """
    server = servers.get(*FLOAT32, WHOLE_BLOCKS, *dflash_arguments())
    first = [request for request in requests if "input_ids" in request][:72:3]
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


def test_float32_aborts_leave_the_others_alone(requests, answers_alone, reference, servers):
    """Abort half of the requests by /abort_request or by a closed connection."""
    server = servers.get(*FLOAT32, *dflash_arguments())
    bystanders = requests[60:84:2]
    expected = answers_alone[60:84:2]
    answers: list[dict] = []
    others = threading.Thread(target=lambda: answers.extend(server.generate_many(bystanders, 8)))
    others.start()
    aborted = []
    for number, request in enumerate(requests[120:128]):
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


@pytest.mark.parametrize(
    ("name", "block", "write"),
    [
        ("llama", 8, write_draft),
        ("llama3", 16, write_draft),
        pytest.param("llama", 16, write_draft, marks=pytest.mark.long),
        pytest.param("llama3", 8, write_peagle_draft, marks=pytest.mark.long),
    ],
    ids=["llama-8", "llama3-16", "llama-16", "llama3-peagle-8"],
)
def test_float32_output_of_a_llama_is_the_targets(name, block, write, tmp_path):
    """Serve a random Llama, of which the bundled pairs have none, with the widths that a user gets.

    Every third request has the random draft's own tokens. An oracle drafts for the others.
    """
    target, draft = write_target(name, tmp_path / "target").path, write(tmp_path / "draft")
    generator = random.Random(block)
    jobs = [
        Job(tuple(generator.randrange(8, VOCAB) for _ in range(length)), 48, step=step, logprobs=True)
        for step, length in enumerate((3, 16, 17, 31, 40, 64, 90, 120, 150))
    ]
    jobs += [Job((*jobs[-1].input_ids[:100], 9, 10), 48, step=40, logprobs=True)]  # a cached prefix
    plain = ["--model-path", target, *FLOAT32, "--skip-tokenizer-init"]
    [wanted] = run(plain, [jobs])
    oracle = Oracle([[*a.output_ids, *[5] * block] if i % 3 else None for i, a in enumerate(wanted)])
    [found] = run([*plain, *dflash_arguments(draft), "--speculative-num-draft-tokens", block], [jobs], oracle)
    compared = 0
    for job, answer, want in zip(jobs, found, wanted, strict=True):
        end = next((i for i, gap in enumerate(want.gaps) if gap < FLOAT32_TIE), len(want.output_ids))
        assert len(answer.output_ids) == 48 and answer.output_ids[:end] == want.output_ids[:end], job
        compared += end
    assert compared > 0.8 * 48 * len(jobs), "the target hardly decides between tokens"
    assert found[-1].cached_tokens == 100
    kept = [count for i, answer in enumerate(found) if i % 3 for count in answer.accepted]
    assert sum(kept) > len(kept), "the oracle's drafts were not accepted"


def assert_pool_is_whole(server: Server) -> None:
    """Check that nothing runs and no KV slot is lost.

    The scheduler counts slots when it is idle and exits on a leak (support/servers.py).
    """
    server.flush_cache()
    load = server.get("/v1/loads")["loads"][0]
    assert load["num_running_reqs"] == load["num_waiting_reqs"] == load["num_used_tokens"] == 0, load
    assert server.get("/health") == "", "the server is not healthy"


def _check_accept_length(answers: list[dict], bounds: tuple[float, float]) -> None:
    """Check the tokens per cycle, bonus included.

    Tokens are counted from the histogram, because a mixed batch gives a running request one without a cycle.
    """
    histograms = [answer["meta_info"].get("spec_correct_drafts_histogram") or [] for answer in answers]
    cycles = sum(map(sum, histograms))
    tokens = sum((kept + 1) * count for histogram in histograms for kept, count in enumerate(histogram))
    assert cycles > 0
    assert bounds[0] <= tokens / cycles <= bounds[1], f"{tokens} tokens in {cycles} cycles"


def _compare_cycles(counts: dict[str, dict[int, int]], name: str, answers: dict[int, dict]) -> None:
    """Record the cycles of a setting, and compare all recorded ones with the default."""
    counts[name] = {number: _cycles(answer) for number, answer in answers.items()}
    default = counts.get("default", {})
    for other, cycles in counts.items():
        shared = cycles.keys() & default.keys()
        here, expected = (sum(taken[number] for number in shared) for taken in (cycles, default))
        assert abs(here - expected) <= NEARLY_SAME * expected, (
            f"{here} cycles with {other}, {expected} by default"
        )


def _cycles(answer: dict) -> int:
    """Count cycles by the histogram, because a block of 1 has no `spec_verify_ct`."""
    return sum(answer["meta_info"].get("spec_correct_drafts_histogram") or [])
