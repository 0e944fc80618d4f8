"""Drafters: how a block is proposed, and what a drafter keeps of a verified one."""

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.acceptance.greedy import Verdict
from sglang_dflash.srt.speculative.dflash_info import Cycle, Prompts
from sglang_dflash.srt.speculative.scale_out.disaggregation import Arrival


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """tokens: [bs, B] int64, in target vocabulary. Column 0 is the bonus token of the previous cycle (the
    anchor). probs: what columns 1.. were drawn from; None where they are the draft's argmax."""

    tokens: torch.Tensor
    probs: DraftProbs | None = None

    def narrowed(self, width: int) -> "DraftBlock":
        """The first `width` slots. Lossless as long as `width` was settled without looking at the drafted
        tokens."""
        if width == self.tokens.shape[1]:
            return self
        probs = self.probs
        if probs is not None:
            drafted = slice(0, width - 1)
            probs = DraftProbs(probs.ids[:, drafted].contiguous(), probs.probs[:, drafted].contiguous())
        return DraftBlock(self.tokens[:, :width].contiguous(), probs)


class Drafter(Protocol):
    """What differs between speculative algorithms of this family. The cycle around it is the worker's."""

    mask_token_id: int
    # Rows of the draft's block per request.
    block_width: int
    # Whether the draft reads through a request table of its own, which SGLang then makes.
    has_own_table: bool
    # Whether a verified block's context is written without the draft's forward, so that a cycle may leave
    # that out.
    writes_context_apart: bool

    def attach_pools(self, target_runner) -> None:
        """Called once, when the pools of both runners exist."""

    def begin_prefill(self, prompts: Prompts) -> None:
        """Called before the target's forward, after which the request table may be written for the next
        step."""

    def prefill(
        self, prompts: Prompts, aux_hidden: torch.Tensor, cache_loc: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        """Take in prompt tokens. aux_hidden: [n, num_aux * hidden]; cache_loc: [n] int64; next_tokens: [bs]
        int64, the target's token after each request's last one."""

    def join(self, arrival: Arrival) -> None:
        """Take in requests that another server has prefilled; their KV is in both pools."""

    def propose(self, cycle: Cycle, sampling_info=None) -> DraftBlock:
        """Draft a block per request: by argmax, or drawn under the requests' own sampling parameters where
        given. A cycle of width 1 drafts nothing."""

    def absorb(self, aux_hidden: torch.Tensor, positions: torch.Tensor, cache_loc: torch.Tensor) -> None:
        """What `commit` does with the target's states that does not depend on what was accepted, for a verify
        graph to end with. aux_hidden: [n, num_aux * hidden], positions, cache_loc: [n] int64, of whole
        blocks; those that pad a batch come last, in SGLang's padding slot."""

    def commit(self, cycle: Cycle, aux_hidden: torch.Tensor | None, verdict: Verdict) -> None:
        """Take in what was verified: of B slots, which may be the first of those drafted, or the anchor
        alone. aux_hidden: [bs * B, num_aux * hidden], row 0 of a block its anchor's. Valid in this step only:
        the next target forward may overwrite it. None where the verify graph had it absorbed."""
