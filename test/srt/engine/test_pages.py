"""Greedy output is the target's own with pages of 64 and 256 tokens, and with chunks below a block.

Prompts end around the borders of pages, and answers cross them inside a block. Prompts share prefixes of
several pages. The verify lengths are those that a user gets: no row fixes them.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from serving import (
    DRAFT,
    HYBRID_DRAFT,
    HYBRID_TARGET,
    PEAGLE_DRAFT,
    TARGET,
    dflash_arguments,
    text_prompts,
)
from support.parity import FLOAT32_TIE
from support.scheduled import Job, Oracle, run
from tokenizers import Tokenizer

pytestmark = pytest.mark.server

# SGLang keeps the convolution's inputs in bf16 for every --dtype.
ENVIRONMENT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
FLAGS = ("--dtype", "float32", "--random-seed", "7", "--max-total-tokens", "16384")
BLOCK, PAGE, CHUNK = "--speculative-num-draft-tokens", "--page-size", "--chunked-prefill-size"
# Tokens of an answer that the first requests get. The second ones begin inside it.
FIRST, BEGUN, ANSWER = 32, 23, 56


@dataclass(frozen=True)
class Configuration:
    """A server setting under test.

    Attributes:
        target: Folder of the target.
        draft: Folder of the draft.
        block: Slots of a block.
        page: Tokens of a page.
        chunk: Tokens of a prefill chunk, or None for SGLang's default.
        others: Other flags.
        is_long: Not in every run of the tests.
    """

    target: Path
    draft: Path
    block: int
    page: int
    chunk: int | None = None
    others: tuple[str, ...] = ()
    is_long: bool = False

    def case(self):
        chunk = [f"chunk-{self.chunk}"] * (self.chunk is not None)
        name = "-".join((self.draft.name, str(self.block), f"page-{self.page}", *chunk))
        return pytest.param(self, id=name, marks=[pytest.mark.long] * self.is_long)

    def arguments(self) -> list[object]:
        """Return the server's flags."""
        flags = ["--model-path", self.target, *FLAGS, *dflash_arguments(self.draft), *self.others]
        flags += [BLOCK, self.block, PAGE, self.page]
        if self.chunk is not None:
            flags += [CHUNK, self.chunk]
        if self.target == HYBRID_TARGET:  # the finest grid of states: a multiple of a page
            flags += ["--mamba-track-interval", max(64, self.page)]
        return flags


CONFIGURATIONS = (
    Configuration(TARGET, DRAFT, 16, 64, 64),
    Configuration(TARGET, DRAFT, 16, 256, is_long=True),
    Configuration(TARGET, DRAFT, 8, 4, 4, is_long=True),
    Configuration(TARGET, DRAFT, 16, 1, 4, ("--enable-mixed-chunk",)),
    Configuration(TARGET, PEAGLE_DRAFT, 8, 64, 64),
    Configuration(HYBRID_TARGET, HYBRID_DRAFT, 16, 64, 64, is_long=True),
    Configuration(HYBRID_TARGET, HYBRID_DRAFT, 8, 256, 256),
    Configuration(HYBRID_TARGET, HYBRID_DRAFT, 8, 1, 4, is_long=True),
)


@dataclass(frozen=True)
class Known:
    """A prompt and the target's own answer to it; `decided` tokens of it lie before a near tie."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    decided: int


def prompts() -> list[tuple[int, ...]]:
    """Return prompts of code that end before, on and behind the borders of pages, the short ones first."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(prompt["text"] for prompt in text_prompts())).ids
    generator = random.Random(1)

    def text(length: int) -> tuple[int, ...]:
        start = generator.randrange(len(ids) - length)
        return tuple(ids[start : start + length])

    shared = text(520)
    short = [text(4), text(59), text(63), text(64), shared[:33] + text(3), shared[:41] + text(24)]
    return short + [text(250), text(256), shared[:257] + text(20), shared[:512] + text(3), shared]


SHORT = 6  # for chunks of four tokens, of which every one costs a forward


@pytest.fixture(scope="module")
def known() -> dict[Path, list[Known]]:
    """Return the answers of each target alone."""
    found = {}
    jobs = [Job(prompt, ANSWER, logprobs=True) for prompt in prompts()]
    for target in (TARGET, HYBRID_TARGET):
        [answers] = run(["--model-path", target, *FLAGS], [jobs], environment=ENVIRONMENT)
        found[target] = [
            Known(
                job.input_ids,
                answer.output_ids,
                next((i for i, gap in enumerate(answer.gaps) if gap < FLOAT32_TIE), ANSWER),
            )
            for job, answer in zip(jobs, answers, strict=True)
        ]
        assert sum(k.decided for k in found[target]) > 0.9 * ANSWER * len(jobs), "hardly anything is decided"
    return found


@pytest.mark.parametrize("configuration", [c.case() for c in CONFIGURATIONS])
def test_output_is_the_targets(configuration, known):
    """Send prompts, then the same prompts with a part of their answers, which the prefix cache knows."""
    wanted = known[configuration.target]
    if configuration.chunk == 4:
        wanted = wanted[:SHORT]
    first = [Job(k.prompt, FIRST, step=number // 2) for number, k in enumerate(wanted)]
    second = [
        Job(k.prompt + k.answer[:BEGUN], ANSWER - BEGUN, step=number) for number, k in enumerate(wanted)
    ]
    answers = [[*k.answer, *[5] * 32] for k in wanted]
    oracle = Oracle(answers + [answer[BEGUN:] for answer in answers], error_rate=0.1)
    found, continued = run(configuration.arguments(), [first, second], oracle, ENVIRONMENT)
    for k, answer, rest in zip(wanted, found, continued, strict=True):
        assert len(answer.output_ids) == FIRST and len(rest.output_ids) == ANSWER - BEGUN
        for begin, ids in ((0, answer.output_ids), (BEGUN, rest.output_ids)):
            end = max(0, k.decided - begin)
            assert ids[:end] == k.answer[begin:][: len(ids)][:end], f"a prompt of {len(k.prompt)} tokens"
    kept = [count for answer in (*found, *continued) for count in answer.accepted]
    assert sum(kept) > 2 * len(kept), "the oracle's drafts were not accepted"

    cached = [answer.cached_tokens for answer in continued]
    # SGLang always computes the last prompt token, and shares whole pages only.
    reusable = [(len(job.input_ids) - 1) // configuration.page * configuration.page for job in second]
    if configuration.target == TARGET:
        assert cached == reusable
    elif configuration.chunk != 4:  # SGLang keeps no states of chunks below the grid
        assert cached[-2:] == [512, 512] and all(count <= most for count, most in zip(cached, reusable))
