"""Penalties as their definition says, token by token."""

import math
from types import SimpleNamespace

import torch

EOS, STOP = 3, 5
NEUTRAL = dict(frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0, min_new_tokens=0)


def request(prompt_len: int, output_ids=(), eos_token_ids=frozenset({EOS}), **penalties) -> SimpleNamespace:
    return SimpleNamespace(
        origin_input_ids=[1] * prompt_len,
        output_ids=list(output_ids),
        eos_token_ids=set(eos_token_ids),
        tokenizer=None,
        sampling_params=SimpleNamespace(**{**NEUTRAL, "stop_token_ids": {STOP}, **penalties}),
    )


def penalized(logits: torch.Tensor, req: SimpleNamespace, output: list[int]) -> torch.Tensor:
    """Penalize logits [vocab] of the position after `output`, token by token."""
    params, out = req.sampling_params, logits.clone()
    if len(output) < params.min_new_tokens:
        out[list(req.eos_token_ids | params.stop_token_ids)] = -math.inf
    for token in set(output):
        count = output.count(token)
        out[token] -= params.frequency_penalty * count + params.presence_penalty
        out[token] *= params.repetition_penalty if out[token] < 0 else 1 / params.repetition_penalty
    return out
