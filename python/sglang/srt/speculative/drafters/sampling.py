"""How drafted tokens are drawn from a draft's logits, and from which distributions exactly."""

import os
from dataclasses import dataclass

import torch
from sglang.srt.utils.async_probe import maybe_warn_nan

from sglang_dflash.srt.layers.candidate_selector import Draw
from sglang_dflash.srt.layers.draft_probs import DraftProbs, draw_by_inverse_cdf
from sglang_dflash.srt.speculative.acceptance.target_sampling import slices_of_rows

TEMPERATURE_SCALE_VARIABLE = "SGLANG_DFLASH_DRAFT_TEMPERATURE_SCALE"
SAMPLED_SLOTS_VARIABLE = "SGLANG_DFLASH_DRAFT_SAMPLED_SLOTS"


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """How a proposal departs from the draft's own distribution. Any setting is lossless: the probabilities
    that reach the acceptance rule are the ones after all of this.

    temperature_scale: multiplies the request's temperature; below 1 the draft says its favourites more often.
    sampled_slots: only the first so many slots are drawn, deeper ones take the argmax. None: all are drawn.
    candidates: at most so many tokens per slot, the likeliest, are considered; they are kept for the verify.
    """

    temperature_scale: float = 1.0
    sampled_slots: int | None = None
    candidates: int = 128

    def __post_init__(self):
        if not self.temperature_scale > 0:
            raise ValueError(f"temperature_scale must be positive, got {self.temperature_scale}.")
        if self.sampled_slots is not None and self.sampled_slots < 0:
            raise ValueError(f"sampled_slots must not be negative, got {self.sampled_slots}.")
        if self.candidates < 1:
            raise ValueError(f"candidates must be at least 1, got {self.candidates}.")

    @classmethod
    def from_environment(cls) -> "DraftSampling":
        """As the variables say; the defaults where they say nothing. Raises ValueError for what is no such
        number."""
        given = {}
        if value := os.environ.get(TEMPERATURE_SCALE_VARIABLE):
            given["temperature_scale"] = float(value)
        if value := os.environ.get(SAMPLED_SLOTS_VARIABLE):
            given["sampled_slots"] = int(value)
        return cls(**given)


def likeliest(
    logits: torch.Tensor, temperature: torch.Tensor, sampling: DraftSampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidates of n slots, most likely first, and their probabilities before any filter: [n, C] int64
    and float32.

    logits: [n, V_draft] float. temperature: [n] float.
    """
    maybe_warn_nan(logits, "DFLASH draft logits")
    # Finite at any temperature.
    scaled = logits.float().nan_to_num(nan=-1e30, posinf=1e30, neginf=-1e30)
    scaled /= (temperature * sampling.temperature_scale)[:, None]
    best, ids = scaled.topk(min(sampling.candidates, logits.shape[-1]), dim=-1)
    return ids, (best - scaled.logsumexp(dim=-1, keepdim=True)).exp()


def choose_tokens(
    ids: torch.Tensor,
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniforms: torch.Tensor,
    sampling: DraftSampling,
    d2t: torch.Tensor | None = None,
) -> tuple[torch.Tensor, DraftProbs]:
    """One token per drafted slot: ([bs, B - 1] int64 target token ids, the distributions they come from).

    ids, probs: [bs * (B - 1), C], every slot's candidates, as `likeliest` returns them.
    top_p: [bs] float, top_k: [bs] int, as SGLang has them: a greedy request has top_k 1 (it drafts the
        argmax, one-hot); top_k may exceed the vocabulary. The filters are joint, as in SGLang's sampler:
        top_p looks at probabilities of the unfiltered softmax.
    uniforms: [bs, B - 1] in [0, 1).
    d2t: [V_draft] int64, target token id minus draft token id; None where the vocabularies are one.

    NaN and infinite logits are finite ones in `likeliest` (SGLang warns of NaN on CUDA, once). Verified with
    the probabilities of what the slot was then drawn from, such a draft costs acceptance and nothing else.
    """
    bs, slots = uniforms.shape
    ids, probs = (of_slots.view(bs, slots, of_slots.shape[-1]) for of_slots in (ids, probs))
    if sampling.sampled_slots is None:
        top_k = top_k[:, None]
    else:
        is_drawn = torch.arange(slots, device=ids.device) < sampling.sampled_slots
        top_k = torch.where(is_drawn, top_k[:, None], 1)
    more_likely = probs.cumsum(dim=-1) - probs
    rank = torch.arange(ids.shape[2], device=ids.device)
    probs = torch.where((rank < top_k[..., None]) & (more_likely <= top_p[:, None, None]), probs, 0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    if d2t is not None:
        ids = ids + d2t[ids]
    chosen = draw_by_inverse_cdf(probs.flatten(0, 1), uniforms.flatten()).view(uniforms.shape)
    return ids.gather(2, chosen[..., None]).squeeze(2), DraftProbs(ids, probs)


def selector_draw(sampling_info, sampling: DraftSampling, num_slots: int) -> Draw:
    """Build the draw of a candidate selector's walk over `num_slots` slots."""
    return Draw.for_requests(sampling_info, num_slots, sampling.temperature_scale, sampling.sampled_slots)


def draw_drafts(
    model, hidden: torch.Tensor, sampling_info, sampling: DraftSampling
) -> tuple[torch.Tensor, DraftProbs]:
    """`choose_tokens` of a draft model's rows that draft, hidden [bs, B - 1, hidden], under each request's
    parameters."""
    rows = hidden.flatten(0, 1)
    temperature = sampling_info.temperatures.squeeze(1).repeat_interleave(hidden.shape[1])
    # Logits of some rows at a time: those of all are 0.4 GB at bs 48, B 16 and V = 152k, in each of four
    # forms.
    parts = [
        likeliest(model.logits(rows[some]), temperature[some], sampling)
        for some in slices_of_rows(rows.shape[0], model.draft.draft_vocab_size)
    ]
    ids, probs = (torch.cat(part) for part in zip(*parts, strict=True))
    uniforms = torch.rand(hidden.shape[:2], device=hidden.device)
    return choose_tokens(
        ids, probs, sampling_info.top_ks, sampling_info.top_ps, uniforms, sampling, model.d2t
    )
