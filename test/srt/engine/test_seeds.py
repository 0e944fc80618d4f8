"""A request with a sampling seed gets the target's own tokens in any batch."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from serving import TARGET, WHOLE_BLOCKS, dflash_arguments, heldout_prompts
from support.parity import first_difference
from support.scheduled import Answer, Job, run
from support.servers import COPIES, FLOAT32, WIDTHS_CHANGE, patched
from tokenizers import Tokenizer

pytestmark = pytest.mark.server

EXACT_PENALTIES = ("--disable-overlap-schedule",)  # under overlap SGLang's counts are a token behind
SEEDS = (1, 42, 2**31)
PARAMETERS = (
    {"temperature": 1.0, "top_k": 2000},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.3},
)


def serve(flags: Sequence[object], groups: list[list[Job]]) -> list[list[Answer]]:
    arguments = "--model-path", TARGET, *FLOAT32, "--enable-deterministic-inference", *flags
    return run(arguments, groups, environment=patched("deterministic_on_cpu"))


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [prompt["text"] for prompt in heldout_prompts() if 5 <= prompt["num_tokens"] <= 120][:2]
    return [
        Job(tuple(tokenizer.encode(text).ids), 40, sampling={**parameters, "sampling_seed": seed})
        for text, parameters, seed in itertools.product(texts, PARAMETERS, SEEDS)
    ]


@pytest.fixture(scope="module")
def expected(jobs) -> list[tuple[int, ...]]:
    """Answers of the target without speculation, each in another batch than below."""
    spread = [replace(job, step=7 * number) for number, job in enumerate(jobs)]
    [answers] = serve(EXACT_PENALTIES, [spread])
    return [answer.output_ids for answer in answers]


def test_seeds_matter(expected):
    by_prompt = [expected[first : first + len(SEEDS)] for first in range(0, len(expected), len(SEEDS))]
    different = sum(len(set(outputs)) == len(SEEDS) for outputs in by_prompt)
    assert different > 0.9 * len(by_prompt)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_seed_gives_the_targets_own_tokens(method, jobs, expected):
    """Also tested: SGLang's sampler draws differently if any request of a batch filters.

    Drawn drafts fall back to seeded draws, which unit/acceptance/test_acceptor.py counts.
    """
    plain = [
        replace(job, max_new_tokens=24, sampling={"temperature": 1.0, "sampling_seed": seed})
        for seed, job in enumerate(jobs[:: len(SEEDS) * len(PARAMETERS)])
    ]
    mixed = [job for pair in zip(plain, jobs[3:]) for job in pair]
    refused = [replace(jobs[0], sampling={"temperature": 1.0, "min_p": 0.1})]
    flags = WHOLE_BLOCKS, "--speculative-draft-sample-method", method, *dflash_arguments()
    found, *alone, together, [refusal] = serve(flags, [jobs, *([job] for job in plain), mixed, refused])
    differing = [
        (job, first_difference(answer.output_ids, want))
        for job, answer, want in zip(jobs, found, expected, strict=True)
        if answer.output_ids != want
    ]
    assert not differing, f"{len(differing)} of {len(jobs)} differ, the first ones: {differing[:3]}"
    kept = [count for answer in found for count in answer.accepted]
    assert sum(kept) > 0.2 * len(kept), "hardly any drafted token was accepted: this proves little"
    assert [answer.output_ids for answer in together[::2]] == [answer.output_ids for [answer] in alone]
    assert refusal.finish_reason == "FINISH_ABORT", "min_p has no seeded draw"


def test_seeded_output_does_not_depend_on_the_verify_width(jobs, expected):
    [answers] = serve([*WIDTHS_CHANGE, *dflash_arguments(), *COPIES], [jobs])
    assert [answer.output_ids for answer in answers] == expected
