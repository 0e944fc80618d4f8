"""Grammars over HTTP: OpenAI's field, and refusals. engine/test_grammars.py has the answers."""

import urllib.error

import pytest
from serving import Server, dflash_arguments, heldout_prompts
from support.grammars import SCHEMA, assert_schema, greedy
from support.parity import assert_same
from support.servers import FLOAT32
from support.streaming import stream

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(servers) -> Server:
    return servers.get(*FLOAT32, *dflash_arguments())


@pytest.fixture(scope="module")
def prompt() -> str:
    return [p["text"] for p in heldout_prompts() if 10 <= p["num_tokens"] <= 400][18]


def test_openai_response_format(server, reference, prompt):
    """Chat and completions, streamed too."""
    schema = {"type": "json_schema", "json_schema": {"name": "code", "schema": SCHEMA}}
    request = {"model": "default", "temperature": 0, "max_tokens": 120, "response_format": schema}
    chat = {**request, "messages": [{"role": "user", "content": prompt}]}
    got, want = (s.post("/v1/chat/completions", chat)["choices"][0] for s in (server, reference.server))
    assert got["message"]["content"] == want["message"]["content"]
    assert_schema(got["message"]["content"])
    chunks = [chunk["choices"][0]["delta"] for chunk in stream(server, chat, "/v1/chat/completions")]
    assert "".join(delta.get("content") or "" for delta in chunks) == want["message"]["content"]
    completion = {**request, "prompt": prompt}
    got, want = (
        s.post("/v1/completions", completion)["choices"][0]["text"] for s in (server, reference.server)
    )
    assert got == want
    assert_schema(got)


@pytest.mark.parametrize("sampling", [{"regex": "[a-z"}, {"json_schema": "{"}, {"ebnf": "root ::= nothing"}])
def test_a_broken_grammar_is_refused(sampling, server, reference, prompt):
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.generate(**greedy(prompt, 8, **sampling))
    assert refusal.value.code == 400
    requests = [greedy(prompt, 8)]
    assert_same(requests, server.generate_many(requests, 1), reference.answers(requests))
