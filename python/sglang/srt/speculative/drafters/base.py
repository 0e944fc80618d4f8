"""Interface between a drafter and the cycle around it."""

from typing import Any, Protocol

import numpy as np
import torch

from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests, Prompts


class Drafter(Protocol):
    """Drafts blocks and keeps the draft's context. The cycle around it is the worker's.

    Attributes:
        mask_token_id: token of the slots to fill.
        num_draft_rows: rows of the draft's forward per request.
        has_own_table: whether the draft reads through its own request table, which SGLang then makes.
        writes_context_apart: whether context is written without the draft's forward, which a cycle may then
            skip.
        defers_plain_cycles: whether `commit` keeps the context of cycles that verify the anchor alone, to
            write it later. Their graphs then write no context.
    """

    mask_token_id: int
    num_draft_rows: int
    has_own_table: bool
    writes_context_apart: bool
    defers_plain_cycles: bool

    def attach_pools(self, target_runner: Any) -> None:
        """Allocate what depends on the pools of both runners. Called once, when they exist."""

    def begin_prefill(self, prompts: Prompts) -> None:
        """Prepare a prefill, before the scheduler may rewrite the request table."""

    def prefill(
        self, prompts: Prompts, aux_hidden: torch.Tensor, cache_loc: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        """Write the context of prompt tokens.

        Args:
            prompts: the prefill's n tokens.
            aux_hidden: [n, num_aux * hidden], the target's captured states.
            cache_loc: [n] int64, KV slots.
            next_tokens: [bs] int64, the target's token after each request's last one.
        """

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """Take in requests that another server has prefilled. Their KV is in both pools."""

    def propose(self, cycle: Cycle, sampling_info: Any = None) -> DraftBlock:
        """Draft a block per request. A cycle of one slot drafts nothing.

        Args:
            cycle: the blocks to fill.
            sampling_info: SGLang's. If given, tokens are drawn under the requests' parameters.
        """

    def to_draft(self, rows: np.ndarray, lengths: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Choose the requests whose blocks the draft's forward runs in a cycle. [bs] bool

        Called once a cycle, and only if requests have different verify lengths.

        Args:
            rows: [bs] int64, of the request table.
            lengths: [bs], drafted or copied tokens that each verifies.
            wanted: [bs] bool, requests that verify the draft's tokens. Others may need the forward too.
        """

    def draw(
        self, hidden: torch.Tensor, anchors: torch.Tensor, sampling_info: Any
    ) -> tuple[torch.Tensor, DraftProbs]:
        """Draw tokens for the slots of blocks.

        Args:
            hidden: [bs, B - 1, hidden], the draft's final states of the slots.
            anchors: [bs] int64.
            sampling_info: SGLang's, one row per request.

        Returns:
            Tokens [bs, B - 1] int64, and the distributions they come from.
        """

    def write_context_in_graph(
        self, aux_hidden: torch.Tensor, positions: torch.Tensor, cache_loc: torch.Tensor
    ) -> None:
        """Do the part of `commit` that needs no acceptance, at the end of a verify graph.

        Args:
            aux_hidden: [n, num_aux * hidden] of whole blocks. Blocks that pad a batch come last.
            positions: [n] int64.
            cache_loc: [n] int64. Blocks that pad a batch name SGLang's padding slot.
        """

    def commit(self, cycle: Cycle, aux_hidden: torch.Tensor | None, accepted: AcceptedBlocks) -> None:
        """Write the context of verified blocks.

        Args:
            cycle: verified slots, which may be the first of a drafted block, or the anchor alone.
            aux_hidden: [T, num_aux * hidden] of the cycle's rows. The next target forward may overwrite it.
                None: the verify graph has absorbed it.
            accepted: the step's output.
        """
