"""Sampled tokens compared with the target's own distribution at each position.

The target alone scores a sampled sequence and so gives the probabilities. A token's place in their running
sum is uniform on [0, 1) exactly if tokens are drawn as they should be.
"""

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from serving import TARGET

VOCAB = json.loads((TARGET / "config.json").read_text())["vocab_size"]
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


def score(reference, prompts: list[list[int]], outputs: list[list[int]]) -> list[Draw]:
    """Return each output token with the target's distribution at its position.

    The first token of each output is left out: it comes from the prefill.
    """
    scoring = [
        {
            "input_ids": prompt + output,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "top_logprobs_num": TOP_LOGPROBS,
            "logprob_start_len": len(prompt) - 1,
        }
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    draws = []
    for output, answer in zip(outputs, reference.server.generate_many(scoring, 8)):
        tops = answer["meta_info"]["input_top_logprobs"][-len(output) :]
        chosen = answer["meta_info"]["input_token_logprobs"][-len(output) :]
        # SGLang shows the last id of the vocabulary as 0 among a prompt's tokens.
        assert [token for _, token, *_ in chosen] == [token if token < VOCAB - 1 else 0 for token in output]
        for token, top in list(zip(output, tops))[1:]:
            draws.append(Draw(token, [entry[1] for entry in top], [math.exp(entry[0]) for entry in top]))
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
