"""Base class of drafters, their part in the verify graphs, and drafting for some requests."""

import abc
import weakref
from typing import Any

import numpy as np
import torch

from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, drafted_slots, whole_blocks
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests, Prompts
from sglang_dflash.srt.speculative.drafters.sampling import draw_drafts


class Drafter(abc.ABC):
    """Drafts blocks and keeps the draft's context. The cycle around it is the worker's.

    It drives the draft model through a separate SGLang model runner.

    Args:
        draft_runner: the draft's model runner.
        target_model: lends its embeddings and its head.
        block_size: B.

    Attributes:
        mask_token_id: token of the slots to fill.
        num_draft_rows: rows of the draft's forward per request.
        has_own_table: whether the draft reads through its own request table, which SGLang then makes.
        writes_context_apart: whether context is written without the draft's forward, which a cycle may then
            skip.
    """

    num_draft_rows: int
    has_own_table: bool
    writes_context_apart: bool

    def __init__(self, draft_runner: Any, target_model: Any, block_size: int):
        self._runner, self._model, self._block_size = draft_runner, draft_runner.model, block_size
        self.mask_token_id = self._model.mask_token_id
        self._model.borrow_from_target(target_model.get_input_embeddings(), target_model.lm_head)

    @abc.abstractmethod
    def attach_pools(self, target_runner: Any) -> None:
        """Allocate what depends on the pools of both runners. Called once, when they exist."""

    @abc.abstractmethod
    def begin_prefill(self, prompts: Prompts) -> None:
        """Prepare a prefill, before the scheduler may rewrite the request table."""

    @abc.abstractmethod
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

    @abc.abstractmethod
    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """Take in requests that another server has prefilled. Their KV is in both pools."""

    @abc.abstractmethod
    def propose(
        self, cycle: Cycle, sampling_info: Any = None, lengths: np.ndarray | None = None
    ) -> DraftBlock:
        """Draft the verified slots of blocks. Slots beyond them hold any token, or are left out.

        Args:
            cycle: the blocks to fill, of at least one drafted slot.
            sampling_info: SGLang's. If given, tokens are drawn under the requests' parameters.
            lengths: [bs], drafted tokens that each verifies. None: whole blocks.
        """

    def rows_to_draft(self, rows: np.ndarray, lengths: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Choose the requests whose blocks the draft's forward runs in a cycle. [bs] bool

        Called once a cycle, and only if requests have different verify lengths.

        Args:
            rows: [bs] int64, of the request table.
            lengths: [bs], drafted or copied tokens that each verifies.
            wanted: [bs] bool, requests that verify the draft's tokens. Others may need the forward too.
        """
        return wanted

    def draw_block(
        self, rows: torch.Tensor, slots: VerifyLayout, anchors: torch.Tensor, sampling_info: Any = None
    ) -> tuple[torch.Tensor, DraftProbs | None]:
        """Choose tokens for drafted slots by the head.

        Args:
            rows: [T, hidden], the draft's final states.
            slots: layout of these rows: bs blocks of S drafted slots.
            anchors: [bs] int64.
            sampling_info: SGLang's, one row per request. None: the likeliest tokens.

        Returns:
            Tokens [bs, S] int64, and the distributions they were drawn from.
        """
        if sampling_info is None:
            return slots.to_blocks(self._model.draft_tokens(rows)), None
        return draw_drafts(self._model, rows, slots, sampling_info)

    def _complete(
        self, cycle: Cycle, hidden: torch.Tensor, sampling_info: Any, lengths: np.ndarray | None
    ) -> DraftBlock:
        """Put blocks together from the final states of all drafted slots, [bs, S, hidden]."""
        anchors = cycle.tokens[:, :1]
        if lengths is None:
            slots = whole_blocks(*hidden.shape[:2])
        elif not lengths.any():
            return DraftBlock(anchors.contiguous())
        else:
            slots = drafted_slots(tuple(lengths.tolist()), hidden.shape[1], hidden.device, hidden.is_cuda)
        rows = slots.to_rows(hidden[:, : slots.verify_len])
        drafted, probs = self.draw_block(rows, slots, anchors.squeeze(1), sampling_info)
        return DraftBlock(torch.cat((anchors, drafted), dim=1), probs)

    @abc.abstractmethod
    def write_context_in_graph(
        self, aux_hidden: torch.Tensor, positions: torch.Tensor, cache_loc: torch.Tensor
    ) -> None:
        """Do the part of `commit` that needs no acceptance, at the end of a verify graph.

        Args:
            aux_hidden: [n, num_aux * hidden] of whole blocks. Blocks that pad a batch come last.
            positions: [n] int64.
            cache_loc: [n] int64. Blocks that pad a batch name SGLang's padding slot.
        """

    @abc.abstractmethod
    def commit(self, cycle: Cycle, aux_hidden: torch.Tensor | None, accepted: AcceptedBlocks) -> None:
        """Write the context of verified blocks.

        Args:
            cycle: verified slots, which may be the first of a drafted block, or the anchor alone.
            aux_hidden: [T, num_aux * hidden] of the cycle's rows. The next target forward may overwrite it.
                None: the verify graph has absorbed it.
            accepted: the step's output.
        """


class VerifyTail:
    """Absorb the target's states for the drafter inside the target's CUDA graphs.

    This spares launches after verify (SGLang's `capture_tail_hooks`). If a forward replays no such graph,
    `Drafter.commit` absorbs them. Make the tail when both runners have their pools, before the target
    captures."""

    def __init__(self, drafter: Drafter, target_runner: Any):
        self._drafter = drafter
        self._runner = target_runner
        # With adaptive lengths a target has several graph runners, and swaps them.
        self._graph_runners: weakref.WeakSet[Any] = weakref.WeakSet()
        target_runner.capture_tail_hooks.append(self._capture)

    def _capture(self, graph_runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """Absorb states. SGLang calls this at the end of each warm-up and capture of a forward."""
        self._drafter.write_context_in_graph(
            out.hidden_states[:num_tokens], forward_batch.positions, forward_batch.out_cache_loc
        )
        self._graph_runners.add(graph_runner)

    def states_to_commit(self, target_out: Any) -> torch.Tensor | None:
        """Return the aux hidden states of a verify forward. None: its graph has absorbed them."""
        is_absorbed = (
            target_out.can_run_cuda_graph and self._runner.decode_cuda_graph_runner in self._graph_runners
        )
        return None if is_absorbed else target_out.logits_output.hidden_states
