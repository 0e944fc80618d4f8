"""Accept drawn tokens by the draft's own probabilities.

Pure functions over one verified batch of blocks. Every random number is an argument, and no request depends
on another. Shapes: bs requests, blocks of B slots (column 0 the anchor, B - 1 drafted), T verified rows, C
draft candidates, vocabulary V. `accept_drawn` returns accept lengths [bs] int32 and tokens [bs, B] int64: the
accepted tokens, then the final one, then ids without a meaning.

Neither rule needs the draft's distribution over the whole vocabulary. Rejection needs the probability of the
drafted token. Block verification also needs the mass shared with the target, to which only candidates add.
The draft's probabilities are subtracted in one row per request, for the final token. So a list of candidates
is enough: 64 of them take 0.6 MB at bs 48, B 16. [bs, B - 1, V] float32 would take 440 MB for V = 152k."""

from typing import Any

import torch

from sglang_dflash.kernels.ops.speculative.rejection import accept_drafts_triton
from sglang_dflash.srt.layers.draft_probs import DraftProbs, draw_by_inverse_cdf
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout


def accept_drawn(
    rule: str,
    block: torch.Tensor,
    target_probs: torch.Tensor,
    draft: DraftProbs,
    accept_uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
    layout: VerifyLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drawn tokens by a rule.

    NaN, infinite or negative probabilities give their request valid token ids without a meaning, and change
    no other request. Neither `target_probs` nor `choose_tokens` makes such probabilities.

    Args:
        rule: a key of REJECTION_RULES. On CUDA the kernel runs in the place of its function.
        block: [bs, B] int64, column 0 the anchor.
        target_probs: [T, V] float32, the target's distribution after each verified slot, normalised. One-hot
            for a greedy request, which is then accepted as by `accept_matching_prefix`.
        draft: distributions that columns 1.. were drawn from.
        accept_uniforms: [bs, B - 1] in [0, 1), independent of the drafting.
        final_uniforms: [bs] in [0, 1), independent of all others.
        layout: verified slots, chosen before any of these draws. A chain that is kept to its last verified
            slot counts as a whole block.
    """
    if block.is_cuda:
        starts, max_accept = layout.bounds
        accept_len, weight = accept_drafts_triton(
            block,
            target_probs=target_probs,
            draft_ids=draft.ids,
            draft_probs=draft.probs,
            accept_uniforms=accept_uniforms.contiguous(),
            rule=rule,
            starts=starts,
            max_accept=max_accept,
        )
    else:
        accept_len, weight = REJECTION_RULES[rule](
            block, target_probs=target_probs, draft=draft, accept_uniforms=accept_uniforms, layout=layout
        )
    return draw_final_tokens(
        block,
        accept_len=accept_len,
        target_probs=target_probs,
        weight=weight,
        draft=draft,
        final_uniforms=final_uniforms,
        layout=layout,
    )


def accept_standard(
    block: torch.Tensor,
    target_probs: torch.Tensor,
    draft: DraftProbs,
    accept_uniforms: torch.Tensor,
    layout: VerifyLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept drafted tokens one by one, by standard rejection.

    Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.

    With p the target's distribution and q the draft's, a drafted token x is accepted with probability min(1,
    p(x) / q(x)). At the first rejection the final token comes from max(0, p - q), normalised. After a whole
    block it comes from p.

    Returns accept lengths [bs] int32 and weights [bs] float64, which are always 1.
    """
    drafted = block[:, 1:]
    slots, lengths = _slots_and_lengths(layout, block.device)
    # A product instead of u < p / q, so that q may be zero.
    is_accepted = accept_uniforms.double() * draft.prob_of(drafted) < target_probs[slots[:, :-1], drafted]
    is_accepted &= torch.arange(drafted.shape[1], device=block.device) < lengths[:, None]
    accept_len = is_accepted.cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32)
    return accept_len, torch.ones_like(accept_len, dtype=torch.float64)


def _slots_and_lengths(layout: VerifyLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each slot [bs, B] int64, and drafted tokens to verify [bs]."""
    slots = layout.to_blocks(torch.arange(layout.num_rows, device=device))
    return slots, torch.as_tensor(layout.num_draft_tokens, device=device)


def accept_block_verification(
    block: torch.Tensor,
    target_probs: torch.Tensor,
    draft: DraftProbs,
    accept_uniforms: torch.Tensor,
    layout: VerifyLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the longest accepted prefix of each block, by block verification.

    Sun et al. 2024, arXiv 2403.10444, algorithm 2.

    The first i drafted tokens together have the weight w_i = min(1, w_(i-1) * p(x_i) / q(x_i)). They are
    accepted with probability r / (r + 1 - w_i). r is the sum of max(0, w_i * p - q) for the token after
    them. A whole block is accepted with probability w_i. The longest accepted prefix counts, and the final
    token comes from max(0, w_i * p - q), normalised. So a later token the draft gives too rarely can make up
    for one it gives too often: the expected length is never below `accept_standard`'s. For one-hot drafts
    both rules are the same.

    Returns accept lengths [bs] int32 and the weights w of these prefixes, [bs] float64.
    """
    width = block.shape[1]
    drafted = block[:, 1:]
    slots, lengths = _slots_and_lengths(layout, block.device)
    ratios = target_probs[slots[:, :-1], drafted] / draft.prob_of(drafted).double()
    accept_len = torch.zeros(len(block), dtype=torch.int32, device=block.device)
    prefix_weight = weight = torch.ones_like(accept_len, dtype=torch.float64)
    for length in range(1, width):
        prefix_weight = (prefix_weight * ratios[:, length - 1]).clamp(max=1)
        # The sum of min(w * p, q), to which only candidates add. r is w - shared, r + 1 - w is 1 - shared.
        shared = torch.zeros_like(prefix_weight)
        if length < width - 1:
            target = target_probs[slots[:, length, None], draft.ids[:, length]]
            shared = torch.minimum(prefix_weight[:, None] * target, draft.probs[:, length]).sum(dim=1)
            shared = torch.where(length < lengths, shared, 0)
        # A product: if w is 1 and p equals q, both sides are zero, and a later length is accepted.
        accepted = accept_uniforms[:, length - 1].double() * (1 - shared) < prefix_weight - shared
        accepted &= length <= lengths
        accept_len = torch.where(accepted, length, accept_len)
        weight = torch.where(accepted, prefix_weight, weight)
    return accept_len, weight


def draw_final_tokens(
    block: torch.Tensor,
    accept_len: torch.Tensor,
    target_probs: torch.Tensor,
    weight: torch.Tensor,
    draft: DraftProbs,
    final_uniforms: torch.Tensor,
    layout: VerifyLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the last token from max(0, weight * p - q), or from p after a whole block.

    `accept_len` and `weight` are a rule's: accepted drafted tokens [bs] int32, and the weight of the accepted
    prefix [bs] float64. The other arguments are those of `accept_drawn`.
    """
    bs, block_size = block.shape
    requests = torch.arange(bs, device=block.device)
    accepted = accept_len.long()
    if layout.is_rectangle:
        mass = target_probs.view(bs, block_size, target_probs.shape[-1])[requests, accepted]
    else:
        mass = target_probs[layout.slots[requests, accepted]]
    if block_size > 1:
        slot = accepted.clamp(max=block_size - 2)
        last = block_size - 1 if layout.is_rectangle else layout.max_accept
        is_rejection = (accepted < last)[:, None]
        drawn_from = torch.where(is_rejection, draft.probs[requests, slot], 0)
        weighted = weight.to(mass.dtype)[:, None] * mass
        weighted.scatter_add_(1, draft.ids[requests, slot], -drawn_from.to(mass.dtype))
        residual = weighted.clamp_(min=0)
        # If nothing is left, p and q differ by rounding at most, and so the rejection was a rounding error.
        mass = torch.where((residual > 0).any(dim=1, keepdim=True), residual, mass)
    final = draw_by_inverse_cdf(mass, final_uniforms)
    tokens = torch.cat([block[:, 1:], final[:, None]], dim=1).scatter_(1, accepted[:, None], final[:, None])
    return accept_len, tokens


# A new rule is a function above, a branch in its kernel, and a row here. After every rule the final token
# comes from max(0, weight * p - q). If that is not exact for a rule, `draw_final_tokens` changes too.
REJECTION_RULES = {"standard": accept_standard, "block": accept_block_verification}


def rejection_rule(spec: Any) -> str:
    """Choose the rule for drawn drafts by SGLang's flags. Empty: the server draws no drafts."""
    if not spec.speculative_use_rejection_sampling:
        return ""
    return "block" if spec.speculative_use_block_verification else "standard"
