"""Which drafted tokens are kept, where the draft's own probabilities are known.

Pure functions over one verified batch of blocks; every random number is passed in, and no request sees
another's. Shapes: bs requests, blocks of B slots (column 0 the anchor, B - 1 drafted), C draft candidates,
vocabulary V.

Neither rule needs the draft's distribution over the whole vocabulary. Rejection asks it for the probability
of the drafted token; block verification also for what it shares with the target's, to which only candidates
add; and it is subtracted from the target's in one row per request, where the final token is drawn. So it
stays a list of candidates: 64 of them are 0.6 MB at bs 48, B 16, where [bs, B - 1, V] float32 would be 440 MB
for V = 152k.
"""

import torch

from sglang_dflash.kernels.ops.speculative.rejection import walk_blocks_triton
from sglang_dflash.srt.layers.draft_probs import DraftProbs, draw_by_inverse_cdf
from sglang_dflash.srt.speculative.acceptance.greedy import Verdict


def accept_by_rejection(
    block: torch.Tensor,
    target_probs: torch.Tensor,
    draft: DraftProbs,
    accept_uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
) -> Verdict:
    """Standard rejection (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

    With p the target's distribution and q the draft's, a drafted token x is kept with probability min(1,
    p(x) / q(x)). At the first rejection the final token comes from max(0, p - q), normalised; after a whole
    block from p.

    block: [bs, B] int64, column 0 the anchor.
    target_probs: [bs, B, V] float32, row k the target's distribution after block position k, normalised;
        one-hot for a greedy request, whose verdict is then `accept_matching_prefix`'s for any uniforms.
    accept_uniforms: [bs, B - 1], final_uniforms: [bs], float in [0, 1), independent of each other and of the
        drafting.

    NaN, infinite or negative probabilities, which neither `target_probs` nor `choose_tokens` makes, give
    their request a verdict without a meaning, but of valid token ids, and change no other request's."""
    return _accept(walk_by_rejection, block, target_probs, draft, accept_uniforms, final_uniforms)


def accept_by_block_verification(
    block: torch.Tensor,
    target_probs: torch.Tensor,
    draft: DraftProbs,
    accept_uniforms: torch.Tensor,
    final_uniforms: torch.Tensor,
) -> Verdict:
    """Block verification (Sun et al. 2024, arXiv 2403.10444, algorithm 2).

    Arguments as for `accept_by_rejection`. The first i drafted tokens together have the weight
    w_i = min(1, w_(i-1) * p(x_i) / q(x_i)). They are accepted with probability r / (r + 1 - w_i), where r is
    the sum of max(0, w_i * p - q) for the token after them, or with w_i when they are the whole block. The
    most that is accepted is kept, and the final token comes from max(0, w_i * p - q), normalised. So a token
    that the draft says too often can be made up for by a later one that it says too rarely: the expected
    length is never below that of `accept_by_rejection`. For one-hot drafts it is the same.
    """
    return _accept(walk_by_block_verification, block, target_probs, draft, accept_uniforms, final_uniforms)


def _accept(walk, block, target_probs, draft, accept_uniforms, final_uniforms) -> Verdict:
    if block.is_cuda:
        by_block = walk is walk_by_block_verification
        accept_len, weight = walk_blocks_triton(
            block, target_probs, draft.ids, draft.probs, accept_uniforms.contiguous(), by_block
        )
    else:
        accept_len, weight = walk(block, target_probs, draft, accept_uniforms)
    return draw_final_tokens(block, accept_len, target_probs, weight, draft, final_uniforms)


def walk_by_rejection(
    block: torch.Tensor, target_probs: torch.Tensor, draft: DraftProbs, accept_uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many drafted tokens `accept_by_rejection` keeps, [bs] int32, and their weight, [bs] float64: always
    1."""
    drafted = block[:, 1:]
    target_prob = target_probs[:, :-1].gather(2, drafted[..., None]).squeeze(2)
    # Not u < p / q: the product needs no care where q is zero.
    kept = accept_uniforms.double() * draft.of(drafted) < target_prob
    accept_len = kept.cumprod(dim=1, dtype=torch.int32).sum(dim=1, dtype=torch.int32)
    return accept_len, torch.ones_like(accept_len, dtype=torch.float64)


def walk_by_block_verification(
    block: torch.Tensor, target_probs: torch.Tensor, draft: DraftProbs, accept_uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many drafted tokens `accept_by_block_verification` keeps, [bs] int32, and their weight w, [bs]
    float64."""
    width = block.shape[1]
    drafted = block[:, 1:]
    target_prob = target_probs[:, :-1].gather(2, drafted[..., None]).squeeze(2)
    ratios = target_prob / draft.of(drafted).double()
    accept_len = torch.zeros(len(block), dtype=torch.int32, device=block.device)
    prefix_weight = weight = torch.ones_like(accept_len, dtype=torch.float64)
    for length in range(1, width):
        prefix_weight = (prefix_weight * ratios[:, length - 1]).clamp(max=1)
        # The sum of min(w * p, q), to which only candidates add. r is w - shared, r + 1 - w is 1 - shared.
        shared = 0
        if length < width - 1:
            target = target_probs[:, length].gather(1, draft.ids[:, length])
            shared = torch.minimum(prefix_weight[:, None] * target, draft.probs[:, length]).sum(dim=1)
        # Not divided: where w is 1 and p equals q both sides are zero, and a later length is accepted.
        accepted = accept_uniforms[:, length - 1].double() * (1 - shared) < prefix_weight - shared
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
) -> Verdict:
    """The last step of both rules: a token from max(0, weight * p - q), or from p after a whole block.

    accept_len: [bs] int32, drafted tokens kept. weight: [bs] float64, theirs; 1 under standard rejection.
    """
    bs, width = block.shape
    requests = torch.arange(bs, device=block.device)
    kept = accept_len.long()
    mass = target_probs[requests, kept]
    if width > 1:
        slot = kept.clamp(max=width - 2)
        drafted_here = (kept < width - 1)[:, None]
        drawn_from = torch.where(drafted_here, draft.probs[requests, slot], 0)
        weighted = weight.to(mass.dtype)[:, None] * mass
        weighted.scatter_add_(1, draft.ids[requests, slot], -drawn_from.to(mass.dtype))
        residual = weighted.clamp_(min=0)
        # Nothing left: p and q differ by rounding at most, and a rejection is a rounding error too.
        mass = torch.where((residual > 0).any(dim=1, keepdim=True), residual, mass)
    bonus = draw_by_inverse_cdf(mass, final_uniforms)
    out_tokens = torch.cat([block[:, 1:], bonus[:, None]], dim=1).scatter_(1, kept[:, None], bonus[:, None])
    return Verdict(accept_len=accept_len, out_tokens=out_tokens, bonus=bonus)
