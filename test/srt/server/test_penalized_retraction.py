"""Penalties count tokens from before a retraction. engine/test_penalized_answers.py has the other answers."""

import pytest
from serving import dflash_arguments, heldout_prompts
from support.servers import FLOAT32, PLAIN_FLOAT32

pytestmark = pytest.mark.server

PENALTIES = (
    {"frequency_penalty": 0.6},
    {"presence_penalty": 1.1},
    {"repetition_penalty": 1.25},
    {
        "frequency_penalty": -0.4,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"13": 1.5},
    },
    {},
)


def test_penalties_after_a_retraction(servers):
    """Tokens from before a retraction still count.

    SGLang itself forgets them, so answers are compared with the same server and a pool for all requests.
    """
    texts = [prompt["text"] for prompt in heldout_prompts() if 10 <= prompt["num_tokens"] <= 300][:14]
    length = {"temperature": 0, "max_new_tokens": 160, "ignore_eos": True}
    long = [
        {"text": text, "sampling_params": {**length, **PENALTIES[number % len(PENALTIES)]}}
        for number, text in enumerate(texts)
    ]
    roomy = servers.get(*FLOAT32, *dflash_arguments())
    expected = roomy.generate_many(long, len(long))
    tight = servers.get(*PLAIN_FLOAT32, *dflash_arguments(), "--max-total-tokens", "2048")
    answers = tight.generate_many(long, len(long))
    assert any(answer["meta_info"]["num_retractions"] for answer in answers)
    assert [answer["output_ids"] for answer in answers] == [answer["output_ids"] for answer in expected]
