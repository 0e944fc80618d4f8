"""Request options: ends in mid-block and refusals.

Answers must be the target's own. All tests run in float32 against the same target without speculation.
Stops, sampled requests, log probabilities and grammars have their own files.
"""

import collections
import concurrent.futures
import json
import re
import urllib.error

import pytest
from serving import DRAFT, TARGET, Server, dflash_arguments, heldout_prompts
from support.parity import assert_same
from support.servers import FLOAT32

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


FIELDS = (
    ("stop_token_ids", {"stop_token_ids": [1_000_000_000], "min_new_tokens": 4}, {}),
    ("stop_token_ids", {"stop_token_ids": [-1]}, {}),
    ("logit_bias", {"logit_bias": {"1000000000": 1.0}}, {}),
    ("logit_bias", {"logit_bias": {"-1": 1.0}}, {}),
    ("top_k", {"temperature": 1.0, "top_k": 2**31}, {}),
    ("stop_regex", {"stop_regex": "["}, {}),
    ("custom_params", {"custom_params": [1]}, {}),
    ("speculative_max_tokens", {"custom_params": {"speculative_max_tokens": -1}}, {}),
    ("n cannot be 1000000000", {"n": 10**9}, {}),
    ("n cannot be 0", {"n": 0}, {}),
    ("n cannot be -2", {"n": -2}, {}),
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
    ("vocabulary", {}, {"text": None, "input_ids": [5, -1, 7]}),
    ("vocabulary", {}, {"text": None, "input_ids": [5, 2**40, 7]}),
    ("return-hidden-states", {}, {"return_hidden_states": True}),
    ("custom", {}, {"custom_logit_processor": "{}"}),
    # SGLang's own type check comes first, and does not name the field.
    ("", {"min_new_tokens": 2.5}, {}),
    ("", {"stop_token_ids": [2**70]}, {}),
    ("", {"json_schema": {"type": "object"}}, {}),
    # The grammar backend's own words.
    ("", {"regex": "[a-z"}, {}),
    ("", {"json_schema": "{"}, {}),
    ("", {"ebnf": "root ::= nothing"}, {}),
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


def test_max_new_tokens_cuts_a_block(server, reference, prompts):
    limits = [limit for limit in (1, 2, 3, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE - 1) for _ in range(2)]
    requests = [greedy(prompt, limit, ignore_eos=True) for prompt, limit in zip(prompts, limits, strict=True)]
    for limit, answer in zip(limits, assert_answers(server, reference, requests), strict=True):
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


def test_a_prompt_as_long_as_the_context_is_refused(server, reference, prompts):
    request = {"input_ids": [7] * CONTEXT_LENGTH, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.generate(**request)
    assert refusal.value.code == 400
    assert_answers(server, reference, [greedy(prompts[1], 8)])
