"""Log probabilities equal those of the same target without speculation.

Both APIs are tested in float32, native and OpenAI, streamed and not streamed.
"""

import math

import pytest
import torch
from serving import TARGET, Server, dflash_arguments, heldout_prompts
from support.logprob_checks import (
    FIELDS,
    TOLERANCE,
    VOCAB,
    assert_answers,
    assert_field,
    assert_logprobs,
    greedy,
)
from support.parity import assert_same
from support.servers import FLOAT32
from support.streaming import stream
from tokenizers import Tokenizer

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(servers) -> Server:
    return servers.get(*FLOAT32, *dflash_arguments())


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Twelve held-out prompts of 10 to 400 tokens."""
    return [p["text"] for p in heldout_prompts() if 10 <= p["num_tokens"] <= 400][::18][:12]


def test_every_kind_of_request_in_one_batch(server, reference, prompts):
    """Mix requests with different numbers of top tokens and ids, and with none."""
    requests = [
        {
            **greedy(prompt, 20 + number, ignore_eos=True),
            "return_logprob": number % 4 != 3,
            "top_logprobs_num": number % 3,
            "token_ids_logprob": None if number % 5 == 0 else list(range(5, 8 + number)),
            "logprob_start_len": (-1, 0, 4)[number % 3],
        }
        for number, prompt in enumerate(prompts)
    ]
    with_logprobs = [request for request in requests if request["return_logprob"]]
    answers = [a for r, a in zip(requests, server.generate_many(requests, 6)) if r["return_logprob"]]
    expected = reference.server.generate_many(with_logprobs, 6)
    for request, got, want in zip(with_logprobs, answers, expected, strict=True):
        assert got["output_ids"] == want["output_ids"]
        for field in FIELDS:
            assert_field(field, got["meta_info"].get(field), want["meta_info"].get(field), request)
        assert len(got["meta_info"]["output_token_logprobs"]) == request["sampling_params"]["max_new_tokens"]


@pytest.mark.parametrize("start", [-1, 0, 1, 7])
def test_prompt_logprobs_start_where_requested(start, server, reference, prompts):
    """Send each request twice: the second time its prompt is in the prefix cache."""
    requests = [{**greedy(prompt, 12), "logprob_start_len": start} for prompt in prompts[:4]]
    for _ in range(2):
        for answer in assert_answers(server, reference, requests):
            prompt_tokens = answer["meta_info"]["prompt_tokens"]
            positions = 0 if start == -1 else prompt_tokens - start
            assert len(answer["meta_info"]["input_token_logprobs"]) == positions


def test_zero_tokens_have_no_log_probabilities(server, reference, prompts):
    """SGLang still gives those of listed ids and of the likeliest tokens, which score a prompt."""
    for options in ({}, {"logprob_start_len": 0}, {"token_ids_logprob": [5, 6], "top_logprobs_num": 2}):
        request = {**greedy(prompts[0], 0), "return_logprob": True, "top_logprobs_num": 0, **options}
        answer, wanted = server.generate(**request), reference.server.generate(**request)
        assert answer["output_ids"] == wanted["output_ids"] == []
        assert answer["meta_info"]["output_token_logprobs"] == []
        for field in FIELDS:
            assert_field(field, answer["meta_info"].get(field), wanted["meta_info"].get(field), request)


def test_an_answer_cut_in_mid_block_has_no_more_positions_than_tokens(server, reference, prompts):
    plain = reference.answers([greedy(prompt, 40, ignore_eos=True) for prompt in prompts])
    requests = [
        greedy(prompt, 40, ignore_eos=True, stop=[answer["text"][8 + 2 * number : 11 + 2 * number]])
        for number, (prompt, answer) in enumerate(zip(prompts, plain))
    ]
    requests += [
        greedy(prompt, 40, stop_token_ids=[answer["output_ids"][number]])
        for number, (prompt, answer) in enumerate(zip(prompts, plain))
    ]
    answers = assert_answers(server, reference, requests)
    assert any(answer["meta_info"]["finish_reason"]["type"] == "stop" for answer in answers)


def test_logprobs_are_those_after_the_bias(server, reference, prompts):
    requests = [greedy(prompt, 24, logit_bias={"300": 4.0, "5": -100.0}) for prompt in prompts[:6]]
    assert_answers(server, reference, requests)


def test_logprobs_are_those_after_the_temperature(server, reference, prompts):
    """SGLang scales logits by each request's temperature, except greedy ones."""
    temperatures = (0.0, 0.5, 1.7, 1.0, 0.7, 0.0, 2.5, 1.3)
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts_ids = [tokenizer.encode(prompt).ids for prompt in prompts[: len(temperatures)]]
    requests = [
        greedy(ids, 16, temperature=temperature, ignore_eos=True, top_p=0.9 if number % 2 else 1.0)
        for number, (ids, temperature) in enumerate(zip(prompts_ids, temperatures))
    ]
    answers = server.generate_many(requests, len(requests))
    scoring = [
        {
            **greedy(ids + answer["output_ids"], 1),
            "token_ids_logprob": list(range(VOCAB)),
            "logprob_start_len": 0,
        }
        for ids, answer in zip(prompts_ids, answers)
    ]
    scored = reference.server.generate_many(scoring, 4)
    for request, answer, score, temperature in zip(requests, answers, scored, temperatures, strict=True):
        rows = score["meta_info"]["input_token_ids_logprobs"][-16:]
        logits = torch.tensor([[value for value, *_ in row] for row in rows], dtype=torch.float64)
        expected = (logits / (temperature or 1.0)).log_softmax(dim=-1)
        info = answer["meta_info"]
        for place, token in enumerate(answer["output_ids"]):
            listed = [info["output_token_logprobs"][place], *info["output_top_logprobs"][place]]
            listed += info["output_token_ids_logprobs"][place]
            assert listed[0][1] == token and len(listed) == 1 + 3 + 3
            for value, listed_token, *_ in listed:
                want = float(expected[place, listed_token])
                where = f"token {listed_token} at {place} of {request}: {value}, expected {want}"
                assert abs(value - want) <= TOLERANCE, where


def test_streamed_chunks_grow_to_the_whole(server, reference, prompts):
    for prompt in prompts[:3]:
        request = {**greedy(prompt, 30, ignore_eos=True), "logprob_start_len": 0}
        chunks = list(stream(server, request))
        [want] = reference.answers([request])
        assert_same([request], [chunks[-1]], [want])
        assert_logprobs(request, chunks[-1], want)
        assert len(chunks) > 3
        for chunk in chunks:
            for kind in ("token", "top", "token_ids"):
                field = f"output_{kind}_logprobs"
                got, final = (answer["meta_info"][field] for answer in (chunk, chunks[-1]))
                assert len(got) == chunk["meta_info"]["completion_tokens"]
                assert got == final[: len(got)]


def completion(prompt: str) -> dict:
    return {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": 24, "logprobs": 3}


def chat(prompt: str) -> dict:
    messages = [{"role": "user", "content": prompt}]
    request = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 24}
    return {**request, "logprobs": True, "top_logprobs": 3}


def rows_of_completion(logprobs: dict) -> list[tuple[str, float, dict[str, float]]]:
    """List (token, its log probability, the top tokens' ones) per position."""
    tops = [top or {} for top in logprobs["top_logprobs"]]
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True))


def rows_of_chat(logprobs: dict) -> list[tuple[str, float, dict[str, float]]]:
    return [
        (entry["token"], entry["logprob"], {top["token"]: top["logprob"] for top in entry["top_logprobs"]})
        for entry in logprobs["content"]
    ]


def assert_rows(got: list, want: list, positions: int) -> None:
    assert len(got) == len(want) == positions
    for place, ((token, value, tops), (their_token, their_value, their_tops)) in enumerate(zip(got, want)):
        assert token == their_token, f"{token!r} at {place}, the target has {their_token!r}"
        assert (value is None) == (their_value is None)
        assert math.isclose(value or 0, their_value or 0, rel_tol=0, abs_tol=TOLERANCE), (
            f"{value}, expected {their_value}"
        )
        assert tops == pytest.approx(their_tops, abs=TOLERANCE)


@pytest.mark.parametrize(
    "path, make, rows",
    [("/v1/completions", completion, rows_of_completion), ("/v1/chat/completions", chat, rows_of_chat)],
    ids=["completions", "chat"],
)
def test_openai_logprobs(path, make, rows, server, reference, prompts):
    for prompt in prompts[:4]:
        request = make(prompt)
        got, want = (s.post(path, request) for s in (server, reference.server))
        tokens = want["usage"]["completion_tokens"]
        expected = rows(want["choices"][0]["logprobs"])
        assert_rows(rows(got["choices"][0]["logprobs"]), expected, tokens)
        chunks = [chunk["choices"][0] for chunk in stream(server, request, path) if chunk["choices"]]
        streamed = [row for chunk in chunks if chunk.get("logprobs") for row in rows(chunk["logprobs"])]
        assert_rows(streamed, expected, tokens)


def test_openai_completions_echo_the_prompts_logprobs(server, reference, prompts):
    request = {**completion(prompts[2]), "echo": True}
    got, want = (s.post("/v1/completions", request) for s in (server, reference.server))
    positions = want["usage"]["prompt_tokens"] + want["usage"]["completion_tokens"]
    logprobs = [rows_of_completion(answer["choices"][0]["logprobs"]) for answer in (got, want)]
    assert_rows(*logprobs, positions)


def test_a_chunked_prompt(servers, reference):
    """Prompt log probabilities span chunks; the last gives the first output token's."""
    server = servers.get(*FLOAT32, *dflash_arguments(), "--chunked-prefill-size", 64)
    texts = [p["text"] for p in heldout_prompts() if 150 <= p["num_tokens"] <= 400][:5]
    requests = [{**greedy(text, 20), "logprob_start_len": 30 * number} for number, text in enumerate(texts)]
    assert_answers(server, reference, requests)
