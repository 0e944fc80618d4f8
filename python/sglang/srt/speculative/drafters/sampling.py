"""Draw drafted tokens from a draft's logits, with the exact distributions they come from."""

from typing import Any

import torch
from sglang.srt.utils.async_probe import maybe_warn_nan

from sglang_dflash.kernels.ops.speculative.selector_walk import DrawInputs
from sglang_dflash.srt.layers.draft_probs import DraftProbs, draw_by_inverse_cdf
from sglang_dflash.srt.speculative.acceptance.target_sampling import slices_of_rows
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout

CANDIDATES = 128  # tokens considered per slot, the likeliest, stored for verification


def top_candidates(
    logits: torch.Tensor, temperature: torch.Tensor, candidates: int = CANDIDATES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the candidates of n slots and their probabilities, most likely first.

    Args:
        logits: [n, V_draft] float.
        temperature: [n] float.
        candidates: C, or the whole vocabulary if it is smaller.

    Returns:
        Ids [n, C] int64 and probabilities [n, C] float32.
    """
    maybe_warn_nan(logits, "DFLASH draft logits")
    # Finite at any temperature.
    scaled = logits.float().nan_to_num(nan=-1e30, posinf=1e30, neginf=-1e30)
    scaled /= temperature[:, None]
    largest, ids = scaled.topk(min(candidates, logits.shape[-1]), dim=-1)
    return ids, (largest - scaled.logsumexp(dim=-1, keepdim=True)).exp()


def choose_tokens(
    ids: torch.Tensor,
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniforms: torch.Tensor,
    d2t: torch.Tensor | None = None,
) -> tuple[torch.Tensor, DraftProbs]:
    """Draw one token per drafted slot.

    `top_candidates` makes NaN and infinite logits finite (SGLang warns of NaN on CUDA, once). Such a draft is
    verified with the probabilities it was then drawn from, so it costs acceptance and nothing else.

    Args:
        ids: [bs * (B - 1), C] int64, candidates as `top_candidates` returns them.
        probs: [bs * (B - 1), C] float32, their probabilities.
        top_k: [bs] int. A greedy request has 1 and drafts the argmax, one-hot. May exceed the vocabulary.
        top_p: [bs] float. As in SGLang's sampler the filters are joint: it looks at the unfiltered softmax.
        uniforms: [bs, B - 1] in [0, 1).
        d2t: [V_draft] int64, target token id minus draft token id. None: the vocabularies are one.

    Returns:
        Target token ids [bs, B - 1] int64, and the distributions they come from.
    """
    bs, slots = uniforms.shape
    ids, probs = (values.view(bs, slots, values.shape[-1]) for values in (ids, probs))
    more_likely = probs.cumsum(dim=-1) - probs
    rank = torch.arange(ids.shape[2], device=ids.device)
    probs = torch.where((rank < top_k[:, None, None]) & (more_likely <= top_p[:, None, None]), probs, 0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    if d2t is not None:
        ids = ids + d2t[ids]
    chosen = draw_by_inverse_cdf(probs.flatten(0, 1), uniforms.flatten()).view(uniforms.shape)
    return ids.gather(2, chosen[..., None]).squeeze(2), DraftProbs(ids, probs)


def selector_draw(sampling_info: Any, num_slots: int) -> DrawInputs:
    """Build a draw over `num_slots` slots by each request's parameters."""
    temperature = sampling_info.temperatures.squeeze(1)
    uniforms = torch.rand(temperature.shape[0], num_slots, device=temperature.device)
    return DrawInputs(
        temperature=temperature,
        top_k=sampling_info.top_ks,
        top_p=sampling_info.top_ps,
        min_p=sampling_info.min_ps,
        uniforms=uniforms,
    )


def draw_drafts(
    model: Any, rows: torch.Tensor, slots: VerifyLayout, sampling_info: Any
) -> tuple[torch.Tensor, DraftProbs]:
    """Draw from a model's rows [T, hidden] of drafted slots, by `choose_tokens`."""
    temperature = slots.repeat(sampling_info.temperatures.squeeze(1))
    # Logits of some rows at a time: all rows take 0.4 GB at bs 48, B 16 and V = 152k, in each of four forms.
    parts = [
        top_candidates(model.logits(rows[some]), temperature[some])
        for some in slices_of_rows(rows.shape[0], model.draft.draft_vocab_size)
    ]
    ids, probs = (slots.to_blocks(torch.cat(part)).flatten(0, 1) for part in zip(*parts, strict=True))
    uniforms = torch.rand(slots.shape, device=rows.device)
    return choose_tokens(
        ids,
        probs=probs,
        top_k=sampling_info.top_ks,
        top_p=sampling_info.top_ps,
        uniforms=uniforms,
        d2t=model.d2t,
    )
