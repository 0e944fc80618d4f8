"""The draft's context: when its rows are written, and which of them a block reads.

On a CPU one row takes as many operators as fifty. On a GPU each write reads the weights of keys and values.
So the verify graph writes rows, and rows of plain cycles are written together.

`--speculative-draft-window-size`: the draft sees the last W committed tokens. It then reads through its own
request table, rewritten before each block, over the KV slots it shares with the target. Nothing before the
window is read. Keys keep the positions they were rotated at.
"""

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.kv_loc_plan import IdSpaceKind, KVLocPlan

from sglang_dflash.kernels.ops.speculative.window import prepare_window
from sglang_dflash.srt.configs.unsupported import PAGED_BACKENDS
from sglang_dflash.srt.speculative.cycle.block import Cycle
from sglang_dflash.srt.speculative.drafters.base import Drafter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Inputs of a draft's context.

    `aux_hidden` is [n, num_aux * hidden]; `positions` and `cache_loc` are [n] int64.
    """

    aux_hidden: torch.Tensor
    positions: torch.Tensor
    cache_loc: torch.Tensor


class DeferredContext:
    """Context rows of cycles that verified the anchor alone, to be written together.

    Nobody reads them before the next block is drafted or another request is prefilled. All rows are of one
    set of requests: a changed set may give a slot to another request, whose rows are written later."""

    def __init__(self, max_cycles: int):
        self._max_cycles = max_cycles
        self._requests: torch.Tensor | None = None
        self._rows: list[ContextRows] = []

    def has_room_for(self, requests: torch.Tensor) -> bool:
        """Tell whether rows of one more cycle of these requests [bs] int64 may be added."""
        if self._requests is None or not self._rows:
            return True
        if len(self._rows) == self._max_cycles:
            return False
        # SGLang makes another tensor when its batch changes. Comparing values on a GPU would wait for it.
        return requests is self._requests or (not requests.is_cuda and torch.equal(requests, self._requests))

    def add(self, requests: torch.Tensor, rows: ContextRows) -> None:
        """Keep a copy of the rows: the next target forward may overwrite `aux_hidden`."""
        self._requests = requests
        self._rows.append(ContextRows(rows.aux_hidden.clone(), rows.positions, rows.cache_loc))

    def take(self) -> ContextRows | None:
        """Remove and return all rows, in the order of their cycles. None: there are none."""
        rows, self._rows = self._rows, []
        if not rows:
            return None
        columns = ((r.aux_hidden, r.positions, r.cache_loc) for r in rows)
        return ContextRows(*(torch.cat(column) for column in zip(*columns, strict=True)))


class VerifyTail:
    """Absorb the target's states for the drafter inside the target's CUDA graphs.

    This spares launches after verify (SGLang's `capture_tail_hooks`). If a forward replays no such graph,
    `Drafter.commit` absorbs them. Make the tail when both runners have their pools, before the target
    captures."""

    def __init__(self, drafter: Drafter, target_runner: Any, draft_runner: Any):
        self._drafter = drafter
        self._runner = target_runner
        # With adaptive width a target has several graph runners, and swaps them.
        self._graph_runners: weakref.WeakSet[Any] = weakref.WeakSet()
        spaces = [
            runner.kv_index_translator.space(IdSpaceKind.FULL) for runner in (target_runner, draft_runner)
        ]
        # A graph holds the slots under the names of the target's pool.
        if all(space.write is None for space in spaces):
            target_runner.capture_tail_hooks.append(self._capture)
        else:
            logger.info(
                "DFLASH: the draft's context is written outside the verify graphs: its pool renames slots."
            )

    def _capture(self, graph_runner: Any, out: Any, forward_batch: Any, num_tokens: int) -> None:
        """Absorb states. SGLang calls this at the end of each warm-up and capture of a forward."""
        # In a graph that is keyed by rows, as many rows as requests may be the block of one.
        is_plain = num_tokens == forward_batch.batch_size and not graph_runner.ragged_verify_mode
        if is_plain and self._drafter.defers_plain_cycles:
            return
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


class FullView:
    """All committed tokens, read through the target's request table."""

    def read(self, cycle: Cycle) -> tuple[torch.Tensor, torch.Tensor, KVLocPlan]:
        """Prepare the read of a cycle's blocks.

        Returns:
            Committed tokens to read [bs] int64; the same on the host [bs]; the plan of the block's slots.
            The host's are upper bounds. They exceed the others by the cycle's spread at most, unless windows
            start at page boundaries.
        """
        return cycle.committed, cycle.committed_host, cycle.kv_loc_plan


class WindowView(FullView):
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
        # The whole width for every request: past its block a row holds entries that nobody reads.
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
