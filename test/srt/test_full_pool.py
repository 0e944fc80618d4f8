"""Prompts in chunks beside decode rows: a full KV pool, and what a cut at a page's end leaves of a step."""

import random

import pytest
from serving import TARGET, dflash_arguments
from support.scheduled import Job, run

pytestmark = pytest.mark.server

BLOCK = 12  # decode rows reserve whole blocks, so large ones leave little
FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", "1000", "--chunked-prefill-size", "40"),
    *("--enable-mixed-chunk", "--speculative-num-draft-tokens", str(BLOCK)),
)


def test_the_next_chunk_of_a_prompt_waits_for_room():
    """Without our change SGLang takes the chunk all the same, and the scheduler ends."""
    generator = random.Random(1)

    def prompt(length):
        return tuple(generator.randrange(8, 2000) for _ in range(length))

    jobs = [Job(prompt(40), 200) for _ in range(12)]
    jobs += [Job(prompt(generator.randrange(90, 260)), 30, step=20 + 8 * k) for k in range(24)]
    arguments = ["--model-path", TARGET, *dflash_arguments(), *FLAGS]
    # Told that answers are short, the scheduler admits more than the pool holds.
    [answers] = run(arguments, [jobs], environment={"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"})
    assert [len(answer.output_ids) for answer in answers] == [job.max_new_tokens for job in jobs]
    assert sum(answer.retractions for answer in answers) > 0


def test_one_step_cuts_one_prompt():
    """Without our change SGLang answers the first of two prompts without the rest of it.

    A step has 128 tokens less the decode rows, so a cut at a page's end leaves some. Every second request
    may end early; SGLang admits the others in another function, which does not cut at pages.
    """
    generator = random.Random(1)
    prompts = [
        tuple(generator.randrange(8, 2000) for _ in range(generator.choice((40, 63, 90, 129, 200, 333))))
        for _ in range(24)
    ]
    jobs = [Job(ids, 12, step=n // 3, ignore_eos=n % 2 == 0) for n, ids in enumerate(prompts)]
    flags = ["--model-path", TARGET, "--dtype", "float32", "--max-total-tokens", "16384"]
    cut = ["--chunked-prefill-size", "128", "--enable-mixed-chunk", "--page-size", "16"]
    [wanted] = run(flags, [jobs])
    [found] = run([*flags, *cut, "--disable-radix-cache", *dflash_arguments()], [jobs])
    assert [answer.output_ids for answer in found] == [answer.output_ids for answer in wanted]
