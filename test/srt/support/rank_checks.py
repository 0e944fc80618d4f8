"""Prompts, requests and checks for servers of more than one process."""

import json
from collections.abc import Sequence
from itertools import cycle

from scipy.stats import kstest
from serving import TARGET, Server, heldout_prompts
from support.sampling_checks import FALSE_ALARM, joint_filter, places, score
from tokenizers import Tokenizer

SCHEMA = {"type": "object", "properties": {"name": {"enum": ["get", "put", "head"]}}, "required": ["name"]}
GRAMMARS = ({"regex": r"(def|class) [a-z_]{3,12}\(\):"}, {"json_schema": json.dumps(SCHEMA)})
PENALTIES = {"frequency_penalty": 0.6, "repetition_penalty": 1.2}
# Allows for a cycle more or less if two drafts tie.
NEARLY_SAME = 0.01


def some_prompts() -> list[list[int]]:
    """Return the token ids of 36 held-out prompts."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [prompt["text"] for prompt in heldout_prompts() if 5 <= prompt["num_tokens"] <= 300]
    return [tokenizer.encode(text).ids for text in texts[::4][:36]]


def greedy(ids: list[int], **sampling) -> dict:
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True, **sampling},
    }


def mixed_requests(prompts: list[list[int]], lengths: Sequence[int] = (40,)) -> list[dict]:
    """Return requests of these lengths in turn; every sixth has a grammar."""
    requests = [greedy(ids, max_new_tokens=n) for ids, n in zip(prompts, cycle(lengths))]
    for number in range(0, len(requests), 6):
        grammar = GRAMMARS[number // 6 % len(GRAMMARS)]
        requests[number] = greedy(prompts[number], ignore_eos=False, **grammar)
    return requests


def penalized_requests(prompts: list[list[int]]) -> list[dict]:
    return [greedy(ids, **PENALTIES) for ids in prompts[:8]]


def output_ids(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def said(answers: list[dict]) -> int:
    """Count the tokens that decode cycles gave: the prefill gives an answer's first."""
    return sum(answer["meta_info"]["completion_tokens"] - 1 for answer in answers)


def cycles(answers: list[dict]) -> int:
    """Count the decode cycles of all answers."""
    return sum(sum(answer["meta_info"]["spec_correct_drafts_histogram"]) for answer in answers)


def assert_samples(server: Server, prompts: list[list[int]]) -> None:
    """Check that all ranks emit the same tokens, which follow the target's sampler.

    Each rank has a separate generator.
    """
    sampling = {"temperature": 1.0, "top_k": 4, "top_p": 0.82, "max_new_tokens": 32, "ignore_eos": True}
    answers = server.generate_many([{"input_ids": ids, "sampling_params": sampling} for ids in prompts], 12)
    draws = score(prompts, output_ids(answers))
    found, outside = places(draws, joint_filter(4, 0.82), 1.0)
    assert not outside and len(found) > 800
    assert kstest(found, "uniform").pvalue > FALSE_ALARM
    assert cycles(answers) < said(answers), "no drafted token was accepted"
