"""`--speculative-draft-window-size`: the draft sees only the last W committed tokens of a request, then its
block.

The draft reads through a request table of its own, rewritten before each block, over the KV slots it shares
with the target. Whatever lies before the window is not read; keys keep the positions they were rotated at.
"""

from dataclasses import dataclass

import torch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

from sglang_dflash.kernels.ops.speculative.window import prepare_window
from sglang_dflash.srt.configs.attention_backends import PAGED_BACKENDS
from sglang_dflash.srt.speculative.dflash_info import Cycle


@dataclass(frozen=True, slots=True)
class DraftView:
    """What a block forward of the draft reads: bs requests, blocks of D rows.

    seq_lens: [bs] int64, committed tokens in sight.
    host_lens: [bs] on the host, seq_lens + D, exactly where the cycle's are exact and the window may begin
        anywhere; else an upper bound.
    kv_loc_plan: the cycle's, reading the draft's own table where it has one.
    """

    seq_lens: torch.Tensor
    host_lens: torch.Tensor
    kv_loc_plan: KVLocPlan


class FullView:
    """No window: the draft reads the target's request table."""

    def __init__(self, verify_width: int, draft_width: int):
        self._surplus = verify_width - draft_width

    def of(self, cycle: Cycle) -> DraftView:
        return DraftView(cycle.seq_lens, cycle.host_lens - self._surplus, cycle.kv_loc_plan)


class WindowView:
    """The last `size` committed tokens, and up to a page more where the attention backend reads whole
    pages."""

    def __init__(
        self,
        size: int,
        target_runner,
        draft_runner,
        attention_backend: str,
        verify_width: int,
        draft_width: int,
    ):
        self._size = size
        # Whole pages are read, as many as fit between the window's ends: it has to begin with one.
        self._page = target_runner.page_size if attention_backend in PAGED_BACKENDS else 1
        self._source = target_runner.req_to_token_pool.req_to_token
        self._table = draft_runner.req_to_token_pool.req_to_token
        self._translator = draft_runner.kv_index_translator
        self._verify_width, self._draft_width = verify_width, draft_width
        # Never more than the table holds: a window longer than the context is the whole of it.
        self._longest = min(size + self._page - 1, self._table.shape[1] - draft_width)

    def of(self, cycle: Cycle) -> DraftView:
        # The whole width for every request: past its block a row holds what nobody reads.
        columns = self._longest + self._draft_width
        seq_lens = prepare_window(
            cycle.seq_lens, cycle.req_pool_indices, self._source, self._table, self._size, self._page, columns
        )
        host_lens = (cycle.host_lens - self._verify_width).clamp(max=self._longest) + self._draft_width
        plan = cycle.kv_loc_plan.reads_from(
            self._translator, seq_lens=seq_lens, seq_lens_cpu=host_lens, read_extent=self._draft_width
        )
        return DraftView(seq_lens, host_lens, plan)
