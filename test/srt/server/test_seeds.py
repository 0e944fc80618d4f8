"""A request with a sampling seed gets the target's own tokens in any batch."""

import itertools
import urllib.error

import pytest
from serving import WHOLE_BLOCKS, Server, dflash_arguments, heldout_prompts
from support.parity import first_difference
from support.servers import (
    COPIES,
    FLOAT32,
    PLAIN_FLOAT32,
    UNCOUNTED,
    WIDTHS_CHANGE,
    patched,
    plain_target,
)

pytestmark = pytest.mark.server

EXACT_PENALTIES = ("--disable-overlap-schedule",)  # under overlap SGLang's counts are a token behind
DETERMINISTIC = ("--enable-deterministic-inference",)
ENVIRONMENT = UNCOUNTED | patched("deterministic_on_cpu")
SEEDS = (1, 42, 2**31)
PARAMETERS = (
    {"temperature": 1.0, "top_k": 2000},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "frequency_penalty": 0.3},
)


@pytest.fixture(scope="module")
def requests() -> list[dict]:
    texts = [prompt["text"] for prompt in heldout_prompts() if 5 <= prompt["num_tokens"] <= 120][:2]
    return [
        {"text": text, "sampling_params": {**parameters, "sampling_seed": seed, "max_new_tokens": 40}}
        for text, parameters, seed in itertools.product(texts, PARAMETERS, SEEDS)
    ]


@pytest.fixture(scope="module")
def expected(requests) -> list[list[int]]:
    """Answers of the target without speculation, half of a prompt's requests at a time."""
    with plain_target(*PLAIN_FLOAT32, *DETERMINISTIC, *EXACT_PENALTIES, environment=ENVIRONMENT) as target:
        return [answer["output_ids"] for answer in target.server.generate_many(requests, 5)]


def test_seeds_matter(expected):
    by_prompt = [expected[first : first + len(SEEDS)] for first in range(0, len(expected), len(SEEDS))]
    different = sum(len({tuple(output) for output in outputs}) == len(SEEDS) for outputs in by_prompt)
    assert different > 0.9 * len(by_prompt)


def seeded(servers, method: str) -> Server:
    flags = "--speculative-draft-sample-method", method, "--enable-metrics"
    arguments = *FLOAT32, WHOLE_BLOCKS, *DETERMINISTIC, *flags, *dflash_arguments()
    return servers.get(*arguments, environment=ENVIRONMENT)


@pytest.mark.parametrize("concurrency", [pytest.param(1, marks=pytest.mark.long), 12])
@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_seed_gives_the_targets_own_tokens(method, concurrency, servers, requests, expected):
    server = seeded(servers, method)
    answers = server.generate_many(requests, concurrency)
    differing = [
        (request, first_difference(answer["output_ids"], want))
        for request, answer, want in zip(requests, answers, expected, strict=True)
        if answer["output_ids"] != want
    ]
    assert not differing, f"{len(differing)} of {len(requests)} differ, the first ones: {differing[:3]}"
    lengths = [answer["meta_info"]["spec_accept_length"] for answer in answers]
    assert sum(lengths) / len(lengths) > 1.2, "hardly any drafted token was accepted: this proves little"
    with pytest.raises(urllib.error.HTTPError) as refusal:
        server.generate(text="x", sampling_params={"temperature": 1.0, "min_p": 0.1})
    assert refusal.value.code == 400 and "min_p" in refusal.value.read().decode()
    if method == "probabilistic":
        assert (
            'reason="sampling_seed"' in server.get("/metrics")
            and "falls back (sampling_seed)" in server.log()
        )


def test_seeded_output_does_not_depend_on_the_verify_width(servers, requests, expected):
    arguments = *FLOAT32, *DETERMINISTIC, *WIDTHS_CHANGE, *dflash_arguments(), *COPIES
    server = servers.get(*arguments, environment=ENVIRONMENT)
    answers = server.generate_many(requests, 12)
    assert [answer["output_ids"] for answer in answers] == expected


def test_unfiltered_requests_ignore_batch_mates_with_filters(servers, requests):
    """SGLang's sampler draws differently if any request of a batch filters."""
    plain = [
        {**request, "sampling_params": {"temperature": 1.0, "sampling_seed": seed, "max_new_tokens": 24}}
        for seed, request in enumerate(requests[:: len(SEEDS) * len(PARAMETERS)])
    ]
    server = seeded(servers, "probabilistic")
    alone = server.generate_many(plain, 1)
    mixed = server.generate_many([request for pair in zip(plain, requests[3:]) for request in pair], 8)[::2]
    assert [answer["output_ids"] for answer in mixed] == [answer["output_ids"] for answer in alone]
