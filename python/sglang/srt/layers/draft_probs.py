"""Distributions that drafted tokens were sampled from, and sampling from a distribution."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """Distributions that the drafted tokens were actually sampled from.

    Candidates with a probability above zero are distinct in a slot. The others are padding, any id of the
    vocabulary. A token outside the list has probability 0.
    """

    ids: torch.Tensor  # [bs, B - 1, C] int64, candidates in target token ids
    probs: torch.Tensor  # [bs, B - 1, C] float32, sums to 1 over the candidates

    def prob_of(self, drafted: torch.Tensor) -> torch.Tensor:
        """Look up the probability that each token of drafted [bs, B - 1] had, [bs, B - 1]."""
        return torch.where(self.ids == drafted[..., None], self.probs, 0).sum(dim=-1)


def draw_by_inverse_cdf(mass: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Sample a column per row in proportion to mass [n, m] -> [n] int64.

    A column without mass is never chosen, whatever the rounding of the sums. A row of NaN or zeros gives
    column 0. `uniforms` are [n] numbers in [0, 1).
    """
    cumulative = mass.cumsum(dim=1, dtype=torch.float64)
    # A float32 draw may have been rounded up to 1.
    level = uniforms.double().clamp(max=1 - 2**-24)[:, None] * cumulative[:, -1:]
    return ((cumulative > level) & (mass > 0)).byte().argmax(dim=1)
