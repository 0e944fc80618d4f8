"""Sampled output follows the target's sampler: temperature, top-k, top-p, min-p.

The target alone scores each sampled sequence, which gives the target's distribution at every token. A token's
place in the cumulative distribution is uniform on [0, 1) if and only if the sampler is right. A
Kolmogorov-Smirnov test over all places rejects a right sampler once in 1 / FALSE_ALARM runs.
`test_the_statistic_rejects_other_samplers` shows that it rejects wrong samplers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import pytest
from scipy.stats import kstest
from serving import DFLASH2_DRAFT, SPECULATORS_DRAFT, TARGET, Server, dflash_arguments, heldout_prompts
from support.parity import assert_same
from support.sampling_checks import EDGE, FALSE_ALARM, VOCAB, Draw, Filter, joint_filter, places, score
from support.scheduled import Job, run
from support.servers import FLOAT32, UNCOUNTED, patched
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
    "greedy": dflash_arguments(),
    "probabilistic": [*dflash_arguments(), "--speculative-draft-sample-method", "probabilistic"],
    # A reduced vocabulary, a sharper draft, and greedy drafts in the deeper slots.
    "probabilistic, speculators": [
        *dflash_arguments(SPECULATORS_DRAFT),
        "--speculative-use-rejection-sampling",
        "--speculative-draft-temperature-scale=0.6",
        "--speculative-draft-sampled-slots=3",
    ],
}


# The speculators draft draws by the same rule as DFlash's, with more options. test_sampled_sequences.py has
# DFlash's draws in the normal lane.
@pytest.fixture(
    scope="module",
    params=[pytest.param(d, marks=[pytest.mark.long] * (d == "probabilistic")) for d in DRAFTING],
)
def server(request, servers) -> Server:
    return servers.get(*FLOAT32, *DRAFTING[request.param], environment=UNCOUNTED | patched("masks_of_draws"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [p["text"] for p in heldout_prompts() if 5 <= p["num_tokens"] <= 120]
    return [tokenizer.encode(text).ids for text in texts[::2][:40]]


@pytest.fixture(scope="module")
def draws(server, reference, prompts) -> Callable[[Case], list[Draw]]:
    """Sample and score every prompt once per case, in batches with greedy requests."""
    made: dict[str, list[Draw]] = {}

    def get(case: Case) -> list[Draw]:
        if case.name not in made:
            made[case.name] = sample_and_score(
                server, reference, prompts, {"temperature": 1.0, **case.sampling}
            )
        return made[case.name]

    return get


def sample_and_score(server, reference, prompts, sampling: dict) -> list[Draw]:
    length = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    sampled = [{"input_ids": ids, "sampling_params": {**sampling, **length}} for ids in prompts]
    greedy = [{"input_ids": ids, "sampling_params": {"temperature": 0, **length}} for ids in prompts[::4]]
    both = [
        request
        for i, sample in enumerate(sampled)
        for request in ([sample, greedy[i // 4]] if i % 4 == 0 else [sample])
    ]
    answers = server.generate_many(both, 16)
    greedy_answers = [answer for request, answer in zip(both, answers) if request in greedy]
    assert_same(greedy, greedy_answers, reference.answers(greedy))
    outputs = [answer["output_ids"] for request, answer in zip(both, answers) if request not in greedy]
    return score(reference, prompts, outputs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sampled_tokens_follow_the_targets_sampler(case, draws):
    made = draws(case)
    found, outside = places(made, case.kept, case.temperature)
    assert not outside, (
        f"{len(outside)} of {len(made)} sampled tokens are excluded by the filter, such as {outside[:2]}"
    )
    assert len(found) > 0.8 * len(made), "too many tokens were left out of the test"
    result = kstest(found, "uniform")
    assert result.pvalue > FALSE_ALARM, (
        f"{case.name}: not the sampler's distribution, {result} over {len(found)} draws"
    )


def test_the_statistic_rejects_other_samplers(draws, reference, prompts):
    """Reject other filters, another temperature, and greedy output."""
    joint, min_p, tempered = CASES
    _, outside = places(draws(joint), chained_filter(4, 0.82), 1.0)
    assert outside, (
        "chained filters would allow every sampled token, so the first case cannot tell them apart"
    )
    found, outside = places(draws(min_p), min_p_filter(0.3, 1.3), 1.3)
    assert outside, "a filter four times as strict would allow every token, so the second case proves nothing"
    found, _ = places(draws(tempered), tempered.kept, 1.2)
    assert kstest(found, "uniform").pvalue < FALSE_ALARM, "temperature 0.7 passes for 1.2"
    length = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    greedy = [{"input_ids": ids, "sampling_params": {"temperature": 0, **length}} for ids in prompts]
    outputs = [answer["output_ids"] for answer in reference.answers(greedy)]
    found, _ = places(score(reference, prompts, outputs), joint.kept, 1.0)
    assert kstest(found, "uniform").pvalue < FALSE_ALARM, "greedy output passes for a sample"


def test_logprobs_of_sampled_tokens(server, reference, prompts):
    """Log probabilities are those of the sampled tokens, next to greedy requests."""
    length = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    requests = [
        {
            "input_ids": ids,
            "sampling_params": {"temperature": float(i % 3 > 0), **length},
            "return_logprob": True,
        }
        for i, ids in enumerate(prompts[:12])
    ]
    answers = server.generate_many(requests, 6)
    scoring = [
        {
            "input_ids": ids + answer["output_ids"],
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": len(ids) - 1,
        }
        for ids, answer in zip(prompts, answers)
    ]
    for request, answer, scored in zip(requests, answers, reference.server.generate_many(scoring, 6)):
        got = answer["meta_info"]["output_token_logprobs"]
        want = scored["meta_info"]["input_token_logprobs"][-NEW_TOKENS:]
        assert [token for _, token, *_ in got] == answer["output_ids"]
        for place, ((mine, token, *_), (theirs, *_)) in enumerate(zip(got, want, strict=True)):
            if token < VOCAB - 1:
                assert abs(mine - theirs) < 1e-4, (
                    f"token {token} at {place} of {request}: {mine}, the target: {theirs}"
                )


def test_sampling_masks_are_the_filters_tokens(server, reference, prompts):
    """Masks hold what the filter keeps of the target's tokens, however blocks are drafted."""
    top_k, top_p = 4, 0.82
    sampling = {"temperature": 1.0, "top_k": top_k, "top_p": top_p}
    length = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    # In batches with requests that return no masks.
    requests = [
        {
            "input_ids": ids,
            "sampling_params": {**sampling, **length},
            "return_sampling_mask": number % 4 > 0,
        }
        for number, ids in enumerate(prompts[:24])
    ]
    answers = server.generate_many(requests, 8)
    sizes = set()
    for request, answer in zip(requests, answers, strict=True):
        masks = answer["meta_info"].get("output_token_sampling_mask")
        logprobs = answer["meta_info"].get("output_token_sampling_logprobs")
        if not request["return_sampling_mask"]:
            assert masks is None
            continue
        assert len(masks) == len(logprobs) == NEW_TOKENS
        # The first token comes from the prefill.
        draws = score(reference, [request["input_ids"]], [answer["output_ids"]])
        for draw, mask, logprob in zip(draws, masks[1:], logprobs[1:], strict=True):
            least, most = (joint_filter(top_k, top_p, edge)(draw.probs) for edge in (-EDGE, EDGE))
            assert set(draw.tokens[:least]) <= set(mask) <= set(draw.tokens[:most]), (draw, mask)
            assert draw.token in mask
            probs = dict(zip(draw.tokens, draw.probs, strict=True))
            among = probs[draw.token] / sum(probs[token] for token in mask)
            assert logprob == pytest.approx(math.log(among), abs=1e-3)
            sizes.add(len(mask))
    assert sizes == {1, 2, 3, 4}
    assert sum(answer["meta_info"]["spec_accept_length"] for answer in answers) > len(answers)


def test_samples_of_one_prompt_differ(server, prompts):
    request = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "n": 8}
    answers = server.generate(input_ids=prompts[10], sampling_params=request)
    assert len(answers) == 8
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1, (
        "eight samples of one prompt are all equal"
    )


def test_drawn_drafts_are_kept_more_often_than_the_drafts_best(prompts):
    """At temperature 1 a draft's own draw meets the target's more often than its argmax.

    Rejection by other probabilities than the draft's would be exact too, and keep fewer tokens.
    """
    jobs = [Job(tuple(ids), 48, sampling={"temperature": 1.0}) for ids in prompts[:24]]
    kept = {}
    for method in ("greedy", "probabilistic"):
        arguments = *FLOAT32, "--random-seed", "7", *dflash_arguments(DFLASH2_DRAFT)
        options = ("--no-speculative-adaptive", "--speculative-draft-sample-method", method)
        [answers] = run(["--model-path", TARGET, *arguments, *options], [jobs])
        kept[method] = fmean(count for answer in answers for count in answer.accepted)
    assert kept["greedy"] > 0.3 and kept["probabilistic"] > 1.3 * kept["greedy"], kept
