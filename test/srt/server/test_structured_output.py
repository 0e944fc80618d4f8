"""Grammars: answers are valid, and greedy answers are the target's own.

A block's positions are masked along the drafted chain, and rejected ones are rolled back. So errors would
show if a grammar branches, ends in mid-block, or shares a batch. All tests run in float32.
"""

import dataclasses
import json
import re
import urllib.error

import pytest
from serving import PEAGLE_DRAFT, TARGET, Server, dflash_arguments, heldout_prompts
from support.grammars import EBNF, EBNF_SHAPE, SCHEMA, greedy
from support.parity import FLOAT32_TIE, assert_same
from support.scheduled import Answer, Job, run
from support.servers import FLOAT32, PLAIN_FLOAT32, plain_target
from support.streaming import stream
from tokenizers import Tokenizer

pytestmark = pytest.mark.server

TRIGGERED = {
    "type": "structural_tag",
    "structures": [{"begin": "def", "schema": {"type": "integer", "minimum": 10, "maximum": 99}, "end": "!"}],
    "triggers": ["def"],
}


@pytest.fixture(scope="module")
def server(servers) -> Server:
    return servers.get(*FLOAT32, *dflash_arguments())


@pytest.fixture(scope="module")
def llguidance(servers) -> Server:
    return servers.get(*FLOAT32, *dflash_arguments(), "--grammar-backend", "llguidance")


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [p["text"] for p in heldout_prompts() if 10 <= p["num_tokens"] <= 400][::18][:12]


def assert_answers(server: Server, reference, requests: list[dict]) -> list[dict]:
    answers = server.generate_many(requests, 6)
    assert_same(requests, answers, reference.answers(requests))
    return answers


def assert_schema(text: str) -> None:
    parsed = json.loads(text)
    assert set(parsed) == {"name", "kind", "lines"} and parsed["kind"] in ("function", "class"), text
    assert re.fullmatch("[a-z]{1,12}", parsed["name"]) and 0 <= parsed["lines"] <= 999, text


CODE = r"(def|class) [a-z_]{3,12}\(\):\n    return [0-9]{1,6}"
KINDS = (
    {"regex": CODE},
    {"json_schema": json.dumps(SCHEMA)},
    {"ebnf": EBNF},
    {"regex": "[0-9]{4}-[0-9]{2}"},
    {},
)


def test_different_grammars_in_one_batch(server, reference, prompts):
    """A grammar affects neither others nor requests without one."""
    kinds = [KINDS[number % len(KINDS)] for number in range(2 * len(prompts))]
    requests = [greedy(prompt, 120, **kind) for prompt, kind in zip(prompts * 2, kinds, strict=True)]
    for kind, answer in zip(kinds, assert_answers(server, reference, requests), strict=True):
        text = answer["text"]
        if "regex" in kind:
            assert re.fullmatch(kind["regex"], text), f"{text!r} does not match {kind}"
        elif "json_schema" in kind:
            assert_schema(text)
        elif "ebnf" in kind and answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert re.fullmatch(EBNF_SHAPE, text) and text.count("(") == text.count(")"), text


def test_a_tag_that_begins_in_mid_answer(server, reference, prompts):
    """A trigger in free text starts a schema, so the mask covers part of a block."""
    requests = [
        greedy(prompt, 60, structural_tag=json.dumps(TRIGGERED), ignore_eos=True) for prompt in prompts
    ]
    tagged = [a["text"] for a in assert_answers(server, reference, requests) if "def" in a["text"][:-8]]
    assert tagged, "no answer reached the tag, so the test proves nothing"
    for text in tagged:
        assert len(re.findall("def[0-9]{2}!", text)) == len(re.findall("def(?=.{4})", text, re.DOTALL)), text


def test_a_grammar_may_end_anywhere_in_a_block(server, reference, prompts):
    """Answers have one to nineteen digits; tokens drafted beyond are dropped."""
    requests = [greedy(prompts[3], 60, regex=f"[0-9]{{{digits}}}") for digits in range(1, 20)]
    for digits, answer in enumerate(assert_answers(server, reference, requests), start=1):
        assert re.fullmatch(f"[0-9]{{{digits}}}", answer["text"])
        assert answer["meta_info"]["finish_reason"]["type"] == "stop"


@pytest.fixture(scope="module")
def joining(prompts) -> list[Job]:
    """Jobs that join one per step, with every kind of constraint and with none."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [tokenizer.encode(prompt).ids for prompt in prompts]
    kinds = (
        {"ebnf": 'root ::= ("ab" | "cd" | "e")+ "z"'},
        {"ebnf": EBNF},
        {"ebnf": 'root ::= ("ab" | "cd" | "e")+ "z"', "logit_bias": {"69": 2.0}},
        {"regex": "(yes|no)( and (yes|no))*!"},
        {"logit_bias": {"13": 1.5}},
        {},
    )
    return [
        Job(
            tuple(texts[number % len(texts)] + texts[(number + 5) % len(texts)]),
            48,
            step=number,
            sampling={"temperature": 0.0, **kinds[number % len(kinds)]},
            ignore_eos=False,
        )
        for number in range(24)
    ]


def run_compiled(arguments: tuple, jobs: list[Job]) -> list[Answer]:
    """Compile all grammars first, so that each job joins in its own step."""
    grammars = {json.dumps(job.sampling): job.sampling for job in jobs}.values()
    first = [Job((5, 6, 7), 2, sampling=sampling) for sampling in grammars]
    _, answers = run(
        ["--model-path", TARGET, "--dtype", "float32", "--max-total-tokens", "16384", *arguments],
        [first, jobs],
    )
    return answers


@pytest.fixture(scope="module")
def joining_alone(joining) -> list[Answer]:
    """Answers of the target without a draft."""
    return run_compiled((), [dataclasses.replace(job, logprobs=True) for job in joining])


@pytest.mark.parametrize("draft", ["dflash", "peagle"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
def test_running_requests_of_a_mixed_batch(overlap, draft, joining, joining_alone):
    """A running request stays under its grammar while it joins the prefill of others.

    Its grammar state includes the last block, which the scheduler may not have processed yet.
    """
    if draft == "peagle" and not overlap:
        pytest.skip("one draft is enough if no cycle is in flight")
    mixed = (
        "--page-size",
        "16",
        "--chunked-prefill-size",
        "64",
        "--enable-mixed-chunk",
        "--max-running-requests",
        "12",
    )
    sync = () if overlap else ("--disable-overlap-schedule",)
    drafts = dflash_arguments(*([PEAGLE_DRAFT] if draft == "peagle" else []))
    answers = run_compiled((*mixed, *sync, *drafts), joining)
    for job, got, want in zip(joining, answers, joining_alone, strict=True):
        assert got.finish_reason != "FINISH_ABORT", job
        decided = next((i for i, gap in enumerate(want.gaps) if gap < FLOAT32_TIE), 48)
        assert got.output_ids[:decided] == want.output_ids[:decided], job


def test_sampled_answers_are_valid(server, prompts):
    sampled = {"temperature": 1.0, "json_schema": json.dumps(SCHEMA)}
    requests = [greedy(prompt, 150, **sampled) for prompt in prompts * 2]
    requests += [greedy(prompt, 40, temperature=1.2, top_p=0.9) for prompt in prompts[:4]]
    answers = server.generate_many(requests, 8)[: 2 * len(prompts)]
    for answer in answers:
        assert_schema(answer["text"])
    assert len({answer["text"] for answer in answers}) > len(prompts), "sampled answers hardly differ"


def test_log_probabilities_are_those_under_the_grammar(server, reference, prompts):
    requests = [
        {**greedy(prompt, 120, json_schema=json.dumps(SCHEMA)), "return_logprob": True, "top_logprobs_num": 2}
        for prompt in prompts[:4]
    ]
    for got, want in zip(assert_answers(server, reference, requests), reference.answers(requests)):
        for field in ("output_token_logprobs", "output_top_logprobs"):
            rows = [answer["meta_info"][field] for answer in (got, want)]
            assert len(rows[0]) == len(rows[1]) == len(want["output_ids"])
        mine, theirs = ([row[0] for row in a["meta_info"]["output_token_logprobs"]] for a in (got, want))
        assert mine == pytest.approx(theirs, abs=1e-4)


def test_openai_response_format(server, reference, prompts):
    """Chat and completions, streamed too."""
    schema = {"type": "json_schema", "json_schema": {"name": "code", "schema": SCHEMA}}
    request = {"model": "default", "temperature": 0, "max_tokens": 120, "response_format": schema}
    chat = {**request, "messages": [{"role": "user", "content": prompts[1]}]}
    got, want = (s.post("/v1/chat/completions", chat)["choices"][0] for s in (server, reference.server))
    assert got["message"]["content"] == want["message"]["content"]
    assert_schema(got["message"]["content"])
    chunks = [chunk["choices"][0]["delta"] for chunk in stream(server, chat, "/v1/chat/completions")]
    assert "".join(delta.get("content") or "" for delta in chunks) == want["message"]["content"]
    completion = {**request, "prompt": prompts[1]}
    got, want = (
        s.post("/v1/completions", completion)["choices"][0]["text"] for s in (server, reference.server)
    )
    assert got == want
    assert_schema(got)


@pytest.mark.parametrize("sampling", [{"regex": "[a-z"}, {"json_schema": "{"}, {"ebnf": "root ::= nothing"}])
def test_a_broken_grammar_is_refused(sampling, server, reference, prompts):
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.generate(**greedy(prompts[0], 8, **sampling))
    assert refusal.value.code == 400
    assert_answers(server, reference, [greedy(prompts[1], 8)])


def test_the_llguidance_backend(llguidance, prompts):
    """Compare with the target under llguidance: backends may allow different tokens."""
    requests = [greedy(prompt, 60, regex=CODE) for prompt in prompts[:6]]
    requests += [greedy(prompt, 40) for prompt in prompts[6:8]]
    with plain_target(*PLAIN_FLOAT32, "--grammar-backend", "llguidance") as plain:
        answers = assert_answers(llguidance, plain, requests)
    for answer in answers[:6]:
        assert re.fullmatch(CODE, answer["text"])
    sampled = [greedy(prompt, 150, temperature=1.0, json_schema=json.dumps(SCHEMA)) for prompt in prompts]
    for answer in llguidance.generate_many(sampled, 6):
        assert_schema(answer["text"])


def test_outlines_serves_all_but_grammars():
    """It cannot roll back over rejected tokens, which ends SGLang's own server with DFLASH."""
    jobs = [
        Job((5, 6, 7), 8, sampling={"temperature": 0.0, "regex": "[a-z]+"}),
        Job((5, 6, 7), 8),
    ]
    arguments = ["--model-path", TARGET, *FLOAT32, *dflash_arguments(), "--grammar-backend", "outlines"]
    [[refused, served]] = run(arguments, [jobs])
    assert refused.finish_reason == "FINISH_ABORT"
    assert served.finish_reason == "FINISH_LENGTH" and len(served.output_ids) == 8
