"""What a request asks of the target's logits beside sampling: penalties, logit bias, its grammar."""

from typing import Any

import torch
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_dflash.srt.speculative.acceptance.penalties import Penalties


def constrain(
    batch: Any,
    block: torch.Tensor,
    logits: torch.Tensor,
    penalties: Penalties,
    grammar_tree: GrammarTree | None,
    grammar_barrier: Any,
) -> None:
    """Put each request's penalties, logit bias and grammar on the verify logits, [bs * B, vocab], in place.

    block: [bs, B] int64, the drafted chains. grammar_tree: the same, on their way to the host; None where no
    request has a grammar."""
    info = batch.sampling_info
    if Penalties.are_asked_for(info):
        penalties.penalize_block(batch, block, logits)
    if info.logit_bias is not None:
        logits.view(*block.shape, -1).add_(info.logit_bias[:, None])
    if grammar_tree is not None:
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=grammar_tree,
            sampling_info=info,
            device=logits.device,
            barrier=grammar_barrier,
        )
        if mask is not None:
            mask.apply(logits)
