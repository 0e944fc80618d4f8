"""Chi-square test of whole sampled sequences against the target's probabilities.

Two tokens are allowed at every position, so the probability of each sequence of LENGTH tokens is known.
"""

import itertools
from collections import Counter

import torch
from scipy.stats import chi2

FALSE_ALARM = 1e-6
VOCABULARY = 8
LENGTH = 8  # the prefill gives the first token, verified blocks the others
SAMPLES = 2000  # per prompt
SAMPLES_PER_REQUEST = 32  # of a server
PROMPTS = ((4, 2, 6, 1, 3), (0, 5, 5, 2, 7, 1, 1, 4, 3))
SAMPLING = {"temperature": 1.0, "top_k": 2, "max_new_tokens": LENGTH, "ignore_eos": True}
PROBABILISTIC = ("--speculative-draft-sample-method", "probabilistic")

Probs = dict[tuple[int, ...], float]


@torch.no_grad()
def sequence_probs(model, prompt: tuple[int, ...]) -> Probs:
    """Return the probability of each sequence of LENGTH tokens that top_k = 2 allows."""
    probs: Probs = {(): 1.0}
    for _ in range(LENGTH):
        logits = model(torch.tensor([prompt + prefix for prefix in probs])).logits[:, -1].double()
        best = logits.topk(2)
        shares = best.values.softmax(dim=-1).tolist()
        probs = {
            (*prefix, token): prob * share
            for (prefix, prob), tokens, two in zip(probs.items(), best.indices.tolist(), shares, strict=True)
            for token, share in zip(tokens, two)
        }
    assert len(probs) == 2**LENGTH and abs(sum(probs.values()) - 1) < 1e-9
    return probs


def sampled_by(server, prompt: tuple[int, ...], samples: int) -> Counter:
    """Count the sequences that a server samples."""
    requests = [{"input_ids": list(prompt), "sampling_params": {**SAMPLING, "n": SAMPLES_PER_REQUEST}}]
    answers = server.generate_many(requests * (samples // SAMPLES_PER_REQUEST), concurrency=8)
    answers = list(itertools.chain.from_iterable(answers))
    kept = sum(answer["meta_info"]["spec_accept_length"] for answer in answers) / len(answers)
    assert kept > 1.2, f"the test shows little: only {kept:.2f} tokens accepted per cycle"
    counts = Counter(tuple(answer["output_ids"]) for answer in answers)
    assert counts.total() == samples
    return counts


def p_value(counted: dict[tuple[int, ...], Counter], expected: dict[tuple[int, ...], Probs]) -> float:
    """Return the p-value of the counts of sequences after each prompt against `expected`."""
    statistic = freedom = 0.0
    for prompt, counts in counted.items():
        samples, probs = counts.total(), expected[prompt]
        impossible = counts.keys() - probs.keys()
        assert not impossible, f"after {prompt!r}, tokens that the sampler excludes: {list(impossible)[:3]}"
        cells = pooled([(counts[sequence], prob * samples) for sequence, prob in probs.items()])
        statistic += sum((count - mean) ** 2 / mean for count, mean in cells)
        freedom += len(cells) - 1
    assert freedom > 20, "nothing to test: nearly all of the target's probability is on a few sequences"
    return chi2.sf(statistic, freedom)


def pooled(cells: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Pool the (count, mean) of rare sequences until each mean is at least 8.

    The chi-square test needs that.
    """
    done, count, mean = [], 0, 0.0
    for more_count, more_mean in sorted(cells, key=lambda cell: cell[1]):
        count, mean = count + more_count, mean + more_mean
        if mean >= 8:
            done.append((count, mean))
            count, mean = 0, 0.0
    done[-1] = (done[-1][0] + count, done[-1][1] + mean)
    return done
