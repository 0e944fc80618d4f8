"""Draw drafted tokens from a draft's logits, with the exact distributions they come from."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.utils.async_probe import maybe_warn_nan

from sglang_dflash.kernels.ops.speculative.selector_walk import Draw
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.draft_probs import DraftProbs, draw_by_inverse_cdf
from sglang_dflash.srt.speculative.acceptance.target_sampling import PER_REQUEST, slices_of_rows
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.drafters.base import Drafter


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """Departure of a proposal from the draft's own distribution.

    Any setting is lossless: the acceptance rule gets the resulting probabilities.

    Attributes:
        temperature_scale: multiplies the request's temperature. Below 1 the draft prefers likely tokens.
        sampled_slots: slots that are drawn, from the first on. Deeper slots take the argmax. None: all.
        candidates: tokens considered per slot, the likeliest. They are stored for verification.
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
        """Read the options. Raises ValueError naming a variable that cannot be used."""
        return cls(DFlashOptions.DRAFT_TEMPERATURE_SCALE.get(), DFlashOptions.DRAFT_SAMPLED_SLOTS.get())


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
    """Build a draw over `num_slots` slots by each request's parameters."""
    info, temperature = sampling_info, sampling_info.temperatures.squeeze(1) * sampling.temperature_scale
    uniforms = torch.rand(temperature.shape[0], num_slots, device=temperature.device)
    slots = num_slots if sampling.sampled_slots is None else sampling.sampled_slots
    return Draw(temperature, info.top_ks, info.top_ps, info.min_ps, uniforms, slots)


def draw_drafts(
    model: Any, hidden: torch.Tensor, sampling_info: Any, sampling: DraftSampling
) -> tuple[torch.Tensor, DraftProbs]:
    """Run `choose_tokens` on the drafting rows of a model, hidden [bs, B - 1, hidden]."""
    rows = hidden.flatten(0, 1)
    temperature = sampling_info.temperatures.squeeze(1).repeat_interleave(hidden.shape[1])
    # Logits of some rows at a time: all rows take 0.4 GB at bs 48, B 16 and V = 152k, in each of four forms.
    parts = [
        likeliest(model.logits(rows[some]), temperature[some], sampling)
        for some in slices_of_rows(rows.shape[0], model.draft.draft_vocab_size)
    ]
    ids, probs = (torch.cat(part) for part in zip(*parts, strict=True))
    uniforms = torch.rand(hidden.shape[:2], device=hidden.device)
    return choose_tokens(
        ids, probs, sampling_info.top_ks, sampling_info.top_ps, uniforms, sampling, model.d2t
    )


def draft_subset(
    drafter: Drafter,
    cycle: Cycle,
    on_host: np.ndarray,
    drafted: torch.Tensor | None,
    verify_len: int,
    sampling_info: Any,
    target_runner: Any,
) -> DraftBlock:
    """Fill the first `verify_len` slots of some blocks; the others repeat their anchor.

    The draft's forward takes whole blocks of the chosen requests and nothing of the others.

    Args:
        drafter: fills blocks.
        cycle: all requests of the batch, whole blocks.
        on_host: [m] int64, requests to draft for.
        drafted: the same on the device. None: they are all requests or none.
        verify_len: slots of the result, a block at most.
        sampling_info: SGLang's, for all requests. If given, tokens are drawn.
        target_runner: plans the slots of the chosen requests.
    """
    if len(on_host) == cycle.bs:
        return drafter.propose(cycle, sampling_info if verify_len > 1 else None).narrowed(verify_len)
    tokens = cycle.tokens[:, :1].repeat(1, verify_len)
    if not len(on_host):
        return DraftBlock(tokens)
    assert drafted is not None
    if sampling_info is not None and verify_len > 1:
        per_request = {name: getattr(sampling_info, name)[drafted] for name in PER_REQUEST}
        sampling_info = dataclasses.replace(sampling_info, **per_request)
    else:
        sampling_info = None
    cycle = cycle.of_requests(on_host, drafted, target_runner)
    block = drafter.propose(cycle, sampling_info).narrowed(verify_len)
    probs = block.probs
    tokens[drafted] = block.tokens
    if probs is not None:
        # A token that was not drawn has probability 1.
        ids = tokens[:, 1:, None].repeat(1, 1, probs.ids.shape[2])
        certain = torch.zeros_like(ids, dtype=probs.probs.dtype)
        certain[..., 0] = 1.0
        ids[drafted], certain[drafted] = probs.ids, probs.probs
        probs = DraftProbs(ids, certain)
    return DraftBlock(tokens, probs)
