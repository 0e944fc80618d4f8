"""Draw drafted tokens from a draft's logits, with the exact distributions they come from."""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.utils.async_probe import maybe_warn_nan

from sglang_dflash.kernels.ops.speculative.selector_walk import Draw
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.draft_probs import DraftProbs, draw_by_inverse_cdf
from sglang_dflash.srt.speculative.acceptance.target_sampling import slices_of_rows
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout

ALL_SLOTS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """Departure of a proposal from the draft's own distribution.

    Any setting is lossless: the acceptance rule gets the resulting probabilities.
    """

    # Multiplies the request's temperature. Below 1 the draft prefers likely tokens.
    temperature_scale: float = 1.0
    sampled_slots: int = ALL_SLOTS  # that are drawn, from the first on. Deeper slots take the argmax
    candidates: int = 128  # tokens considered per slot, the likeliest, stored for verification

    def __post_init__(self):
        if not self.temperature_scale > 0:
            raise ValueError(f"temperature_scale must be positive, got {self.temperature_scale}.")
        if self.sampled_slots < 0:
            raise ValueError(f"sampled_slots must not be negative, got {self.sampled_slots}.")

    @classmethod
    def from_environment(cls) -> "DraftSampling":
        """Read the options. Raises ValueError naming a variable that cannot be used."""
        slots = DFlashOptions.DRAFT_SAMPLED_SLOTS.get()
        return cls(DFlashOptions.DRAFT_TEMPERATURE_SCALE.get(), ALL_SLOTS if slots is None else slots)


def likeliest(
    logits: torch.Tensor, temperature: torch.Tensor, sampling: DraftSampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the candidates of n slots and their probabilities, most likely first.

    Args:
        logits: [n, V_draft] float.
        temperature: [n] float.
        sampling: scales the temperature and bounds the candidates.

    Returns:
        Ids [n, C] int64 and probabilities [n, C] float32.
    """
    maybe_warn_nan(logits, "DFLASH draft logits")
    # Finite at any temperature.
    scaled = logits.float().nan_to_num(nan=-1e30, posinf=1e30, neginf=-1e30)
    scaled /= (temperature * sampling.temperature_scale)[:, None]
    largest, ids = scaled.topk(min(sampling.candidates, logits.shape[-1]), dim=-1)
    return ids, (largest - scaled.logsumexp(dim=-1, keepdim=True)).exp()


def choose_tokens(
    ids: torch.Tensor,
    probs: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniforms: torch.Tensor,
    sampling: DraftSampling,
    d2t: torch.Tensor | None = None,
) -> tuple[torch.Tensor, DraftProbs]:
    """Draw one token per drafted slot.

    `likeliest` makes NaN and infinite logits finite (SGLang warns of NaN on CUDA, once). Such a draft is
    verified with the probabilities it was then drawn from, so it costs acceptance and nothing else.

    Args:
        ids: [bs * (B - 1), C] int64, candidates as `likeliest` returns them.
        probs: [bs * (B - 1), C] float32, their probabilities.
        top_k: [bs] int. A greedy request has 1 and drafts the argmax, one-hot. May exceed the vocabulary.
        top_p: [bs] float. As in SGLang's sampler the filters are joint: it looks at the unfiltered softmax.
        uniforms: [bs, B - 1] in [0, 1).
        sampling: says which slots are drawn.
        d2t: [V_draft] int64, target token id minus draft token id. None: the vocabularies are one.

    Returns:
        Target token ids [bs, B - 1] int64, and the distributions they come from.
    """
    bs, slots = uniforms.shape
    ids, probs = (values.view(bs, slots, values.shape[-1]) for values in (ids, probs))
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
    """Build a draw over `num_slots` slots by each request's parameters."""
    info, temperature = sampling_info, sampling_info.temperatures.squeeze(1) * sampling.temperature_scale
    uniforms = torch.rand(temperature.shape[0], num_slots, device=temperature.device)
    return Draw(temperature, info.top_ks, info.top_ps, info.min_ps, uniforms, sampling.sampled_slots)


def draw_drafts(
    model: Any, rows: torch.Tensor, slots: VerifyLayout, sampling_info: Any, sampling: DraftSampling
) -> tuple[torch.Tensor, DraftProbs]:
    """Draw from a model's rows [T, hidden] of drafted slots, by `choose_tokens`."""
    temperature = slots.repeat(sampling_info.temperatures.squeeze(1))
    # Logits of some rows at a time: all rows take 0.4 GB at bs 48, B 16 and V = 152k, in each of four forms.
    parts = [
        likeliest(model.logits(rows[some]), temperature[some], sampling)
        for some in slices_of_rows(rows.shape[0], model.draft.draft_vocab_size)
    ]
    ids, probs = (slots.unpack(torch.cat(part)).flatten(0, 1) for part in zip(*parts, strict=True))
    uniforms = torch.rand(slots.shape, device=rows.device)
    return choose_tokens(
        ids, probs, sampling_info.top_ks, sampling_info.top_ps, uniforms, sampling, model.d2t
    )
