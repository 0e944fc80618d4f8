"""The temporary memory of probabilistic drafting, taken once at start-up."""

from types import SimpleNamespace

import torch

from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.models.dflash2 import DFlash2DraftModel
from sglang_dflash.srt.speculative.acceptance.rejection import draw_final_tokens
from sglang_dflash.srt.speculative.acceptance.target_sampling import slices_of_rows, target_probs
from sglang_dflash.srt.speculative.drafters.sampling import DraftSampling, draw_drafts, selector_draw


@torch.no_grad()
def prewarm_probabilistic_step(
    model, hidden_size: int, bs: int, width: int, vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Run what a step of bs sampled requests with blocks of `width` runs beside the two models, on zeros,
    with every filter: its memory then belongs to PyTorch's allocator, and what is too much for the GPU fails
    now and not under load.

    model: the draft. hidden_size, dtype: of its hidden states. The verify logits are not part of it: they are
    there anyway."""
    info = SimpleNamespace(
        temperatures=torch.ones(bs, 1, device=device),
        top_ps=torch.full((bs,), 0.9, device=device),
        top_ks=torch.full((bs,), 50, dtype=torch.int32, device=device),
        min_ps=torch.zeros(bs, device=device),
        sampling_seed=None,
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
        max_top_k=None,
    )
    hidden = torch.zeros(bs, width - 1, hidden_size, dtype=dtype, device=device)
    sampling = DraftSampling.from_environment()
    if isinstance(model, DFlash2DraftModel):
        anchors = torch.zeros(bs, dtype=torch.int64, device=device)
        draw = selector_draw(info, sampling, width - 1)
        drafted, draft = model.candidate_selector.walk(model.candidates(hidden), anchors, draw)
    else:
        drafted, draft = draw_drafts(model, hidden, info, sampling)
    # As many requests as one slice of logits holds stand for all of them.
    at_once = min(bs, -(-slices_of_rows(bs * width, vocab_size)[0].stop // width))
    some = SimpleNamespace(
        **{name: value[:at_once] if torch.is_tensor(value) else value for name, value in vars(info).items()}
    )
    target_probs(torch.zeros(at_once * width, vocab_size, device=device), some, width)
    _final_tokens(drafted, draft, vocab_size)


def _final_tokens(drafted: torch.Tensor, draft: DraftProbs, vocab_size: int) -> None:
    bs, slots = drafted.shape
    block = torch.cat((drafted[:, :1], drafted), dim=1)
    # Every row is the same memory; what is drawn from takes its own.
    target = torch.zeros(1, 1, vocab_size, device=drafted.device).expand(bs, slots + 1, -1)
    accept_len = torch.zeros(bs, dtype=torch.int32, device=drafted.device)
    uniforms = torch.zeros(bs, device=drafted.device)
    draw_final_tokens(
        block, accept_len, target, torch.ones_like(uniforms, dtype=torch.float64), draft, uniforms
    )
