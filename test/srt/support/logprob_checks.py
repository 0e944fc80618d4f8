"""Requests for log probabilities, and the comparison of two answers' log probabilities."""

import json

import pytest
from serving import TARGET, Server
from support.parity import assert_same

VOCAB = json.loads((TARGET / "config.json").read_text())["vocab_size"]
# For float32 log probabilities of one target, computed in two batch shapes.
TOLERANCE = 1e-4
FIELDS = tuple(
    f"{side}_{kind}_logprobs" for side in ("output", "input") for kind in ("token", "top", "token_ids")
)


def greedy(prompt: str | list[int], max_new_tokens: int, **sampling) -> dict:
    """Build a greedy request for every kind of log probability."""
    return {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, **sampling},
        "return_logprob": True,
        "top_logprobs_num": 3,
        "token_ids_logprob": [5, 6, 99],
    }


def assert_answers(server: Server, reference, requests: list[dict]) -> list[dict]:
    """Check that tokens and log probabilities are the reference's; return the answers."""
    answers = server.generate_many(requests, 6)
    expected = reference.answers(requests)
    assert_same(requests, answers, expected)
    for request, got, want in zip(requests, answers, expected):
        assert_logprobs(request, got, want)
    return answers


def assert_logprobs(request: dict, got: dict, want: dict) -> None:
    """Check positions, tokens and values (within TOLERANCE) of the output and the prompt."""
    for field in FIELDS:
        mine, theirs = got["meta_info"][field], want["meta_info"][field]
        if field == "output_token_logprobs":
            assert [token for _, token, _ in mine] == got["output_ids"]
        assert_field(field, mine, theirs, request)


def assert_field(field: str, got, want, request: dict) -> None:
    """Compare one field; entries are None if not requested, and before the first token."""
    assert (got is None) == (want is None), f"{field}: {got} but the target has {want}"
    assert len(got or []) == len(want or []), (
        f"{field}: {len(got)} positions, the target has {len(want)}: {request}"
    )
    for position, (mine, theirs) in enumerate(zip(got or [], want or [])):
        single = field.endswith("token_logprobs")
        mine, theirs = ([mine], [theirs]) if single else (mine or [], theirs or [])
        where = f"{field} at {position} of {request}: {mine} but the target has {theirs}"
        by_token = {token: value for value, token, *_ in theirs}
        assert len(mine) == len(theirs), where
        for value, token, *_ in mine:
            # Two tied tokens may change places at the end of a top list: only tokens of both lists count.
            if token in by_token and value is not None:
                assert abs(value - by_token[token]) <= TOLERANCE, where
        values = [[entry[0] for entry in side if entry[0] is not None] for side in (mine, theirs)]
        assert values[0] == pytest.approx(values[1], abs=TOLERANCE), where
