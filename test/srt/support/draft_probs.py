"""Distributions of drafts for tests."""

import torch

from sglang_dflash.srt.layers.draft_probs import DraftProbs


def one_hot(drafted: torch.Tensor) -> DraftProbs:
    """Give each of the tokens drafted [bs, B - 1], chosen without sampling, probability 1."""
    return DraftProbs(drafted[..., None], torch.ones_like(drafted[..., None], dtype=torch.float32))
