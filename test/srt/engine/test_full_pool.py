"""Prompts in chunks beside decode rows in a full KV pool."""

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

    jobs = [Job(prompt(40), 120) for _ in range(12)]
    jobs += [Job(prompt(generator.randrange(90, 260)), 20, step=20 + 8 * k) for k in range(12)]
    arguments = ["--model-path", TARGET, *dflash_arguments(), *FLAGS]
    # Told that answers are short, the scheduler admits more than the pool holds.
    [answers] = run(arguments, [jobs], environment={"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"})
    assert [len(answer.output_ids) for answer in answers] == [job.max_new_tokens for job in jobs]
    assert sum(answer.retractions for answer in answers) > 0
