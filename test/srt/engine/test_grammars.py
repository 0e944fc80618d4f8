"""Grammars: answers are valid, and greedy answers are the target's own.

A block's positions are masked along the drafted chain, and rejected ones are rolled back. So errors would
show if a grammar branches, ends in mid-block, or shares a batch. All tests run in float32.
server/test_real_model.py has OpenAI's field, server/test_requests.py refusals.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from serving import PEAGLE_DRAFT, TARGET, dflash_arguments, heldout_prompts
from support.grammars import CODE, EBNF, EBNF_SHAPE, SCHEMA, assert_schema
from support.parity import FLOAT32_TIE
from support.scheduled import Answer, Job, run
from support.servers import FLOAT32
from tokenizers import Tokenizer

pytestmark = pytest.mark.server

TRIGGERED = {
    "type": "structural_tag",
    "structures": [{"begin": "def", "schema": {"type": "integer", "minimum": 10, "maximum": 99}, "end": "!"}],
    "triggers": ["def"],
}
SCHEMA_ANSWER = {"json_schema": json.dumps(SCHEMA)}
KINDS = ({"regex": CODE}, SCHEMA_ANSWER, {"ebnf": EBNF}, {"regex": "[0-9]{4}-[0-9]{2}"}, {})
TOKENIZER = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
PROMPTS = [
    tuple(TOKENIZER.encode(prompt["text"]).ids)
    for prompt in heldout_prompts()
    if 10 <= prompt["num_tokens"] <= 400
][::18][:12]


def greedy(prompt: tuple[int, ...], max_new_tokens: int, **sampling) -> Job:
    return Job(prompt, max_new_tokens, sampling={"temperature": 0.0, **sampling}, ignore_eos=False)


def sampled(prompt: tuple[int, ...], max_new_tokens: int, **sampling) -> Job:
    return greedy(prompt, max_new_tokens, **{"temperature": 1.0, **sampling})


GREEDY = {
    "kinds": [greedy(prompt, 120, **KINDS[i % len(KINDS)]) for i, prompt in enumerate(PROMPTS)],
    "tags": [
        replace(greedy(prompt, 60, structural_tag=json.dumps(TRIGGERED)), ignore_eos=True)
        for prompt in PROMPTS
    ],
    "digits": [greedy(PROMPTS[3], 60, regex=f"[0-9]{{{digits}}}") for digits in range(1, 20)],
    "log probabilities": [
        replace(greedy(prompt, 120, **SCHEMA_ANSWER), logprobs=True) for prompt in PROMPTS[:4]
    ],
}
SAMPLED = [
    *(sampled(prompt, 150, **SCHEMA_ANSWER) for prompt in PROMPTS),
    *(sampled(prompt, 40, temperature=1.2, top_p=0.9) for prompt in PROMPTS[:4]),
]


def scheduled(arguments: Sequence[object], groups: Sequence[Sequence[Job]]) -> list[list[Answer]]:
    return run(["--model-path", TARGET, *FLOAT32, *arguments], groups)


def text_of(answer: Answer) -> str:
    return TOKENIZER.decode(list(answer.output_ids))


def assert_targets(answers: Sequence[Answer], alone: Sequence[Answer]) -> None:
    """Assert that greedy answers are the target's, up to the first near tie."""
    for got, want in zip(answers, alone, strict=True):
        assert got.finish_reason != "FINISH_ABORT"
        tie = next((i for i, gap in enumerate(want.gaps) if gap < FLOAT32_TIE), None)
        assert got.output_ids[:tie] == want.output_ids[:tie]
        assert tie is not None or got.finish_reason == want.finish_reason


@pytest.fixture(scope="module")
def alone() -> dict[str, list[Answer]]:
    """Answers of the target without a draft."""
    groups = [[replace(job, logprobs=True) for job in jobs] for jobs in GREEDY.values()]
    return dict(zip(GREEDY, scheduled((), groups), strict=True))


@pytest.fixture(scope="module")
def served() -> dict[str, list[Answer]]:
    """Answers of the bundled pair; those to SAMPLED under "sampled"."""
    answers = scheduled(dflash_arguments(), [*GREEDY.values(), SAMPLED])
    return dict(zip([*GREEDY, "sampled"], answers, strict=True))


@pytest.mark.parametrize("group", GREEDY)
def test_greedy_answers_are_the_targets(group, served, alone):
    """A grammar affects neither others of its batch nor requests without one."""
    assert_targets(served[group], alone[group])


def test_each_answer_is_in_its_own_language(served):
    for job, answer in zip(GREEDY["kinds"], served["kinds"], strict=True):
        text, kind = text_of(answer), job.sampling
        if "regex" in kind:
            assert re.fullmatch(kind["regex"], text), f"{text!r} does not match {kind}"
        elif "json_schema" in kind:
            assert_schema(text)
        elif "ebnf" in kind and answer.finish_reason != "FINISH_LENGTH":
            assert re.fullmatch(EBNF_SHAPE, text) and text.count("(") == text.count(")"), text


def test_a_tag_that_begins_in_mid_answer(served):
    """A trigger in free text starts a schema, so the mask covers part of a block."""
    tagged = [text for text in map(text_of, served["tags"]) if "def" in text[:-8]]
    assert tagged, "no answer reached the tag, so the test proves nothing"
    for text in tagged:
        assert len(re.findall("def[0-9]{2}!", text)) == len(re.findall("def(?=.{4})", text, re.DOTALL)), text


def test_a_grammar_may_end_anywhere_in_a_block(served):
    """Answers have one to nineteen digits; tokens drafted beyond are dropped."""
    for digits, answer in enumerate(served["digits"], start=1):
        assert re.fullmatch(f"[0-9]{{{digits}}}", text_of(answer)), answer
        assert answer.finish_reason != "FINISH_LENGTH"


def test_sampled_answers_are_valid(served):
    texts = [text_of(answer) for answer in served["sampled"][: len(PROMPTS)]]
    for text in texts:
        assert_schema(text)
    assert len({*texts}) > len(PROMPTS) / 2, "sampled answers hardly differ"


def test_log_probabilities_are_those_under_the_grammar(served, alone):
    group = "log probabilities"
    for got, want in zip(served[group], alone[group], strict=True):
        assert len(got.gaps) == len(got.logprobs) == len(want.output_ids)
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)


def test_the_llguidance_backend():
    """Compare with the target under llguidance: backends may allow different tokens."""
    jobs = [*(greedy(p, 60, regex=CODE) for p in PROMPTS[:6]), *(greedy(p, 40) for p in PROMPTS[6:8])]
    backend = "--grammar-backend", "llguidance"
    [want] = scheduled(backend, [[replace(job, logprobs=True) for job in jobs]])
    schemas = [sampled(prompt, 150, **SCHEMA_ANSWER) for prompt in PROMPTS[:4]]
    got, drawn = scheduled((*dflash_arguments(), *backend), [jobs, schemas])
    assert_targets(got, want)
    for answer in got[:6]:
        assert re.fullmatch(CODE, text_of(answer))
    for answer in drawn:
        assert_schema(text_of(answer))


def test_outlines_serves_all_but_grammars():
    """It cannot roll back over rejected tokens, which ends SGLang's own server with DFLASH."""
    jobs = [greedy((5, 6, 7), 8, regex="[a-z]+"), Job((5, 6, 7), 8)]
    [[refused, free]] = scheduled((*dflash_arguments(), "--grammar-backend", "outlines"), [jobs])
    assert refused.finish_reason == "FINISH_ABORT"
    assert free.finish_reason == "FINISH_LENGTH" and len(free.output_ids) == 8


# -- requests that join, one per scheduler step

CHOICES = {"ebnf": 'root ::= ("ab" | "cd" | "e")+ "z"'}
CONSTRAINTS = (
    CHOICES,
    {"ebnf": EBNF},
    {**CHOICES, "logit_bias": {"69": 2.0}},
    {"regex": "(yes|no)( and (yes|no))*!"},
    {"logit_bias": {"13": 1.5}},
    {},
)
# Of two or three chunks.
LONG_PROMPTS = [one[-70:] + other[-70:] for one, other in zip(PROMPTS, PROMPTS[5:] + PROMPTS[:5])]
JOINING = [
    replace(greedy(LONG_PROMPTS[i % 12], 48, **CONSTRAINTS[i % len(CONSTRAINTS)]), step=i) for i in range(24)
]


def run_compiled(arguments: tuple, jobs: list[Job]) -> list[Answer]:
    """Compile all grammars first, so that each job joins in its own step."""
    first = [greedy((5, 6, 7), 2, **constraint) for constraint in CONSTRAINTS]
    return scheduled(arguments, [first, jobs])[1]


@pytest.fixture(scope="module")
def joining_alone() -> list[Answer]:
    """Answers of the target without a draft."""
    return run_compiled((), [replace(job, logprobs=True) for job in JOINING])


@pytest.mark.parametrize(
    ("draft", "flags"),
    [
        ([], ()),
        pytest.param([], ("--disable-overlap-schedule",), marks=pytest.mark.long),
        ([PEAGLE_DRAFT], ()),
    ],
    ids=["dflash", "dflash, no overlap", "peagle"],
)
def test_running_requests_of_a_mixed_batch(draft, flags, joining_alone):
    """A running request stays under its grammar while it joins the prefill of others.

    Its grammar state includes the last block, which the scheduler may not have processed yet.
    """
    mixed = "--page-size 16 --chunked-prefill-size 64 --enable-mixed-chunk --max-running-requests 12".split()
    assert_targets(run_compiled((*mixed, *flags, *dflash_arguments(*draft)), JOINING), joining_alone)
