"""DFlash2's candidate selector: one coherent path through the candidates of a block's slots.

Format: z-lab/dflash, `DFlash2DraftModel`. A slot's K candidates are the largest of the draft's base logits.
After the token p, candidate c of slot e scores unary[e, c] + <A[p] * gate[e], B[c]>, where A and B are the
codebooks and gate[e] a projection of the slot's hidden state; the token before slot 0 is the anchor. A walk
takes the best, or draws from softmax(scores / temperature) over the K candidates, given the token it has just
taken. The latter is the distribution that the verify is told of: conditional on the drafted prefix, and
exact.

Pure functions; every random number is passed in. Shapes: bs requests, S drafted slots, K candidates, rank r.
"""

from dataclasses import dataclass

import torch

from sglang_dflash.kernels.ops.speculative.selector_walk import walk_triton
from sglang_dflash.srt.layers.draft_probs import DraftProbs, draw_by_inverse_cdf


@dataclass(frozen=True, slots=True)
class Candidates:
    """ids: [bs, S, K] int64, distinct in a slot. unary: [bs, S, K] float32, their base logits. gate: [bs, S,
    r]."""

    ids: torch.Tensor
    unary: torch.Tensor
    gate: torch.Tensor


@dataclass(frozen=True, slots=True)
class Draw:
    """How a walk draws. temperature, top_p, min_p: [bs] float; top_k: [bs] int, 1 takes the best, as SGLang
    has greedy requests. uniforms: [bs, S] in [0, 1). slots: only the first so many are drawn, later ones take
    the best.

    The filters are joint and look at the distribution over the K candidates at the request's temperature.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniforms: torch.Tensor
    slots: int

    @classmethod
    def for_requests(
        cls, sampling_info, num_slots: int, temperature_scale: float = 1.0, sampled_slots: int | None = None
    ) -> "Draw":
        """Build a draw under each request's own parameters, with fresh uniforms."""
        temperature = sampling_info.temperatures.squeeze(1) * temperature_scale
        return cls(
            temperature=temperature,
            top_k=sampling_info.top_ks,
            top_p=sampling_info.top_ps,
            min_p=sampling_info.min_ps,
            uniforms=torch.rand(temperature.shape[0], num_slots, device=temperature.device),
            slots=num_slots if sampled_slots is None else sampled_slots,
        )


def walk(
    candidates: Candidates,
    anchors: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    draw: Draw | None = None,
) -> tuple[torch.Tensor, DraftProbs | None]:
    """Tokens [bs, S] int64 and, where they are drawn, what from.

    anchors: [bs] int64, the token before each block. Codebooks: [vocab, r], rows by token id.

    NaN counts as the lowest score, infinity as the highest finite one: such a draft costs acceptance and
    nothing else, as it is verified with the probabilities it was then drawn from."""
    arguments = (
        candidates.ids,
        candidates.unary,
        candidates.gate,
        anchors,
        predecessor_codebook,
        successor_codebook,
    )
    if candidates.ids.is_cuda:
        drawing = (
            None if draw is None else (draw.temperature, draw.top_k, draw.top_p, draw.min_p, draw.uniforms)
        )
        tokens, probs = walk_triton(*arguments, drawing, 0 if draw is None else draw.slots)
    else:
        tokens, probs = walk_torch(*arguments, draw)
    return tokens, None if probs is None else DraftProbs(candidates.ids, probs)


def walk_torch(
    ids: torch.Tensor,
    unary: torch.Tensor,
    gate: torch.Tensor,
    anchors: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    draw: Draw | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The twin of `walk_triton`: tokens, and probabilities [bs, S, K] float32 or None."""
    keys = successor_codebook[ids].float()
    gate, unary = gate.float(), unary.float()
    previous, tokens, probs = anchors, [], []
    for slot in range(ids.shape[1]):
        query = predecessor_codebook[previous].float() * gate[:, slot]
        scores = unary[:, slot] + torch.bmm(keys[:, slot], query[..., None]).squeeze(2)
        scores = scores.nan_to_num(nan=-1e30).clamp(-1e30, 1e30)
        if draw is None:
            chosen = scores.argmax(dim=1)
        else:
            probs.append(slot_probs(scores, draw, is_drawn=slot < draw.slots))
            chosen = draw_by_inverse_cdf(probs[-1], draw.uniforms[:, slot])
        previous = ids[:, slot].gather(1, chosen[:, None]).squeeze(1)
        tokens.append(previous)
    return torch.stack(tokens, dim=1), torch.stack(probs, dim=1) if probs else None


def slot_probs(scores: torch.Tensor, draw: Draw, is_drawn: bool) -> torch.Tensor:
    """What a slot is drawn from, given what is before it: scores [bs, K] float32, finite -> [bs, K]."""
    # The best is taken off before the division, which may be by next to nothing.
    probs = ((scores - scores.amax(dim=1, keepdim=True)) / draw.temperature[:, None]).softmax(dim=1)
    ranked, order = probs.sort(dim=1, descending=True, stable=True)
    more_likely = ranked.cumsum(dim=1) - ranked
    position = torch.arange(scores.shape[1], device=scores.device)
    top_k = draw.top_k[:, None] if is_drawn else 1
    kept = (position < top_k) & (more_likely <= draw.top_p[:, None])
    kept &= (ranked >= ranked[:, :1] * draw.min_p[:, None]) | (position == 0)
    probs = torch.zeros_like(probs).scatter_(1, order, torch.where(kept, ranked, 0))
    return probs / probs.sum(dim=1, keepdim=True)
