"""Request options: ends in mid-block, refusals, and a good value of every field.

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
from sglang.srt.sampling.sampling_params import SamplingParams
from support.parity import assert_same
from support.servers import FLOAT32

from sglang_dflash.srt.speculative.request_checks import _INTERNAL

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
    ("temperature", {"temperature": 1e300, "top_p": 0.9, "min_new_tokens": 1}, {}),
    ("logit_bias", {"temperature": 1.0, "top_p": 0.9, "logit_bias": {"5": 1e39}}, {}),
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


# -- a good value of every field whose form we check


HIDDEN = json.loads((TARGET / "config.json").read_text())["hidden_size"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"begin": "<a>", "schema": SCHEMA, "end": "</a>"}
PROMPT = "def read(path):\n    "

# A good value of each sampling parameter.
SAMPLING = {
    "max_new_tokens": 5,
    "stop": ["\n\n", "return"],
    "stop_token_ids": [5, 7],
    "stop_regex": "[xyz]+",
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.2,
    "min_new_tokens": 3,
    "n": 2,
    "json_schema": json.dumps(SCHEMA),
    "regex": "[a-z ]{3,9}",
    "ebnf": 'root ::= "yes" | "no"',
    "structural_tag": json.dumps({"type": "structural_tag", "structures": [TAG], "triggers": ["<a>"]}),
    "ignore_eos": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "custom_params": {"speculative_max_tokens": 2, "mine": [1, None]},
    "stream_interval": 2,
    "logit_bias": {"5": 1.5, "99": -100.0},
    "sampling_seed": 7,
}
# Other fields of a request. False: refused by name.
OTHERS = {
    "rid": ({"rid": "mine"}, True),
    "text": ({"text": [PROMPT, "class A"]}, True),
    "input_ids": ({"text": None, "input_ids": [5, 99, 7]}, True),
    "input_embeds": ({"text": None, "input_embeds": [[0.5] * HIDDEN] * 20}, False),
    "sampling_params": (
        {"text": [PROMPT] * 2, "sampling_params": [{"max_new_tokens": n} for n in (2, 9)]},
        True,
    ),
    "logprob_start_len": ({"return_logprob": True, "logprob_start_len": 0}, True),
    "top_logprobs_num": ({"return_logprob": True, "top_logprobs_num": 3}, True),
    "token_ids_logprob": ({"return_logprob": True, "token_ids_logprob": [5, 99]}, True),
    "return_sampling_mask": ({"return_sampling_mask": True}, True),
    "sampling_logprobs_mode": ({"return_sampling_mask": True, "sampling_logprobs_mode": "support"}, True),
    "return_text_in_logprobs": ({"return_logprob": True, "return_text_in_logprobs": True}, True),
    "return_flat_raw_output_top_logprobs": (
        {"return_logprob": True, "top_logprobs_num": 3, "return_flat_raw_output_top_logprobs": True},
        True,
    ),
    "watermark": ({"sampling_params": {"watermark": {"enabled": True}}}, False),
    "custom_logit_processor": ({"custom_logit_processor": "{}"}, False),
    "return_hidden_states": ({"return_hidden_states": True}, False),
    "positional_embed_overrides": (
        {"positional_embed_overrides": {"positions": [1], "embeds": [[0.5]]}},
        False,
    ),
}


def bodies() -> dict[str, tuple[dict, bool]]:
    """Return a request for each field, and whether it is answered."""
    plain = {"temperature": 0, "max_new_tokens": 12}
    found = {
        name: ({"text": PROMPT, "sampling_params": plain | {name: value}}, True)
        for name, value in SAMPLING.items()
    }
    found |= {
        name: ({"text": PROMPT, "sampling_params": plain} | fields, is_served)
        for name, (fields, is_served) in OTHERS.items()
    }
    return found


def test_every_sampling_parameter_has_a_value_here():
    """SGLang's own check refuses `beam_width` above 1 (docs/limits.md)."""
    assert {*SAMPLING, *OTHERS, *_INTERNAL, "beam_width"} >= set(SamplingParams.__struct_fields__)


def send(server: Server, body: dict) -> tuple[int, str]:
    """Return status and answer."""
    try:
        return 200, json.dumps(server.post("/generate", body, timeout=120))
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize(
    "flags",
    [
        FLOAT32,
        *(
            pytest.param((*FLOAT32, "--dtype", dtype, "--disable-radix-cache"), marks=pytest.mark.long)
            for dtype in ("float32", "bfloat16", "float16")
        ),
    ],
    ids=["float32", "float32 without prefix cache", "bfloat16", "float16"],
)
def test_a_good_value_leaves_the_server_alive(flags, servers):
    """Send each alone, then all of them beside plain requests, in each dtype that a CPU serves.

    A field is answered or refused by name, and its neighbours are answered.
    """
    server = servers.get(*flags, *dflash_arguments())
    neighbour = {"text": "import os\n", "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
    good, wrong = bodies(), []
    alone = {}
    for name, (body, _) in good.items():
        print(name, end=" ", flush=True)  # the last one before a server's end
        alone[name] = send(server, body)
    with concurrent.futures.ThreadPoolExecutor(2 * len(good)) as pool:
        pairs = [pool.submit(send, server, body) for own, _ in good.values() for body in (own, neighbour)]
        crowd = [answer.result() for answer in pairs]
    for (name, (_, is_served)), beside, other in zip(good.items(), crowd[::2], crowd[1::2], strict=True):
        print(f"{name:32} alone {alone[name][0]}, in a crowd {beside[0]}, its neighbour {other[0]}")
        for status, said in (alone[name], beside):
            named = name in re.sub("[- ]", "_", said)  # SGLang's own words name a flag
            if status != (200 if is_served else 400) or (not is_served and not named):
                wrong.append(f"{name}: {status} {said[:300]}")
        if other[0] != 200:
            wrong.append(f"beside {name}: {other}")
    assert server.process.poll() is None
    assert not wrong, "\n".join(wrong)
