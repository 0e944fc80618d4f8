"""Prefill/decode disaggregation over nixl on loopback, both servers with the draft.

Answers and cycle counts are one server's. This file does what SGLang's router does: it sends a request to
both. Starts are slow: each pair is started once per draft. P-EAGLE, retraction and the router are `-m
long`.
"""

import concurrent.futures
import contextlib
import importlib.util
import itertools
import json
import os
import random
import signal
import time
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from serving import (
    DRAFT,
    HYBRID_DRAFT,
    HYBRID_TARGET,
    PEAGLE_DRAFT,
    TARGET,
    WHOLE_BLOCKS,
    Server,
    dflash_arguments,
    free_port,
    serve,
)
from support.parity import assert_same
from support.rank_checks import (
    GRAMMARS,
    NEARLY_SAME,
    PENALTIES,
    cycles,
    greedy,
    output_ids,
    penalized_requests,
    said,
    some_prompts,
)
from support.servers import ENVIRONMENT, FLOAT32, WIDTHS_CHANGE, Reference, patched, warm_start
from support.streaming import stream

pytestmark = [
    pytest.mark.server,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed"),
]

# A dead peer is noticed in seconds, not minutes; so is a busy one, so requests must not queue. SGLang keeps
# the slots of a failed transfer for 30 s, in case the peer still writes to them.
PATIENCE = {
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "4",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "4",
}
# On a CPU. A prefill server would wait for a CUDA event before it sends cached prefixes early.
PATCHES = ("kv_transfer", "no_memory_reserve")
TRANSFER = {**patched(*PATCHES), "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0"}


@dataclass
class Pair:
    prefill: Server
    decode: Server
    bootstrap_port: int
    rooms: Iterator[int]

    def somewhere(self) -> dict:
        """Name the place at which both servers meet for a request."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": next(self.rooms),
        }

    def generate(self, **request) -> dict:
        """Send a request to both servers; return the decode server's answer."""
        request |= self.somewhere()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            first = pool.submit(self.prefill.generate, **request)
            answer = self.decode.generate(**request)
            first.result()
        return answer

    def generate_many(self, requests: list[dict], concurrency: int) -> list[dict]:
        with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda request: self.generate(**request), requests))


@contextlib.contextmanager
def pair_of(
    *arguments: str,
    decode: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    target: object = TARGET,
) -> Iterator[Pair]:
    port = free_port()
    common = ["--model-path", target, *FLOAT32, *arguments, "--disaggregation-transfer-backend", "nixl"]
    common += ["--disaggregation-bootstrap-port", port]
    environment = ENVIRONMENT | TRANSFER | (environment or {})
    # The pool for retracted requests is as small as the one they run in.
    decode = ("--disaggregation-mode", "decode", "--hicache-ratio", "1", *decode)
    with (
        serve(*common, "--disaggregation-mode", "prefill", env=environment, start=warm_start()) as prefill,
        serve(*common, *decode, env=environment, start=warm_start()) as decode_server,
    ):
        yield Pair(prefill, decode_server, port, itertools.count(random.randrange(2**40)))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return some_prompts()[:24]


@pytest.mark.parametrize("draft", [DRAFT, PEAGLE_DRAFT], ids=["dflash", "peagle"])
def test_two_servers_say_what_one_says(draft, servers, reference, prompts):
    requests = [greedy(ids) for ids in prompts]
    requests += [greedy(ids, ignore_eos=False, **GRAMMARS[i % 2]) for i, ids in enumerate(prompts[:6])]
    with_logprobs = [{**greedy(ids), "return_logprob": True, "top_logprobs_num": 2} for ids in prompts[:4]]
    penalized = penalized_requests(prompts)
    # The decode server rebuilds the texts that copies are found in.
    flags = [WHOLE_BLOCKS, *dflash_arguments(draft)]
    flags += ["--speculative-copy-ahead"] if draft == PEAGLE_DRAFT else []
    one = servers.get(*FLOAT32, *flags)
    alone = one.generate_many(requests, 8)
    alone_penalized = one.generate_many(penalized, 8)
    alone_with_logprobs = one.generate_many(with_logprobs, 4)
    servers.close()
    # Only if a peer is to die: with it, a busy server would give up a live peer too.
    with pair_of(*flags, environment=PATIENCE if draft == DRAFT else None) as pair:
        answers = pair.generate_many(requests, 8)
        assert_same(requests, answers, reference.answers(requests))
        # P-EAGLE drafts its first block without the state of the prompt's last token, which the prefill
        # server keeps.
        allowed = NEARLY_SAME if draft == DRAFT else 0.05
        assert abs(cycles(answers) - cycles(alone)) <= allowed * cycles(alone)
        penalized_answers = pair.generate_many(penalized, 8)
        assert output_ids(penalized_answers) == output_ids(alone_penalized)
        for got, want in zip(pair.generate_many(with_logprobs, 4), alone_with_logprobs, strict=True):
            mine, theirs = (
                [value for value, *_ in a["meta_info"]["output_token_logprobs"]] for a in (got, want)
            )
            assert mine == pytest.approx(theirs, abs=1e-4)
        if draft == DRAFT:
            assert_abort(pair, reference, prompts)
            assert_dead_peer(pair, prompts)


# Twelve requests of 200 tokens do not fit.
TIGHT = ("--max-total-tokens", "896", "--num-reserved-decode-tokens", "4")


@pytest.mark.parametrize("draft", [DRAFT, PEAGLE_DRAFT], ids=["dflash", "peagle"])
def test_a_decode_server_retracts(draft, servers, reference, prompts):
    """The KV of target and draft goes to host memory and comes back to other slots.

    Answers are the same, and drafts are as good.
    """
    requests = [greedy(ids, max_new_tokens=200) for ids in prompts[:12]]
    penalized = [greedy(ids, max_new_tokens=160, **PENALTIES) for ids in prompts[:7]]
    servers.close()
    with pair_of(WHOLE_BLOCKS, *dflash_arguments(draft), decode=TIGHT) as pair:
        unhurried = pair.generate_many(requests, 2)
        assert retractions(unhurried) == 0
        hurried = pair.generate_many(requests, len(requests))
        assert retractions(hurried) > 0
        assert_same(requests, hurried, reference.answers(requests))
        allowed = NEARLY_SAME if draft == DRAFT else 0.05
        assert abs(cycles(hurried) - cycles(unhurried)) <= allowed * cycles(unhurried)
        unhurried, hurried = pair.generate_many(penalized, 2), pair.generate_many(penalized, len(penalized))
        assert output_ids(hurried) == output_ids(unhurried)
        assert_idle(pair.decode)


@pytest.mark.parametrize("draft", [DRAFT, PEAGLE_DRAFT], ids=["dflash", "peagle"])
def test_a_decode_server_verifies_what_is_worth_it(draft, servers, reference, prompts):
    """Widths change, down to none, while requests are retracted.

    The prefill server verifies nothing, and knows of no widths.
    """
    requests = [greedy(ids, max_new_tokens=200) for ids in prompts[:12]]
    servers.close()
    with pair_of(*dflash_arguments(draft), decode=(*TIGHT, *WIDTHS_CHANGE)) as pair:
        answers = pair.generate_many(requests, len(requests))
        assert retractions(answers) > 0
        assert_same(requests, answers, reference.answers(requests))
        assert_idle(pair.decode)
        [state] = pair.decode.get("/server_info")["internal_states"]
        assert set(state["speculative_width"]["blocks_per_length"]) == {"0", "1", "3", "7"}


def test_recurrent_states_arrive_whole(servers, prompts):
    """A target with recurrent states: every request has the cycles that it has on one server.

    Short answers end with the first or second cycle, which reads the state that was sent. A retracted request
    ends with HTTP 503, and the others are right: SGLang would resume it with a state of other tokens.
    """
    flags = [WHOLE_BLOCKS, *dflash_arguments(HYBRID_DRAFT)]
    requests = [greedy(ids, max_new_tokens=(4, 9, 40)[number % 3]) for number, ids in enumerate(prompts)]
    many = [greedy(ids, max_new_tokens=200) for ids in prompts[:12]]
    one = servers.get("--model-path", HYBRID_TARGET, *FLOAT32, *flags)
    alone, of_one = one.generate_many(requests, 8), Reference(one)
    of_one.answers([*many, *(greedy(ids) for ids in prompts[:6])])  # it remembers what is compared below
    servers.close()
    with pair_of(*flags, target=HYBRID_TARGET, decode=TIGHT, environment=PATIENCE) as pair:
        assert_same_cycles(pair.generate_many(requests, 4), alone)
        assert_same_cycles(pair.generate_many(requests, 4), alone)  # slots have had other owners now
        ended = generate_or_give_up(pair, many)
        assert 0 < ended.count(503) < len(many)
        resumed = [number for number, answer in enumerate(ended) if answer != 503]
        picked = [many[number] for number in resumed]
        assert_same(picked, [ended[number] for number in resumed], of_one.answers(picked))
        assert_idle(pair.decode)
        assert_abort(pair, of_one, prompts)
        assert_dead_peer(pair, prompts)


def test_recurrent_states_of_retracted_requests_come_back(servers, prompts):
    """Without overlap scheduling they go to host memory with the tokens that they belong to."""
    flags = dflash_arguments(HYBRID_DRAFT)
    many = [greedy(ids, max_new_tokens=200) for ids in prompts[:12]]
    of_one = Reference(servers.get("--model-path", HYBRID_TARGET, *FLOAT32, *flags))
    of_one.answers(many)
    servers.close()
    with pair_of(*flags, target=HYBRID_TARGET, decode=(*TIGHT, "--disable-overlap-schedule")) as pair:
        hurried = pair.generate_many(many, len(many))
        assert retractions(hurried) > 0
        assert_same(many, hurried, of_one.answers(many))
        assert_idle(pair.decode)


def generate_or_give_up(pair: Pair, requests: list[dict]) -> list[dict | int]:
    """Send all requests at once; return each one's answer, or the HTTP status that ended it."""

    def generate(request: dict) -> dict | int:
        try:
            return pair.generate(**request)
        except urllib.error.HTTPError as error:
            return error.code

    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(generate, requests))


def assert_same_cycles(answers: list[dict], alone: list[dict]) -> None:
    for name in ("output_ids", "spec_correct_drafts_histogram"):
        got, want = ([{**a, **a["meta_info"]}[name] for a in side] for side in (answers, alone))
        assert got == want, name


def retractions(answers: list[dict]) -> int:
    return sum(answer["meta_info"]["num_retractions"] for answer in answers)


def test_a_prefill_server_without_a_draft(servers, reference, prompts):
    """Plain SGLang computes the prompts; their missing draft KV costs acceptance only."""
    requests = [greedy(ids) for ids in prompts[:12]]
    servers.close()
    with pair_of(decode=tuple(dflash_arguments())) as pair:
        answers = pair.generate_many(requests, 6)
        assert_same(requests, answers, reference.answers(requests))
        assert said(answers) > 1.2 * cycles(answers), "nothing is drafted at all"


@contextlib.contextmanager
def routed(pair: Pair) -> Iterator[Server]:
    """Start SGLang's router in front of both servers."""
    workers = "--prefill", pair.prefill.url, pair.bootstrap_port, "--decode", pair.decode.url
    with serve(
        "--pd-disaggregation", *map(str, workers), launcher=("-m", "sglang_router.launch_router")
    ) as router:
        deadline = time.monotonic() + 60
        while True:  # it takes its workers in one after the other
            try:
                router.get("/readiness")
                break
            except urllib.error.HTTPError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)
        yield router


@pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None,
    reason="not installed: pip install --no-deps sglang-router==0.3.2",
)
def test_behind_sglangs_router(servers, prompts):
    """Greedy, and sampled with seeds that both servers use."""
    flags, environment = (
        (WHOLE_BLOCKS, *dflash_arguments(), "--enable-deterministic-inference"),
        patched("deterministic_on_cpu", *PATCHES),
    )
    requests = [greedy(ids) for ids in prompts[:8]]
    requests += [
        greedy(ids, temperature=0.8, top_p=0.9, sampling_seed=seed) for seed, ids in enumerate(prompts[:8])
    ]
    chat = {
        "model": "default",
        "messages": [{"role": "user", "content": "Write a function."}],
        "temperature": 0,
        "max_tokens": 24,
    }
    one = servers.get(*FLOAT32, *flags, environment=environment)
    alone, wanted = one.generate_many(requests, 8), one.post("/v1/chat/completions", chat)
    servers.close()
    with pair_of(*flags, environment=environment) as pair, routed(pair) as router:
        answers = router.generate_many(requests, 8)
        assert output_ids(answers) == output_ids(alone)
        assert abs(cycles(answers) - cycles(alone)) <= NEARLY_SAME * cycles(alone)
        assert router.post("/v1/chat/completions", chat)["choices"] == wanted["choices"]


def assert_abort(pair: Pair, reference, prompts) -> None:
    """Abort one request on the decode side; others go on.

    It has begun to answer: before that SGLang ends it with HTTP 500.
    """
    others = [greedy(ids) for ids in prompts[:6]]
    victim = {**greedy(prompts[7], max_new_tokens=2000), **pair.somewhere(), "rid": "victim"}
    with concurrent.futures.ThreadPoolExecutor(7) as pool:
        prefilled = pool.submit(pair.prefill.generate, **victim)
        answers = pool.map(lambda request: pair.generate(**request), others)
        chunks = stream(pair.decode, victim)
        next(chunks)
        pair.decode.post("/abort_request", {"rid": "victim"})
        *_, last = chunks
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        assert_same(others, list(answers), reference.answers(others))
        prefilled.result()


def assert_dead_peer(pair: Pair, prompts) -> None:
    """Stop the prefill server: requests end with an error, the decode server lives and frees their slots."""
    os.killpg(pair.prefill.process.pid, signal.SIGKILL)
    with pytest.raises(urllib.error.HTTPError) as failure:
        pair.decode.post("/generate", {**greedy(prompts[0]), **pair.somewhere()}, timeout=120)
    assert failure.value.code >= 500, failure.value.read()
    assert pair.decode.process.poll() is None
    assert_idle(pair.decode)


def assert_idle(server: Server) -> None:
    deadline = time.monotonic() + 30
    while (load := server.get("/v1/loads")["loads"][0])["num_used_tokens"] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert load["num_running_reqs"] == load["num_used_tokens"] == 0, json.dumps(load)
