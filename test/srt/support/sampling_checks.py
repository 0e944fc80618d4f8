"""Sampled tokens compared with the target's own distribution at each position.

Hugging Face's model scores a sampled sequence and so gives the probabilities. A token's place in their
running sum is uniform on [0, 1) exactly if tokens are drawn as they should be.
"""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from serving import TARGET
from support.parity import FLOAT32_TIE
from support.scheduled import Answer, Job

FALSE_ALARM = 1e-6  # a correct sampler fails this often
TOP_LOGPROBS = 64
# A token this near a filter's edge may fall on either side, as float32 probabilities have rounding errors.
EDGE = 1e-4

# Takes the target's best probabilities at temperature 1, descending, and returns the number of tokens kept.
Filter = Callable[[Sequence[float]], int]


def joint_filter(top_k: int, top_p: float, edge: float = EDGE) -> Filter:
    """Return SGLang's filter: top-k and top-p both see the unfiltered probabilities."""

    def count(probs: Sequence[float]) -> int:
        before = 0.0
        for rank, prob in enumerate(probs[:top_k]):
            if before > top_p + edge:
                return rank
            before += prob
        return min(top_k, len(probs))

    return count


@dataclass
class Draw:
    """One sampled token, and the target's best tokens there with their probabilities.

    Probabilities are at temperature 1, descending.
    """

    token: int
    tokens: list[int]
    probs: list[float]


@functools.cache
def _target():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@torch.no_grad()
def target_logprobs(prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """Return the target's log probabilities at each output token, [len(output), vocabulary] float32."""
    logits = _target()(torch.tensor([[*prompt, *output]])).logits
    return logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)


def assert_greedy(jobs: Sequence[Job], answers: Sequence[Answer]) -> None:
    """Assert that every token is the target's best one, but for near ties."""
    for job, answer in zip(jobs, answers, strict=True):
        assert len(answer.output_ids) == job.max_new_tokens
        logprobs = target_logprobs(job.input_ids, answer.output_ids)
        chosen = logprobs.gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0]
        assert (logprobs.max(dim=-1).values - chosen < FLOAT32_TIE).all(), job


def score(prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> list[Draw]:
    """Return each output token with the target's distribution at its position.

    The first token of each output is left out: it comes from the prefill.
    """
    draws = []
    for prompt, output in zip(prompts, outputs, strict=True):
        best = target_logprobs(prompt, output)[1:].exp().topk(TOP_LOGPROBS)
        rows = zip(output[1:], best.indices.tolist(), best.values.tolist(), strict=True)
        draws += [Draw(*row) for row in rows]
    return draws


def places(draws: Sequence[Draw], kept: Filter, temperature: float) -> tuple[list[float], list[Draw]]:
    """Return the draws' places in the filtered distribution's running sum, and excluded draws."""
    dice = random.Random(3)
    found, outside = [], []
    for draw in draws:
        count = kept(draw.probs)
        if count == TOP_LOGPROBS:
            continue  # the filter may keep more tokens than were listed
        if draw.token not in draw.tokens[:count]:
            outside.append(draw)
            continue
        weights = [prob ** (1 / temperature) for prob in draw.probs[:count]]
        rank = draw.tokens.index(draw.token)
        found.append((sum(weights[:rank]) + dice.random() * weights[rank]) / sum(weights))
    return found, outside
