"""The draft's window (`--speculative-draft-window-size`).

The draft sees the last W committed tokens. It then reads through its own request table, rewritten before each
block, over the KV slots it shares with the target. Nothing before the window is read. Keys keep the positions
they were rotated at.
"""

from typing import Any

import torch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan

from sglang_dflash.kernels.ops.speculative.window import prepare_window
from sglang_dflash.srt.configs.unsupported import PAGED_BACKENDS
from sglang_dflash.srt.speculative.cycle.block import Cycle


class DraftWindow:
    """The last `size` committed tokens, and up to a page more with paged backends."""

    def __init__(
        self, size: int, target_runner: Any, draft_runner: Any, attention_backend: str, num_draft_rows: int
    ):
        self._size = size
        # Whole pages are read, as many as fit between the window's ends, so the window begins with a page.
        self._page = target_runner.page_size if attention_backend in PAGED_BACKENDS else 1
        self._source = target_runner.req_to_token_pool.req_to_token
        self._table = draft_runner.req_to_token_pool.req_to_token
        self._translator = draft_runner.kv_index_translator
        self._num_draft_rows = num_draft_rows
        # A window longer than the context is the whole of it.
        self._longest = min(size + self._page - 1, self._table.shape[1] - num_draft_rows)

    def read(self, cycle: Cycle) -> tuple[torch.Tensor, torch.Tensor, KVLocPlan]:
        """Prepare the read of a cycle's blocks.

        Returns:
            Committed tokens to read [bs] int64; the same on the host [bs]; the plan of the block's slots.
            The host's are upper bounds. They exceed the others by the cycle's spread at most, unless windows
            start at page boundaries.
        """
        # As many columns for every request: past its block a row holds entries that nobody reads.
        columns = self._longest + self._num_draft_rows
        seq_lens = prepare_window(
            cycle.committed,
            cycle.req_pool_indices,
            self._source,
            self._table,
            self._size,
            self._page,
            columns,
        )
        committed_host = cycle.committed_host.clamp(max=self._longest)
        plan = cycle.kv_loc_plan.reads_from(
            self._translator,
            seq_lens=seq_lens,
            seq_lens_cpu=committed_host + self._num_draft_rows,
            read_extent=self._num_draft_rows,
        )
        return seq_lens, committed_host, plan
