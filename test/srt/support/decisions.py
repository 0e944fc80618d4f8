"""Rules that accept drafted tokens, with named results."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sglang_dflash.kernels.ops.speculative import accept
from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks, accept_blocks_torch
from sglang_dflash.srt.speculative.acceptance.rejection import accept_drawn
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks


class Decision(NamedTuple):
    """Result of a rule: accept_len [bs] int32, out_tokens [bs, B] int64, bonus [bs] int64."""

    accept_len: torch.Tensor
    out_tokens: torch.Tensor
    bonus: torch.Tensor


def decide(accept_len: torch.Tensor, out_tokens: torch.Tensor) -> Decision:
    """Name a rule's result, with the bonus token behind the accepted ones."""
    bonus = out_tokens.gather(1, accept_len.long()[:, None]).squeeze(1)
    return Decision(accept_len, out_tokens, bonus)


def rule_of(name: str) -> Callable[..., Decision]:
    """Return a rule with a named result. `name`: a key of REJECTION_RULES."""

    def run(block: Any, target_probs: Any, *args: Any, layout: VerifyLayout | None = None) -> Decision:
        """Run the rule. target_probs: [T, V], or [bs, B, V] of whole blocks without `layout`."""
        flat = target_probs.flatten(0, -2)
        return decide(*accept_drawn(name, block, flat, *args, layout or whole_blocks(*block.shape)))

    run.__name__ = name
    return run


accept_by_rejection = rule_of("standard")
accept_by_block_verification = rule_of("block")


def accept_matching_prefix(block: torch.Tensor, target_tokens: torch.Tensor) -> Decision:
    """Run the greedy rule."""
    return decide(accept.accept_matching_prefix(block, target_tokens), target_tokens)


def accepted_blocks(
    accept_len: torch.Tensor, tokens: torch.Tensor, committed: torch.Tensor | None = None
) -> AcceptedBlocks:
    """Complete blocks whose logits are sound. committed: [bs] int64, lengths before the block."""
    committed = torch.zeros(len(accept_len), dtype=torch.int64) if committed is None else committed
    return accept_blocks_torch(accept_len, tokens, torch.zeros(tokens.shape), committed, broken_token=-1)
