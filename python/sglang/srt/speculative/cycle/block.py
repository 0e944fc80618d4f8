"""Blocks of one decode step, before and after drafting."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.runtime_context import get_spec

from sglang_dflash.kernels.ops.speculative.block import prepare_block
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput


@dataclass(frozen=True, slots=True)
class Cycle:
    """Inputs of one decode step, fixed before drafting: bs requests, blocks of B slots.

    Attributes:
        bs: number of requests.
        req_pool_indices: [bs] int64, rows of the request table.
        committed: [bs] int64, tokens with committed KV, n. The block covers positions n .. n+B-1.
        committed_host: [bs] on the host, upper bounds of `committed`.
        verify_len: slots of each block, the anchor included.
        tokens: [bs, B] int64, the anchor (the last cycle's bonus token), then mask tokens.
        positions: [bs, B] int64.
        cache_loc: [bs * B] int64, KV slots of these positions.
        kv_loc_plan: SGLang's translation of the slots, shared by the draft's and the verify forward.
        can_run_cuda_graph: SGLang's permission for this batch.
        write_cols: columns of the planned slots that the block covers, or an index of these slots. None: all
            of them.
        layout: rows of the verify forward.
    """

    bs: int
    verify_len: int
    req_pool_indices: torch.Tensor
    committed: torch.Tensor
    committed_host: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    cache_loc: torch.Tensor
    kv_loc_plan: KVLocPlan
    can_run_cuda_graph: bool
    layout: VerifyLayout
    write_cols: slice | torch.Tensor | None = None

    @classmethod
    def begin(cls, batch: Any, target_runner: Any, mask_token_id: int, num_slots: int) -> "Cycle":
        """Prepare the cycle of a decode batch with blocks of `num_slots` slots.

        Slots beyond a request's reserved ones have any KV slot, and must not be verified.
        """
        draft_input: DFlashDraftInput = batch.spec_info
        tokens, positions, cache_loc = prepare_block(
            draft_input.bonus_tokens,
            seq_lens=batch.seq_lens,
            req_pool_indices=batch.req_pool_indices,
            req_to_token=target_runner.req_to_token_pool.req_to_token,
            mask_token_id=mask_token_id,
            block_size=num_slots,
        )
        if batch.seq_lens_cpu is None:
            seq_lens_cpu = draft_input.reserved_lens_cpu
            # Copies beyond a block leave the slots of a block free.
            committed_host = seq_lens_cpu - min(num_slots, get_spec().speculative_num_draft_tokens)
        else:
            seq_lens_cpu = committed_host = batch.seq_lens_cpu
        plan = target_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            write_virtual=cache_loc,
            read_extent=num_slots,
        )
        return cls(
            bs=batch.seq_lens.numel(),
            verify_len=num_slots,
            req_pool_indices=batch.req_pool_indices,
            committed=batch.seq_lens,
            committed_host=committed_host,
            tokens=tokens,
            positions=positions,
            cache_loc=cache_loc,
            kv_loc_plan=plan,
            can_run_cuda_graph=batch.can_run_decode_cuda_graph,
            layout=whole_blocks(batch.seq_lens.numel(), num_slots),
        )

    def of_requests(self, on_host: np.ndarray, chosen: torch.Tensor, target_runner: Any) -> "Cycle":
        """Keep some requests for a forward: [m] int64, on host and device."""
        slots = self.cache_loc.view(self.bs, -1)[chosen].flatten()
        requests, committed = self.req_pool_indices[chosen], self.committed[chosen]
        committed_host = self.committed_host[on_host.tolist()]
        plan = target_runner.kv_index_translator.plan(
            req_pool_indices=requests,
            seq_lens=committed,
            seq_lens_cpu=committed_host,
            write_virtual=slots,
            read_extent=self.verify_len,
        )
        return replace(
            self,
            bs=len(on_host),
            req_pool_indices=requests,
            committed=committed,
            committed_host=committed_host,
            tokens=self.tokens[chosen],
            positions=self.positions[chosen],
            cache_loc=slots,
            kv_loc_plan=plan,
            layout=whole_blocks(len(on_host), self.verify_len),
        )

    def with_layout(self, layout: VerifyLayout) -> "Cycle":
        """Keep the verified slots of each block."""
        if layout is self.layout:
            return self
        cycle, verify_len = replace(self, layout=layout), layout.verify_len
        if layout.is_rectangle and verify_len == self.verify_len:
            return cycle
        if layout.is_rectangle:
            cache_loc = self.cache_loc.view(self.bs, -1)[:, :verify_len].flatten()
            write_cols: Any = slice(0, verify_len)
        else:
            write_cols = layout.columns(self.verify_len)
            # For rows that no request has, SGLang reads `write_cols` alone.
            cache_loc = self.cache_loc[write_cols]
        return replace(
            cycle,
            verify_len=verify_len,
            tokens=self.tokens[:, :verify_len],
            positions=self.positions[:, :verify_len],
            cache_loc=cache_loc,
            write_cols=write_cols,
        )


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Drafted blocks, in the target's vocabulary.

    Attributes:
        tokens: [bs, B] int64. Column 0 is the anchor.
        probs: distributions that columns 1.. were drawn from, with which rejection verifies the block. None:
            they are the draft's argmax.
    """

    tokens: torch.Tensor
    probs: DraftProbs | None = None

    def narrow(self, verify_len: int) -> "DraftBlock":
        """Keep the first slots. Lossless if `verify_len` was chosen without the drafted tokens."""
        if verify_len >= self.tokens.shape[1]:
            return self
        probs = self.probs
        if probs is not None:
            drafted = slice(0, verify_len - 1)
            probs = DraftProbs(probs.ids[:, drafted].contiguous(), probs.probs[:, drafted].contiguous())
        return DraftBlock(self.tokens[:, :verify_len].contiguous(), probs)
