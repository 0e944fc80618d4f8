"""Draft for some requests of a batch."""

import dataclasses
from typing import Any

import numpy as np
import torch

from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.dflash_info import Cycle, DraftBlock
from sglang_dflash.srt.speculative.drafters.base import Drafter

# Fields of SamplingBatchInfo that drafting reads.
_PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps")


def draft_for_some(
    drafter: Drafter,
    cycle: Cycle,
    on_host: np.ndarray,
    chosen: torch.Tensor,
    width: int,
    sampling_info: Any,
    target_runner: Any,
) -> DraftBlock:
    """Fill the first `width` slots of some blocks; the others repeat their anchor.

    The draft's forward takes whole blocks of the chosen requests and nothing of the others.

    Args:
        drafter: fills blocks.
        cycle: all requests of the batch, whole blocks.
        on_host: [m] int64, requests to draft for.
        chosen: the same on the device.
        width: slots of the result, a block at most.
        sampling_info: SGLang's, for all requests. If given, tokens are drawn.
        target_runner: plans the slots of the chosen requests.
    """
    if len(on_host) == cycle.bs:
        return drafter.propose(cycle, sampling_info if width > 1 else None).narrowed(width)
    tokens = cycle.tokens[:, :1].repeat(1, width)
    if not len(on_host):
        return DraftBlock(tokens)
    if sampling_info is not None and width > 1:
        some = {name: getattr(sampling_info, name)[chosen] for name in _PER_REQUEST}
        sampling_info = dataclasses.replace(sampling_info, **some)
    else:
        sampling_info = None
    cycle = cycle.of_requests(on_host, chosen, target_runner)
    block = drafter.propose(cycle, sampling_info).narrowed(width)
    probs = block.probs
    tokens[chosen] = block.tokens
    if probs is not None:
        # What nobody drew has probability 1.
        ids = tokens[:, 1:, None].repeat(1, 1, probs.ids.shape[2])
        certain = torch.zeros_like(ids, dtype=probs.probs.dtype)
        certain[..., 0] = 1.0
        ids[chosen], certain[chosen] = probs.ids, probs.probs
        probs = DraftProbs(ids, certain)
    return DraftBlock(tokens, probs)
