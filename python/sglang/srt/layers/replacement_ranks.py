"""Ranks of tokens that replaced rejected ones, among the draft's candidates."""

import torch

# The `rank` label of the counter. The last bucket is outside the draft's vocabulary.
REPLACEMENT_RANKS = ("2", "3", "4", "5-8", "9-16", "17+", "outside")
_ENDS = (2, 3, 4, 8, 16)  # last ranks of the buckets before the open one


def replacement_ranks(
    logits: torch.Tensor, ids: torch.Tensor, drafted: torch.Tensor, emitted: torch.Tensor
) -> torch.Tensor:
    """Return the rank of each emitted token if the drafted one has rank 1, [n] int64.

    0: the draft cannot propose the token.

    Args:
        logits: [n, V] of the draft's vocabulary.
        ids: [V] int64, target token of each column.
        drafted: [n] int64, rejected tokens.
        emitted: [n] int64, tokens that replaced them.
    """
    is_emitted = ids == emitted[:, None]
    logit = logits.masked_fill(~is_emitted, -torch.inf).amax(dim=1, keepdim=True)
    is_better = (logits > logit) & (ids != drafted[:, None])
    return torch.where(is_emitted.any(dim=1), 2 + is_better.sum(dim=1), 0)


def bucket(rank: int) -> str:
    """Return the bucket of `REPLACEMENT_RANKS` that holds a rank."""
    if rank == 0:
        return REPLACEMENT_RANKS[-1]
    return REPLACEMENT_RANKS[sum(rank > end for end in _ENDS)]
