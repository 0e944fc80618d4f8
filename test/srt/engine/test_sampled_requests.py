"""Sampled output follows the target's sampler: temperature, top-k, top-p, min-p.

Hugging Face's model scores each sampled sequence, which gives the target's distribution at every token. A
token's place in the cumulative distribution is uniform on [0, 1) if and only if the sampler is right. A
Kolmogorov-Smirnov test over all places rejects a right sampler once in 1 / FALSE_ALARM runs.
`test_the_statistic_rejects_other_samplers` shows that it rejects wrong samplers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import pytest
import torch
from scipy.stats import kstest
from serving import DFLASH2_DRAFT, SPECULATORS_DRAFT, TARGET, WHOLE_BLOCKS, dflash_arguments, heldout_prompts
from support.sampling_checks import (
    EDGE,
    FALSE_ALARM,
    Draw,
    Filter,
    assert_greedy,
    joint_filter,
    places,
    score,
    target_logprobs,
)
from support.scheduled import Answer, Job, run
from support.servers import FLOAT32, patched
from tokenizers import Tokenizer

pytestmark = pytest.mark.server

NEW_TOKENS = 32


def chained_filter(top_k: int, top_p: float) -> Filter:
    """Build the filter of SGLang's built-in DFLASH: top-p of the renormalised top-k."""

    def count(probs: Sequence[float]) -> int:
        kept = sum(probs[:top_k])
        return joint_filter(top_k, top_p)([prob / kept for prob in probs[:top_k]])

    return count


def min_p_filter(min_p: float, temperature: float) -> Filter:
    def count(probs: Sequence[float]) -> int:
        return sum((prob / probs[0]) ** (1 / temperature) >= min_p * (1 - EDGE) for prob in probs)

    return count


@dataclass(frozen=True)
class Case:
    name: str
    sampling: dict
    kept: Filter
    temperature: float = 1.0


CASES = (
    Case("joint top-k and top-p", {"top_k": 4, "top_p": 0.82}, joint_filter(4, 0.82)),
    Case("min-p", {"temperature": 1.3, "min_p": 0.08}, min_p_filter(0.08, 1.3), temperature=1.3),
    Case("temperature and top-k", {"temperature": 0.7, "top_k": 8}, joint_filter(8, 1.0), temperature=0.7),
)


# Ways to draft; under each the output must follow the target's sampler.
DRAFTING = {
    "greedy": [*dflash_arguments(), WHOLE_BLOCKS],
    # A reduced vocabulary.
    "probabilistic, speculators": [
        *dflash_arguments(SPECULATORS_DRAFT),
        WHOLE_BLOCKS,
        "--speculative-use-rejection-sampling",
    ],
}


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [p["text"] for p in heldout_prompts() if 5 <= p["num_tokens"] <= 120]
    return [tuple(tokenizer.encode(text).ids) for text in texts[::2][:40]]


Answers = list[tuple[Job, Answer]]


# test_sampled_sequences.py has drawn drafts in every run.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.long] * (name != "greedy")) for name in DRAFTING],
)
def answers(request, prompts) -> dict[str, Answers]:
    """Jobs with their answers: a group for each case, one for log probabilities and one for masks.

    In every group some requests are greedy, and some join while others run.
    """
    jobs = [Job(prompt, NEW_TOKENS, step=2 * number) for number, prompt in enumerate(prompts)]
    groups = {}
    for case in CASES:
        sampled = [replace(job, sampling={"temperature": 1.0, **case.sampling}) for job in jobs]
        groups[case.name] = [one for pair in zip(sampled, jobs[::4]) for one in pair] + sampled[10:]
    groups["log probabilities"] = [
        replace(job, sampling={"temperature": float(i % 3 > 0)}, logprobs=True)
        for i, job in enumerate(jobs[:12])
    ]
    groups["masks"] = [
        replace(job, sampling={"temperature": 1.0, **CASES[0].sampling}, masks=i % 4 > 0)
        for i, job in enumerate(jobs[:24])
    ]
    groups["greedy"] = [replace(job, masks=i % 4 > 0) for i, job in enumerate(jobs[:20])]
    arguments = ["--model-path", TARGET, *FLOAT32, *DRAFTING[request.param]]
    found = run(arguments, list(groups.values()), environment=patched("masks_of_draws"))
    for some in found:
        kept = sum(sum(answer.accepted) for answer in some)
        assert kept > sum(len(answer.output_ids) for answer in some) / 5, (
            "hardly a drafted token was accepted"
        )
    return {
        name: list(zip(group, some, strict=True))
        for (name, group), some in zip(groups.items(), found, strict=True)
    }


def is_greedy(job: Job) -> bool:
    return job.sampling["temperature"] == 0


def draws(answers: Answers, greedy: bool = False) -> list[Draw]:
    """Score the sampled answers, or the greedy ones."""
    chosen = [(job.input_ids, answer.output_ids) for job, answer in answers if is_greedy(job) == greedy]
    return score(*zip(*chosen, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sampled_tokens_follow_the_targets_sampler(case, answers):
    made = draws(answers[case.name])
    found, outside = places(made, case.kept, case.temperature)
    assert not outside, (
        f"{len(outside)} of {len(made)} sampled tokens are excluded by the filter, such as {outside[:2]}"
    )
    assert len(found) > 0.8 * len(made) > 900, "too many tokens were left out of the test"
    result = kstest(found, "uniform")
    assert result.pvalue > FALSE_ALARM, (
        f"{case.name}: not the sampler's distribution, {result} over {len(found)} draws"
    )


def test_the_statistic_rejects_other_samplers(answers):
    """Reject other filters, another temperature, and greedy output."""
    joint, min_p, tempered = CASES
    _, outside = places(draws(answers[joint.name]), chained_filter(4, 0.82), 1.0)
    assert outside, (
        "chained filters would allow every sampled token, so the first case cannot tell them apart"
    )
    found, outside = places(draws(answers[min_p.name]), min_p_filter(0.3, 1.3), 1.3)
    assert outside, "a filter four times as strict would allow every token, so the second case proves nothing"
    found, _ = places(draws(answers[tempered.name]), tempered.kept, 1.2)
    assert kstest(found, "uniform").pvalue < FALSE_ALARM, "temperature 0.7 passes for 1.2"
    found, _ = places(draws(answers["greedy"], greedy=True), joint.kept, 1.0)
    assert kstest(found, "uniform").pvalue < FALSE_ALARM, "greedy output passes for a sample"


def test_greedy_requests_of_the_batches_are_the_targets(answers):
    greedy = [pair for pair in sum(answers.values(), []) if is_greedy(pair[0])]
    assert len(greedy) > 50
    assert_greedy(*zip(*greedy, strict=True))


def test_logprobs_of_sampled_tokens(answers):
    """Log probabilities are those of the sampled tokens, next to greedy requests."""
    for job, answer in answers["log probabilities"]:
        wanted = target_logprobs(job.input_ids, answer.output_ids)
        wanted = wanted.gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(answer.logprobs), wanted, atol=1e-4, rtol=0)


def test_sampling_masks_are_the_filters_tokens(answers):
    """Masks hold what the filter keeps of the target's tokens, however blocks are drafted.

    In batches with requests that return no masks.
    """
    top_k, top_p = CASES[0].sampling.values()
    sizes = set()
    for job, answer in answers["masks"]:
        if not job.masks:
            assert answer.masks == ()
            continue
        assert len(answer.masks) == NEW_TOKENS
        # The first token comes from the prefill.
        drawn = score([job.input_ids], [answer.output_ids])
        for draw, (mask, logprob) in zip(drawn, answer.masks[1:], strict=True):
            least, most = (joint_filter(top_k, top_p, edge)(draw.probs) for edge in (-EDGE, EDGE))
            assert set(draw.tokens[:least]) <= mask <= set(draw.tokens[:most]), (draw, mask)
            assert draw.token in mask
            probs = dict(zip(draw.tokens, draw.probs, strict=True))
            among = probs[draw.token] / sum(probs[token] for token in mask)
            assert logprob == pytest.approx(math.log(among), abs=1e-3)
            sizes.add(len(mask))
    assert sizes == {1, 2, 3, 4}
    for job, answer in answers["greedy"]:
        assert answer.masks == tuple((frozenset({token}), 0.0) for token in answer.output_ids if job.masks)


def test_drawn_drafts_are_kept_more_often_than_the_drafts_best(prompts):
    """At temperature 1 a draft's own draw meets the target's more often than its argmax.

    Rejection by other probabilities than the draft's would be exact too, and keep fewer tokens.
    """
    jobs = [Job(prompt, 48, sampling={"temperature": 1.0}) for prompt in prompts[:24]]
    kept = {}
    for method in ("greedy", "probabilistic"):
        arguments = *FLOAT32, "--random-seed", "7", *dflash_arguments(DFLASH2_DRAFT)
        options = ("--no-speculative-adaptive", "--speculative-draft-sample-method", method)
        [answers] = run(["--model-path", TARGET, *arguments, *options], [jobs])
        kept[method] = fmean(count for answer in answers for count in answer.accepted)
    assert kept["greedy"] > 0.3 and kept["probabilistic"] > 1.3 * kept["greedy"], kept
