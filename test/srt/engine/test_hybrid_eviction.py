"""Recurrent states under eviction: conversations come back to a prefix cache that is too small for them.

sgl-project/sglang#36537 reports wrong answers with one of SGLang's two strategies for the cache.
"""

import random

import pytest
from serving import HYBRID_DRAFT, HYBRID_PEAGLE_DRAFT, HYBRID_TARGET, dflash_arguments
from support.drafts import read_config
from support.families import copy_with_long_memory
from support.scheduled import Job, run

pytestmark = pytest.mark.server

ENVIRONMENT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
FLOAT32 = ("--dtype", "float32", "--random-seed", "7")
# Eight conversations of up to 900 tokens do not fit, and neither do their states.
TIGHT = (
    *("--max-total-tokens", "3000", "--mamba-track-interval", "64", "--max-mamba-cache-size", "14"),
    *("--max-running-requests", "3"),
)
CONVERSATIONS, TURNS, NEW = 8, 4, 16


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """The bundled target with decays near one: a wrong state shows in the answer."""
    return copy_with_long_memory(HYBRID_TARGET, tmp_path_factory.mktemp("hybrid") / "long-memory")


@pytest.fixture(scope="module")
def turns() -> list[list[Job]]:
    """Each turn sends every conversation again, longer than before. A group is a turn."""
    generator = random.Random(3)
    vocabulary = read_config(HYBRID_TARGET)["vocab_size"]
    texts = [
        tuple(generator.randrange(5, vocabulary) for _ in range(generator.randrange(600, 900)))
        for _ in range(CONVERSATIONS)
    ]
    groups = []
    for turn in range(TURNS):
        order = generator.sample(texts, len(texts))
        lengths = [generator.randrange(100, 200) + 150 * turn for _ in texts]
        groups.append([Job(text[:n], NEW, step=i) for i, (text, n) in enumerate(zip(order, lengths))])
    return groups


@pytest.fixture(scope="module")
def wanted(target, turns) -> list[tuple[int, ...]]:
    [answers] = run(
        ["--model-path", target, *FLOAT32, "--disable-radix-cache", "--max-total-tokens", "16384"],
        [[Job(job.input_ids, NEW) for group in turns for job in group]],
        environment=ENVIRONMENT,
    )
    return [answer.output_ids for answer in answers]


@pytest.mark.parametrize(
    ("strategy", "draft"),
    [
        ("auto", HYBRID_DRAFT),
        ("extra_buffer_lazy", HYBRID_PEAGLE_DRAFT),
    ],
)
def test_answers_are_the_targets(strategy, draft, target, turns, wanted):
    drafting = [] if draft is None else dflash_arguments(draft)
    arguments = ["--model-path", target, *FLOAT32, *TIGHT, "--mamba-radix-cache-strategy", strategy]
    groups = run([*arguments, *drafting], turns, environment=ENVIRONMENT)
    answers = [answer for group in groups for answer in group]
    cached = sum(answer.cached_tokens for answer in answers)
    total = sum(len(job.input_ids) for group in turns for job in group)
    assert 0.05 * total < cached < 0.6 * total, f"{cached} of {total} prompt tokens came from the cache"
    differing = [i for i, (a, w) in enumerate(zip(answers, wanted, strict=True)) if a.output_ids != w]
    assert not differing, f"{len(differing)} of {len(wanted)} answers differ: {differing}"
