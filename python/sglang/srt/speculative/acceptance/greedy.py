"""Which drafted tokens are kept. Pure functions over one verified batch of blocks.

Here: the rule for a draft that only says tokens. With the draft's probabilities: rejection.py.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verify forward decided, bs requests with blocks of B slots.

    accept_len: [bs] int32, drafted tokens kept; the bonus token is not counted.
    out_tokens: [bs, B] int64, row i's new output is its first accept_len[i] + 1 entries: the kept tokens,
        then the bonus token. Entries beyond are token ids without a meaning.
    bonus: [bs] int64, the target's own token after the kept ones; the anchor of the next block.
    """

    accept_len: torch.Tensor
    out_tokens: torch.Tensor
    bonus: torch.Tensor

    @property
    def is_output(self) -> torch.Tensor:
        """[bs, B] bool, which entries of out_tokens are the new output."""
        position = torch.arange(self.out_tokens.shape[1], device=self.out_tokens.device)
        return position <= self.accept_len[:, None]


def accept_matching_prefix(block: torch.Tensor, target_tokens: torch.Tensor) -> Verdict:
    """Keep drafted tokens while they are what the target would have said itself.

    block: [bs, B] int64, column 0 the anchor (already committed), columns 1.. the drafted tokens.
        target_tokens: [bs, B] int64, entry k the target's token AFTER block position k: its argmax for a
        greedy request, a draw of its sampler for a sampled one.

    Lossless for any draft. Greedy: every kept token equals the argmax given the tokens before it. Sampled:
    slot k is a draw from the target's distribution given the prefix, independent of what was drafted;
    comparing it with the draft only decides whether the later draws were made on the right prefix. This is
    speculative sampling (Leviathan et al. 2022) with a one-hot draft distribution: the drafted token x is
    kept with probability p(x), and otherwise the token comes from p without x, normalised."""
    matches = block[:, 1:] == target_tokens[:, :-1]
    accept_len = matches.cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32)
    bonus = target_tokens.gather(1, accept_len.long()[:, None]).squeeze(1)
    return Verdict(accept_len=accept_len, out_tokens=target_tokens, bonus=bonus)
