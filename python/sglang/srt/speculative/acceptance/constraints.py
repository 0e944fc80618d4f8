"""Apply penalties, logit bias, grammars and custom logit processors to logits."""

from typing import Any

import torch
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_dflash.srt.speculative.acceptance.penalties import Penalties
from sglang_dflash.srt.speculative.acceptance.processors import apply_processors
from sglang_dflash.srt.speculative.cycle.verify_rows import VerifyRows


def constrain(
    batch: Any,
    block: torch.Tensor,
    logits: torch.Tensor,
    penalties: Penalties,
    chains: GrammarTree | None,
    grammar_barrier: Any,
    rows: VerifyRows | None = None,
) -> None:
    """Apply all that shapes a request's logits to the verify logits, in place.

    Custom logit processors come last, as in plain SGLang.

    Args:
        batch: the scheduler's.
        block: [bs, B] int64, the drafted chains.
        logits: [T, vocab] of the verified rows.
        penalties: counts of emitted tokens.
        chains: the blocks on their way to the host. None: nothing reads them there.
        grammar_barrier: SGLang's, waits until the grammars are up to date.
        rows: verified slots. None: all of them. With custom logit processors, all requests verify as many.
    """
    rows = rows or VerifyRows(*block.shape)
    info = batch.sampling_info
    if Penalties.are_requested(info):
        penalties.penalize_block(batch, block, logits, rows)
    if info.logit_bias is not None:
        if rows.slots is None:
            logits.view(*block.shape, -1).add_(info.logit_bias[:, None])
        else:
            logits.add_(rows.repeat(info.logit_bias))
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
            if rows.index is not None:
                mask = mask._replace(vocab_mask=mask.vocab_mask[rows.index])
            mask.apply(logits)
    if info.has_custom_logit_processor:
        blocks = None if chains is None else chains.resolve()[-1]
        apply_processors(batch, logits.view(*block.shape, -1), blocks)
