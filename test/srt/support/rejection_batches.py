"""Random arguments of the rejection rules, as a hypothesis strategy."""

import numpy as np
import torch
from hypothesis import strategies as st
from support.enumeration import LAST, as_shuffled_list

from sglang_dflash.srt.layers.draft_probs import draw_by_inverse_cdf


def random_probs(rng, *shape: int, peaked: float) -> torch.Tensor:
    weights = rng.exponential(size=shape) ** peaked
    weights[rng.random(shape) < 0.3] = 0
    weights[weights.sum(axis=-1) == 0, 0] = 1
    return torch.tensor(weights / weights.sum(axis=-1, keepdims=True)).float()


def certain(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens, vocabulary).float()


@st.composite
def batches(draw):
    """Arguments of a rule, float32 and int64.

    Some requests are greedy and some drafts one-hot. Every drafted token has a positive draft probability.
    Uniforms include both ends of their range.
    """
    bs, width, vocabulary = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    peaked = draw(st.sampled_from([0.0, 1.0, 4.0]))
    target_probs = random_probs(rng, bs, width, vocabulary, peaked=peaked)
    draft_probs = random_probs(rng, bs, width - 1, vocabulary, peaked=peaked)
    near = torch.tensor(rng.random((bs, 1, 1)) < 0.3)
    draft_probs = torch.where(near, target_probs[:, :-1], draft_probs)
    greedy = torch.tensor(rng.random((bs, 1, 1)) < 0.3)
    target_probs = torch.where(greedy, certain(target_probs.argmax(dim=2), vocabulary), target_probs)
    one_hot = torch.tensor(rng.random((bs, width - 1, 1)) < 0.3)
    draft_probs = torch.where(one_hot, certain(draft_probs.argmax(dim=2), vocabulary), draft_probs)
    drafted = draw_by_inverse_cdf(draft_probs.flatten(0, 1), torch.tensor(rng.random(bs * (width - 1))))
    block = torch.cat([torch.zeros(bs, 1, dtype=torch.int64), drafted.view(bs, width - 1)], dim=1)
    uniforms = rng.choice([0.0, LAST, *rng.random(4)], size=(bs, width))
    uniforms = torch.tensor(uniforms).float().clamp(max=LAST)
    return block, target_probs, as_shuffled_list(draft_probs), uniforms[:, 1:], uniforms[:, 0]
