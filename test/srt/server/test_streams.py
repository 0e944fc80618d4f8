"""Streams of blocks on every endpoint: joined chunks are the whole answer.

The target is made to say texts of several bytes a character, in steps of 1 to 16 tokens.
"""

import itertools
import json

import pytest
from serving import DRAFT, PEAGLE_DRAFT, WHOLE_BLOCKS, Server, dflash_arguments
from support.forced_texts import FORCED, prompt_for
from support.scripts import SCRIPTS
from support.servers import COPIES, FLOAT32
from support.stream_fuzz import differing
from support.streaming import ENDPOINTS, stream

pytestmark = pytest.mark.server

BLOCK_SIZE = 16


def serve(servers, block_size: int, *arguments, draft=DRAFT) -> Server:
    block = "--speculative-num-draft-tokens", block_size
    name = "--served-model-name", "default"
    every_slot = *FLOAT32, WHOLE_BLOCKS, *block, *name
    return servers.get(*every_slot, *arguments, *dflash_arguments(draft), environment=FORCED)


@pytest.fixture(scope="module")
def server(servers) -> Server:
    return serve(servers, BLOCK_SIZE)


def test_every_endpoint_of_sglang_that_streams_is_here(server):
    """Bodies with a field `stream`. That of /vertex_generate is a parameter; audio needs another model."""
    described = server.get("/openapi.json")
    streaming = set()
    for path, methods in described["paths"].items():
        for body in methods.get("post", {}).get("requestBody", {}).get("content", {}).values():
            name = body["schema"].get("$ref", "").rpartition("/")[2]
            if "stream" in described["components"]["schemas"].get(name, {}).get("properties", ()):
                streaming.add(path)
    assert streaming - {"/v1/audio/transcriptions"} == {each.path for each in ENDPOINTS} - {
        "/vertex_generate"
    }


def test_joined_streams_are_whole_answers(server):
    """Texts of six scripts, with stops in mid-block and two answers a request."""
    assert not differing(server, 63)


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [prompt_for(text) for text in SCRIPTS.values()]


def test_a_chunk_has_1_to_16_tokens(server, prompts):
    """Else the other tests prove little."""
    sizes = set()
    for prompt in prompts:
        request = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 400}}
        counts = [event["meta_info"]["completion_tokens"] for event in stream(server, request)]
        sizes |= {after - before for before, after in itertools.pairwise(counts)}
    assert sizes >= {*range(1, BLOCK_SIZE + 1)}, sizes


def test_log_probabilities_and_usage_of_chats(server, prompts):
    """Of the whole answer, in order. SGLang drops those of a step that adds no text, as without a draft."""
    for prompt in prompts:
        request = {
            "model": "default",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
            "stream_options": {"include_usage": True},
        }
        events = [*stream(server, request, "/v1/chat/completions")]
        request.pop("stream_options")
        whole = server.post("/v1/chat/completions", request)
        choices = [choice for event in events for choice in event["choices"] if choice.get("logprobs")]
        joined = [token for choice in choices for token in choice["logprobs"]["content"]]
        expected = whole["choices"][0]["logprobs"]["content"]
        assert count_of(events[-1]["usage"]) == count_of(whole["usage"]) == len(expected)
        rest = iter(expected)
        expected = [next(other for other in rest if other["bytes"] == each["bytes"]) for each in joined]
        assert len(joined) > 8 and values_of(joined) == pytest.approx(values_of(expected), abs=1e-4)
        assert values_of(*(each["top_logprobs"] for each in joined)) == pytest.approx(
            values_of(*(each["top_logprobs"] for each in expected)), abs=1e-4
        )


def values_of(*tokens: list[dict]) -> list[float]:
    return [each["logprob"] for some in tokens for each in some]


def count_of(usage: dict) -> int:
    return usage["completion_tokens"]


FUZZED = {
    "block 8": (8, DRAFT, ()),
    "block 16, pieces, copies": (16, DRAFT, ("--incremental-streaming-output", *COPIES)),
    "block 32, P-EAGLE, interval": (32, PEAGLE_DRAFT, ("--stream-interval", "3")),
}


@pytest.mark.long
@pytest.mark.parametrize("case", FUZZED)
def test_a_thousand_streams(case, servers):
    block_size, draft, arguments = FUZZED[case]
    found = differing(serve(servers, block_size, *arguments, draft=draft), 336, seed=block_size)
    assert not found, json.dumps(found, ensure_ascii=False, indent=1)
