"""Apply penalties, logit bias, grammars and custom logit processors to logits."""

from typing import Any

import torch
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_dflash.srt.speculative.acceptance.penalties import Penalties
from sglang_dflash.srt.speculative.acceptance.processors import apply_processors


def constrain(
    batch: Any,
    block: torch.Tensor,
    logits: torch.Tensor,
    penalties: Penalties,
    chains: GrammarTree | None,
    grammar_barrier: Any,
) -> None:
    """Apply all that shapes a request's logits to the verify logits, in place.

    Custom logit processors come last, as in plain SGLang.

    Args:
        batch: the scheduler's.
        block: [bs, B] int64, the drafted chains.
        logits: [bs * B, vocab].
        penalties: counts of emitted tokens.
        chains: the blocks on their way to the host. None: nothing reads them there.
        grammar_barrier: SGLang's, waits until the grammars are up to date.
    """
    info = batch.sampling_info
    if Penalties.are_requested(info):
        penalties.penalize_block(batch, block, logits)
    if info.logit_bias is not None:
        logits.view(*block.shape, -1).add_(info.logit_bias[:, None])
    if batch.has_grammar:
        assert chains is not None
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=chains,
            sampling_info=info,
            device=logits.device,
            barrier=grammar_barrier,
        )
        if mask is not None:
            mask.apply(logits)
    if info.has_custom_logit_processor:
        blocks = None if chains is None else chains.resolve()[-1]
        apply_processors(batch, logits.view(*block.shape, -1), blocks)
