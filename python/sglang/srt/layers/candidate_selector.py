"""DFlash2's candidate selector: a coherent path through the candidates of a block.

Format: z-lab/dflash, `DFlash2DraftModel`. A slot's K candidates are the largest of the draft's base logits.
After the token p, candidate c of slot e scores unary[e, c] + <A[p] * gate[e], B[c]>. A and B are the
codebooks, gate[e] is a projection of the slot's hidden state, and the token before slot 0 is the anchor. A
walk takes the best candidate, or samples from softmax(scores / temperature) over the K candidates, given the
token it has just taken. Verification uses this distribution: conditional on the drafted prefix, and exact.

Pure functions; every random number is passed in. Shapes: bs requests, S drafted slots, K candidates, rank r.
"""

import torch

from sglang_dflash.kernels.ops.speculative.selector_walk import Candidates, DrawInputs
from sglang_dflash.srt.layers.draft_probs import draw_by_inverse_cdf


def walk_torch(
    candidates: Candidates,
    anchors: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    draw: DrawInputs | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Walk the candidates in PyTorch, on any device. `walk_triton` is its twin.

    Args:
        candidates: of every slot.
        anchors: [bs] int64, the token before each block.
        predecessor_codebook: [vocab, r], rows by token id.
        successor_codebook: [vocab, r], rows by token id.
        draw: parameters of a sampled walk. None: the best token of every slot.

    Returns:
        Tokens [bs, S] int64 and, if sampled, the distributions [bs, S, K] float32.
    """
    ids, gate, unary = candidates.ids, candidates.gate.float(), candidates.unary.float()
    keys = successor_codebook[ids].float()
    previous, tokens, probs = anchors, [], []
    for slot in range(ids.shape[1]):
        query = predecessor_codebook[previous].float() * gate[:, slot]
        scores = unary[:, slot] + torch.bmm(keys[:, slot], query[..., None]).squeeze(2)
        scores = scores.nan_to_num(nan=-1e30).clamp(-1e30, 1e30)
        if draw is None:
            chosen = scores.argmax(dim=1)
        else:
            probs.append(slot_probs(scores, draw))
            chosen = draw_by_inverse_cdf(probs[-1], draw.uniforms[:, slot])
        previous = ids[:, slot].gather(1, chosen[:, None]).squeeze(1)
        tokens.append(previous)
    return torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None


def slot_probs(scores: torch.Tensor, draw: DrawInputs) -> torch.Tensor:
    """Turn a slot's scores [bs, K], finite float32, into its conditional distribution."""
    # The largest score is subtracted before the division, whose divisor may be tiny.
    probs = ((scores - scores.amax(dim=1, keepdim=True)) / draw.temperature[:, None]).softmax(dim=1)
    ranked, order = probs.sort(dim=1, descending=True, stable=True)
    more_likely = ranked.cumsum(dim=1) - ranked
    position = torch.arange(scores.shape[1], device=scores.device)
    kept = (position < draw.top_k[:, None]) & (more_likely <= draw.top_p[:, None])
    kept &= (ranked >= ranked[:, :1] * draw.min_p[:, None]) | (position == 0)
    probs = torch.zeros_like(probs).scatter_(1, order, torch.where(kept, ranked, 0))
    return probs / probs.sum(dim=1, keepdim=True)
