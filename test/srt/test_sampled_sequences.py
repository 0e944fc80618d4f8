"""Whole sampled sequences have the target's probabilities, to the chi-square test.

Two tokens are allowed at every position, so the target alone can be asked for the probability of every sequence of
LENGTH tokens there is. A server under test then samples more than 50,000 tokens, and what it says is counted. Where
test_sampled_requests.py holds each token against the tokens before it, this holds them together.

A right server fails once in 1 / FALSE_ALARM runs. One that lies about its draft's probabilities must fail.
"""

import math
from collections import Counter

import pytest
from conftest import PLAIN_FLOAT32, UNCOUNTED, WIDTHS_CHANGE, patched
from scipy.stats import chi2
from serving import DFLASH2_DRAFT, PEAGLE_DRAFT, dflash_arguments

pytestmark = pytest.mark.server

FALSE_ALARM = 1e-6
LENGTH = 8  # the first token is the prefill's, the others come out of verified blocks
SAMPLES = 3200  # of each prompt
SAMPLES_PER_REQUEST = 32
PROMPTS = ("def read_config(path):\n", "    for name in names:\n        if ")
SAMPLING = {"temperature": 1.0, "top_k": 2, "max_new_tokens": LENGTH, "ignore_eos": True}
SERVER = (*PLAIN_FLOAT32, "--random-seed", "7")
PROBABILISTIC = ("--speculative-draft-sample-method", "probabilistic")

DRAFTING = {
    "one-hot": dflash_arguments(),
    "probabilistic": [*dflash_arguments(), *PROBABILISTIC],
    "probabilistic, widths change": [*dflash_arguments(), *PROBABILISTIC, *WIDTHS_CHANGE],
    "probabilistic, DFlash2": [*dflash_arguments(DFLASH2_DRAFT), *PROBABILISTIC],
    "probabilistic, P-EAGLE": [*dflash_arguments(PEAGLE_DRAFT), *PROBABILISTIC],
}
assert SAMPLES * len(PROMPTS) * LENGTH > 50_000


@pytest.fixture(scope="module")
def expected(reference) -> dict[str, dict[tuple[int, ...], float]]:
    """prompt -> every sequence of LENGTH tokens -> its probability."""
    return {prompt: sequence_probs(reference, prompt) for prompt in PROMPTS}


def sequence_probs(reference, prompt: str) -> dict[tuple[int, ...], float]:
    asked = {"sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}}
    prompt_ids = reference.server.post("/tokenize", {"prompt": prompt})["tokens"]
    probs = {(): 1.0}
    for _ in range(LENGTH):
        requests = [{"input_ids": prompt_ids + list(prefix), **asked} for prefix in probs]
        longer = {}
        for (prefix, prob), answer in zip(probs.items(), reference.answers(requests), strict=True):
            (first, a, *_), (second, b, *_) = answer["meta_info"]["output_top_logprobs"][0]
            total = math.exp(first) + math.exp(second)
            longer[(*prefix, a)] = prob * math.exp(first) / total
            longer[(*prefix, b)] = prob * math.exp(second) / total
        probs = longer
    assert math.isclose(sum(probs.values()), 1)
    return probs


def sample(server, prompt: str) -> Counter:
    requests = [{"text": prompt, "sampling_params": {**SAMPLING, "n": SAMPLES_PER_REQUEST}}]
    answers = server.generate_many(requests * (SAMPLES // SAMPLES_PER_REQUEST), concurrency=2)
    return Counter(tuple(answer["output_ids"]) for answers_of_one in answers for answer in answers_of_one)


def p_value(server, expected) -> float:
    """How often a server that samples from the target says what is at least as far from what is expected."""
    statistic = freedom = 0.0
    for prompt, probs in expected.items():
        counts = sample(server, prompt)
        assert counts.total() == SAMPLES
        impossible = counts.keys() - probs.keys()
        assert not impossible, f"{prompt!r} went on with tokens that the sampler excludes: {list(impossible)[:3]}"
        cells = pooled([(counts[sequence], prob * SAMPLES) for sequence, prob in probs.items()])
        statistic += sum((count - mean) ** 2 / mean for count, mean in cells)
        freedom += len(cells) - 1
    assert freedom > 20, "nearly all of the target's probability lies on a few sequences: nothing to test"
    return chi2.sf(statistic, freedom)


def pooled(cells: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """(count, mean) of sequences, the rare ones added up until at least 8 are expected, for chi-square to hold."""
    done, count, mean = [], 0, 0.0
    for more_count, more_mean in sorted(cells, key=lambda cell: cell[1]):
        count, mean = count + more_count, mean + more_mean
        if mean >= 8:
            done.append((count, mean))
            count, mean = 0, 0.0
    done[-1] = (done[-1][0] + count, done[-1][1] + mean)
    return done


def test_rare_sequences_are_counted_together():
    assert pooled([(1, 3.0), (2, 2.0), (9, 20.0), (0, 4.0)]) == [(3, 9.0), (9, 20.0)]


@pytest.mark.parametrize("drafting", DRAFTING)
def test_sequences_have_the_targets_probabilities(drafting, servers, expected):
    server = servers.get(*SERVER, *DRAFTING[drafting], environment=UNCOUNTED)
    found = p_value(server, expected)
    assert found > FALSE_ALARM, f"not the target's distribution, p = {found:.2g}"


def test_misdeclared_draft_probabilities_are_noticed(servers, expected):
    """The negative control: drafted tokens that come from another distribution than the rule is told."""
    environment = UNCOUNTED | patched("misdeclared_draft")
    server = servers.get(*SERVER, *DRAFTING["probabilistic"], environment=environment)
    found = p_value(server, expected)
    assert "server patch: misdeclared_draft" in server.log()
    assert found < FALSE_ALARM, f"a draft that lies about its probabilities passes, p = {found:.2g}"
