"""Strict thinking of plain SGLang on a CPU, which applies its masks on other devices alone."""

from typing import Any


def apply_masks_on_cpu(scheduler: Any) -> None:
    """Apply the masks of thoughts as those of grammars are; `scheduled.run` calls this."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
    from xgrammar import apply_token_bitmask_inplace

    def apply(logits, vocab_mask):
        apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")

    XGrammarGrammarBackend.apply_vocab_mask = staticmethod(apply)
