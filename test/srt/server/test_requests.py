"""Request options: ends in mid-block, streams and refusals.

Answers must be the target's own. All tests run in float32 against the same target without speculation.
Sampled requests, log probabilities and grammars have their own files.
"""

import collections
import concurrent.futures
import json
import re
import urllib.error

import pytest
from serving import DRAFT, TARGET, Server, dflash_arguments, heldout_prompts
from support.parity import assert_same, first_difference
from support.servers import FLOAT32
from support.streaming import stream

pytestmark = pytest.mark.server

BLOCK_SIZE = json.loads((DRAFT / "config.json").read_text())["block_size"]
CONTEXT_LENGTH = json.loads((TARGET / "config.json").read_text())["max_position_embeddings"]


@pytest.fixture(scope="module")
def server(servers) -> Server:
    return servers.get(*FLOAT32, *dflash_arguments())


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Twelve held-out prompts of 10 to 400 tokens."""
    return [p["text"] for p in heldout_prompts() if 10 <= p["num_tokens"] <= 400][::18][:12]


def greedy(prompt: str, max_new_tokens: int = 48, **sampling) -> dict:
    return {
        "text": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling},
    }


def assert_answers(server: Server, reference, requests: list[dict]) -> list[dict]:
    answers = server.generate_many(requests, 6)
    assert_same(requests, answers, reference.answers(requests))
    return answers


def test_stop_strings_end_an_answer_where_the_target_would(server, reference, prompts):
    """Stop at three characters of the target's answer, at places all over a block."""
    plain = reference.answers([greedy(prompt, ignore_eos=True) for prompt in prompts])
    requests = []
    for number, (prompt, answer) in enumerate(zip(prompts, plain)):
        start = min(8 + 5 * number, len(answer["text"]) - 4)
        stop = ["never emitted", answer["text"][start : start + 3]]
        requests.append(greedy(prompt, ignore_eos=True, stop=stop, no_stop_trim=number % 2 == 0))
    answers = assert_answers(server, reference, requests)
    stopped = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert len(stopped) == len(answers), "a stop string cut from the answer did not stop it"


def test_stop_tokens_end_an_answer_at_every_slot_of_a_block(server, reference, prompts):
    plain = reference.answers([greedy(prompt, ignore_eos=True) for prompt in prompts])
    requests = [
        greedy(prompt, stop_token_ids=[answer["output_ids"][number]])
        for number, (prompt, answer) in enumerate(zip(prompts, plain))
    ]
    for answer in assert_answers(server, reference, requests):
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer


def test_a_request_caps_its_drafted_tokens(server, reference, prompts):
    """Caps of all sizes beside each other. An answer without speculation takes a cycle per token."""
    caps = [0, 1, 3, BLOCK_SIZE - 1, 10**6, None] * 2
    params = [{} if cap is None else {"custom_params": {"speculative_max_tokens": cap}} for cap in caps]
    requests = [greedy(prompt, ignore_eos=True, **extra) for prompt, extra in zip(prompts, params)]
    answers = server.generate_many(requests, 6)
    plain = [greedy(prompt, ignore_eos=True) for prompt in prompts]
    assert_same(plain, answers, reference.answers(plain))
    for cap, answer in zip(caps, answers):
        most = len(answer["meta_info"]["spec_correct_drafts_histogram"]) - 1
        assert most <= (BLOCK_SIZE - 1 if cap is None else cap), (cap, answer["meta_info"])
    assert any(len(a["meta_info"]["spec_correct_drafts_histogram"]) > 2 for a in answers[3::6])


@pytest.mark.parametrize("token", [-1, 1_000_000_000, 2**40])
def test_a_token_id_outside_the_vocabulary_is_refused(token, server, reference, prompts):
    """Only the faulty request ends; in stock SGLang the server ends."""
    good = [greedy(prompt) for prompt in prompts[:4]]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        others = pool.submit(server.generate_many, good, 4)
        with pytest.raises(urllib.error.HTTPError) as refusal:
            server.generate(input_ids=[5, token, 7], sampling_params={"temperature": 0, "max_new_tokens": 8})
        message = refusal.value.read().decode()
        assert refusal.value.code == 400 and str(token) in message and "vocabulary" in message, message
        assert_same(good, others.result(), reference.answers(good))


FIELDS = (
    ("stop_token_ids", {"stop_token_ids": [1_000_000_000], "min_new_tokens": 4}, {}),
    ("stop_token_ids", {"stop_token_ids": [-1]}, {}),
    ("logit_bias", {"logit_bias": {"1000000000": 1.0}}, {}),
    ("logit_bias", {"logit_bias": {"-1": 1.0}}, {}),
    ("top_k", {"temperature": 1.0, "top_k": 2**31}, {}),
    ("stop_regex", {"stop_regex": "["}, {}),
    ("custom_params", {"custom_params": [1]}, {}),
    ("speculative_max_tokens", {"custom_params": {"speculative_max_tokens": -1}}, {}),
    ("n is 1000000000", {"n": 10**9}, {}),
    ("n is 0", {"n": 0}, {}),
    ("n is -2", {"n": -2}, {}),
    ("top_logprobs_num", {}, {"return_logprob": True, "top_logprobs_num": 1_000_000_000}),
    ("top_logprobs_num", {}, {"return_logprob": True, "top_logprobs_num": -3}),
    ("top_logprobs_num", {}, {"return_logprob": True, "top_logprobs_num": 2049, "logprob_start_len": 0}),
    ("token_ids_logprob", {}, {"return_logprob": True, "token_ids_logprob": [1_000_000_000]}),
    ("token_ids_logprob", {}, {"return_logprob": True, "token_ids_logprob": [-1]}),
    ("logprob_start_len", {}, {"return_logprob": True, "logprob_start_len": -5}),
    ("logprob_start_len", {}, {"return_logprob": True, "logprob_start_len": 1_000_000}),
    ("positional_embed_overrides", {}, {"positional_embed_overrides": {"a": 1}}),
    ("rid", {}, {"rid": ["one"]}),
    ("no tokens", {}, {"text": ""}),
    ("no tokens", {}, {"text": None, "input_ids": [[]]}),
    # SGLang's own type check comes first, and does not name the field.
    ("", {"min_new_tokens": 2.5}, {}),
    ("", {"stop_token_ids": [2**70]}, {}),
    ("", {"json_schema": {"type": "object"}}, {}),
)


def test_a_field_out_of_range_is_refused_by_name(server, reference, prompts):
    """Refuse each field while other requests run on.

    In stock SGLang most of these values end the server, or the request with a server error.
    """
    good = [greedy(prompt) for prompt in prompts[:6]]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        others = pool.submit(server.generate_many, good * 4, 6)
        for name, sampling, fields in FIELDS:
            request = {**greedy(prompts[0], 8, **sampling), **fields}
            with pytest.raises(urllib.error.HTTPError) as refusal:
                server.generate(**request)
            message = refusal.value.read().decode()
            assert refusal.value.code == 400 and name in message, (
                f"{name} {sampling} {fields}: {refusal.value.code} {message}"
            )
        assert_same(good * 4, others.result(), reference.answers(good) * 4)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 10**9},
        {"logit_bias": {"1000000000": 1.0}},
        {"stop_token_ids": [1_000_000_000]},
        {"top_k": 2**31, "temperature": 1.0},
        {"logprobs": 1_000_000},
        {"max_tokens": 2**70},
        {"prompt": [[5, 1_000_000_000]]},
        {"prompt": [-7]},
    ],
    ids=str,
)
def test_an_openai_field_out_of_range_is_refused(fields, server, reference, prompts):
    request = {"model": "default", "prompt": prompts[0], "max_tokens": 8, "temperature": 0, **fields}
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.post("/v1/completions", request)
    assert refusal.value.code in (400, 422), refusal.value.read()
    assert_answers(server, reference, [greedy(prompts[1], 8)])


def test_end_of_text_in_mid_block(server, reference, prompts):
    """A logit bias makes end-of-text likely; `ignore_eos` runs past the same token."""
    requests = [
        greedy(prompt, logit_bias={"0": bias}, ignore_eos=ignore)
        for prompt in prompts[::2]
        for bias in (6.0, 12.0)
        for ignore in (False, True)
    ]
    answers = assert_answers(server, reference, requests)
    ended = [a for a in answers if a["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended, "no answer ended with end-of-text, so the test proves nothing"
    positions = {len(answer["output_ids"]) % BLOCK_SIZE for answer in ended}
    assert len(positions) > 1, f"every answer ended at the same slot of a block: {positions}"


@pytest.mark.parametrize("limit", [1, 2, 3, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE - 1])
def test_max_new_tokens_cuts_a_block(limit, server, reference, prompts):
    requests = [greedy(prompt, limit, ignore_eos=True) for prompt in prompts[:6]]
    for answer in assert_answers(server, reference, requests):
        assert answer["meta_info"]["completion_tokens"] == limit
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": limit}


def test_several_answers_to_one_prompt(server, reference, prompts):
    request = greedy(prompts[3], n=3)
    expected = reference.answer(greedy(prompts[3]))
    answers = server.generate(**request)
    assert len(answers) == 3
    assert_same([request] * 3, answers, [expected] * 3)
    batch = server.generate(
        text=prompts[:3], sampling_params=[greedy("", n)["sampling_params"] for n in (5, 17, 30)]
    )
    each = [greedy(prompt, n) for prompt, n in zip(prompts, (5, 17, 30))]
    assert_same(each, batch, reference.answers(each))


def test_streamed_tokens_are_never_taken_back(server, reference, prompts):
    """No chunk shows more than the final text, also with a stop string in mid-block."""
    stop = reference.answer(greedy(prompts[5], ignore_eos=True))["text"][20:23]
    for request in (greedy(prompts[4]), greedy(prompts[5], ignore_eos=True, stop=[stop])):
        chunks = list(stream(server, request))
        assert_same([request], [chunks[-1]], reference.answers([request]))
        for chunk in chunks:
            ids = chunk["output_ids"]
            assert chunks[-1]["output_ids"][: len(ids)] == ids, f"{request}: {ids} is no prefix of the answer"


def test_logged_accept_length_is_the_histograms(server, prompts):
    """Compare the log, here one line per step, with the histogram of a lone request."""
    server.flush_cache()
    before = len(server.log())
    answer = server.generate(**greedy(prompts[6], 60, ignore_eos=True))
    logged = collections.Counter(
        float(length) for length in re.findall(r"Decode batch.*accept len: ([\d.]+)", server.log()[before:])
    )
    histogram = answer["meta_info"]["spec_correct_drafts_histogram"]
    counted = collections.Counter({float(kept + 1): count for kept, count in enumerate(histogram) if count})
    # The scheduler runs one step ahead: the log may lack the last step, or have one after the request's end.
    assert (counted - logged).total() <= 1, f"cycles of these lengths were not logged: {counted - logged}"
    assert (logged - counted).total() <= 1, f"logged cycles that the request did not have: {logged - counted}"


def test_logit_bias(server, reference, prompts):
    plain = reference.answers([greedy(prompt) for prompt in prompts[:6]])
    requests = []
    for prompt, answer in zip(prompts, plain):
        common = max(answer["output_ids"], key=answer["output_ids"].count)
        requests.append(greedy(prompt, logit_bias={str(common): -100.0, "300": 3.0}))
    biased = assert_answers(server, reference, requests)
    changed = [first_difference(b["output_ids"], p["output_ids"]) for b, p in zip(biased, plain)]
    assert any(position is not None for position in changed), (
        "the bias changed nothing, so the test proves nothing"
    )


@pytest.mark.parametrize("room", [BLOCK_SIZE - 1, BLOCK_SIZE, 3 * BLOCK_SIZE])
def test_a_request_runs_up_to_the_context_limit(room, server, reference):
    """The last blocks reach past the context, and tokens stay the target's."""
    ids = [5 + (7 * i) % 1000 for i in range(CONTEXT_LENGTH - room)]
    request = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": room, "ignore_eos": True},
    }
    [answer] = assert_answers(server, reference, [request])
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    # SGLang reduces the requested number and reserves two positions.
    assert answer["meta_info"]["completion_tokens"] == room - 2


def test_a_prompt_as_long_as_the_context_is_refused(server, reference, prompts):
    request = {"input_ids": [7] * CONTEXT_LENGTH, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.generate(**request)
    assert refusal.value.code == 400
    assert_answers(server, reference, [greedy(prompts[1], 8)])


@pytest.mark.parametrize(
    "name, fields",
    [
        ("custom_logit_processor", {"custom_logit_processor": "{}"}),
        ("return_hidden_states", {"return_hidden_states": True}),
    ],
)
def test_an_unsupported_parameter_is_refused_by_name(name, fields, server, reference, prompts):
    request = {**greedy(prompts[0], 8), **fields}
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.generate(**request)
    message = refusal.value.read().decode()
    assert refusal.value.code == 400, f"{name}: {refusal.value.code} {message}"
    assert name in message.replace("-", "_"), f"the refusal of {name} does not name it: {message}"
    assert_answers(server, reference, [greedy(prompts[1], 8)])


def test_a_refusal_leaves_running_requests_alone(server, reference, prompts):
    fine = [greedy(prompt, 40, ignore_eos=True) for prompt in prompts[:8]]
    bad = [{**greedy(prompt, 40), "return_hidden_states": True} for prompt in prompts[:8]]
    mixed = [request for pair in zip(fine, bad) for request in pair]

    def answer_or_status(request):
        try:
            return server.generate(**request)
        except urllib.error.HTTPError as error:
            return error.code

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(answer_or_status, mixed))
    assert answers[1::2] == [400] * len(bad)
    assert_same(fine, answers[::2], reference.answers(fine))
