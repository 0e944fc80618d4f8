"""The drafters of DFlash (arXiv 2602.06036) and DFlash2: one forward fills a block."""

from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_disagg, get_memory, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks
from sglang_dflash.kernels.ops.speculative.selector_walk import Candidates
from sglang_dflash.kernels.ops.speculative.window import prepare_window
from sglang_dflash.srt.configs.unsupported import PAGED_BACKENDS
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.models.block_draft import DraftOutput
from sglang_dflash.srt.models.dflash2 import DFlash2Output
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests, Prompts
from sglang_dflash.srt.speculative.dflash_info import DFlashVerifyInput
from sglang_dflash.srt.speculative.drafters.base import Drafter
from sglang_dflash.srt.speculative.drafters.sampling import selector_draw

# Cycles without drafts whose context is written together on a CPU, where one row takes as long as twenty.
_MOST_DEFERRED = 32


class ContextRows(NamedTuple):
    """Inputs of a draft's context."""

    aux_hidden: torch.Tensor  # [n, num_aux * hidden]
    positions: torch.Tensor  # [n] int64
    cache_loc: torch.Tensor  # [n] int64


class DraftWindow:
    """The draft's window: the last `size` committed tokens.

    The flag is `--speculative-draft-window-size`. Paged backends read up to a page more. The draft reads
    through a second request table, rewritten before each block, over KV slots that it shares with the target.
    Nothing before the window is read. Keys keep the positions they were rotated at.
    """

    def __init__(
        self, size: int, target_runner: Any, draft_runner: Any, attention_backend: str, num_draft_rows: int
    ):
        self._size = size
        # Attention reads whole pages, so the window begins with a page.
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
            The host's are upper bounds, and exceed the others if windows start at page boundaries.
        """
        # Every request has the same number of columns. Entries past its block are not read.
        columns = self._longest + self._num_draft_rows
        seq_lens = prepare_window(
            cycle.committed,
            requests=cycle.req_pool_indices,
            source=self._source,
            table=self._table,
            size=self._size,
            page=self._page,
            columns=columns,
        )
        committed_host = cycle.committed_host.clamp(max=self._longest)
        plan = cycle.kv_loc_plan.reads_from(
            self._translator,
            seq_lens=seq_lens,
            seq_lens_cpu=committed_host + self._num_draft_rows,
            read_extent=self._num_draft_rows,
        )
        return seq_lens, committed_host, plan


class DFlashDrafter(Drafter):
    """Drafts with the context of every committed token, or of a window.

    The target's slots index the draft's KV pool too. Prefix-cache hits, retraction and aborts need no
    bookkeeping: whoever wrote a slot's target KV wrote its draft KV as well."""

    writes_context_apart = True

    def __init__(self, draft_runner: Any, target_model: Any, block_size: int):
        super().__init__(draft_runner, target_model, block_size)
        # If the anchor's row drafts too, the last position needs no row.
        self.num_draft_rows = block_size - 1 + self._model.draft.num_idle_rows
        self.has_own_table = get_spec().speculative_draft_window_size is not None
        # Context of a CPU's cycles that drafted nothing. Nothing reads it before the next block is drafted or
        # another request is prefilled. All rows are of one set of requests: a changed set may give a slot to
        # another request, whose rows are written later. On a GPU a graph would write that request's earlier.
        self._has_drafted = False
        self._deferred: list[ContextRows] = []
        self._deferred_for = torch.empty(0, dtype=torch.int64)
        # With disaggregation another server's KV may arrive in a slot at any time, and a hierarchical cache
        # copies slots to the host as soon as the target's KV is in them.
        self._may_defer = (
            get_disagg().disaggregation_mode == "null" and not get_memory().enable_hierarchical_cache
        )
        self._model.stack_kv_weights()

    def attach_pools(self, target_runner: Any) -> None:
        """See `Drafter`. A window reads through a second table, rewritten before each block."""
        self._model.use_pool(self._runner.token_to_kv_pool)
        self._model.allocate_blocks(target_runner.req_to_token_pool.req_to_token.shape[0], self._block_size)
        if self.has_own_table:
            spec = get_spec()
            self.window = DraftWindow(
                spec.speculative_draft_window_size,
                target_runner=target_runner,
                draft_runner=self._runner,
                attention_backend=spec.speculative_draft_attention_backend,
                num_draft_rows=self.num_draft_rows,
            )

    def begin_prefill(self, prompts: Prompts) -> None:
        """See `Drafter`. Writes deferred context, with which the prompt may begin."""
        self._write_deferred()

    def prefill(
        self, prompts: Prompts, aux_hidden: torch.Tensor, cache_loc: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        self._write(ContextRows(aux_hidden, prompts.positions, cache_loc))

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """Do nothing: the draft keeps no state beside its KV."""

    def propose(
        self, cycle: Cycle, sampling_info: Any = None, lengths: np.ndarray | None = None
    ) -> DraftBlock:
        self._write_deferred()
        self._has_drafted = True
        output = self._run_block(cycle)
        if sampling_info is None and output.blocks is not None:
            return DraftBlock(output.blocks[: cycle.bs])  # a CUDA graph pads its output
        return self._complete_output(cycle, output, sampling_info, lengths)

    def _complete_output(
        self, cycle: Cycle, output: DraftOutput, sampling_info: Any, lengths: np.ndarray | None
    ) -> DraftBlock:
        """Put blocks together from the output of the block forward."""
        assert output.hidden_states is not None
        rows = output.hidden_states.view(-1, self.num_draft_rows, output.hidden_states.shape[-1])
        rows = rows[: cycle.bs, self._model.draft.num_idle_rows :]  # a CUDA graph pads its output
        return self._complete(cycle, rows, sampling_info, lengths)

    def write_context_in_graph(
        self, aux_hidden: torch.Tensor, positions: torch.Tensor, cache_loc: torch.Tensor
    ) -> None:
        self._write(ContextRows(aux_hidden, positions, cache_loc))

    def commit(self, cycle: Cycle, aux_hidden: torch.Tensor | None, accepted: AcceptedBlocks) -> None:
        has_drafted, self._has_drafted = self._has_drafted, False
        if aux_hidden is None:
            return
        cache_loc = cycle.kv_loc_plan.write_ids(self._runner.kv_index_translator, cols=cycle.write_cols)
        rows = ContextRows(aux_hidden, cycle.layout.to_rows(cycle.positions), cache_loc)
        if self._may_defer and not has_drafted and not aux_hidden.is_cuda:
            self._defer(cycle, rows, accepted)
            return
        self._write_deferred()  # a later write may hit a slot that has another owner by then
        # A rejected row's slot is never read: the next block starts at the first of them. Skipping them
        # spares writes on a GPU, if all blocks have one length. On a CPU selecting the others costs more.
        skips = aux_hidden.is_cuda and cycle.layout.is_rectangle
        self._write(rows, accepted.accept_len if skips else None)

    def _defer(self, cycle: Cycle, rows: ContextRows, accepted: AcceptedBlocks) -> None:
        """Keep a copy of the accepted rows: the next target forward may overwrite the states."""
        requests = cycle.req_pool_indices
        if not torch.equal(requests, self._deferred_for) or len(self._deferred) == _MOST_DEFERRED:
            self._write_deferred()
        self._deferred_for = requests
        if cycle.verify_len == 1:
            kept = rows._replace(aux_hidden=rows.aux_hidden.clone())
        else:
            # A later cycle has other rows for the slots of rejected ones.
            slots = torch.arange(cycle.verify_len, device=requests.device)
            is_kept = cycle.layout.to_rows(slots <= accepted.accept_len[:, None])
            kept = ContextRows(*(column[is_kept] for column in rows))
        self._deferred.append(kept)

    def _write_deferred(self) -> None:
        rows, self._deferred = self._deferred, []
        if rows:
            self._write(ContextRows(*map(torch.cat, zip(*rows, strict=True))))

    def _write(self, rows: ContextRows, accept_len: torch.Tensor | None = None) -> None:
        pool = self._runner.token_to_kv_pool
        self._model.write_context_kv(**rows._asdict(), kv_pool=pool, accept_len=accept_len)

    def _run_block(self, cycle: Cycle) -> DraftOutput:
        """Run one forward over the draft's rows of all blocks."""
        num_rows = self.num_draft_rows
        columns = slice(0, num_rows)
        seq_lens, committed_host, plan = cycle.committed, cycle.committed_host, cycle.kv_loc_plan
        if self.has_own_table:
            seq_lens, committed_host, plan = self.window.read(cycle)
        seq_lens_cpu = committed_host + num_rows
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=cycle.bs,
            input_ids=cycle.tokens[:, columns].flatten(),
            req_pool_indices=cycle.req_pool_indices,
            seq_lens=seq_lens,
            out_cache_loc=cycle.cache_loc,
            seq_lens_sum=sum(seq_lens_cpu.tolist()),
            seq_lens_cpu=seq_lens_cpu,
            positions=cycle.positions[:, columns].flatten(),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=DFlashVerifyInput(num_rows, CaptureHiddenMode.NULL),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=cycle.bs * num_rows,
            can_run_decode_cuda_graph=cycle.can_run_cuda_graph,
        )
        plan.bind(forward_batch, self._runner.kv_index_translator, cols=columns)
        return self._runner.forward(forward_batch).logits_output


class DFlash2Drafter(DFlashDrafter):
    """Drafts by walks through candidates.

    The best path is part of the model's forward and its CUDA graph. A drawn path begins after the forward,
    from the same candidates."""

    def _complete_output(
        self, cycle: Cycle, output: DFlash2Output, sampling_info: Any, lengths: np.ndarray | None
    ) -> DraftBlock:
        if output.candidate_ids is None:
            return super()._complete_output(cycle, output, sampling_info, lengths)
        drafted, probs = self._walk(output.candidates(cycle.bs), cycle.tokens[:, 0], sampling_info)
        if probs is not None:  # the verify graph may overwrite the candidates (`cycle/replays.py`)
            probs = DraftProbs(probs.ids.clone(), probs.probs)
        return DraftBlock(torch.cat((cycle.tokens[:, :1], drafted), dim=1), probs)

    def draw_block(
        self, rows: torch.Tensor, slots: VerifyLayout, anchors: torch.Tensor, sampling_info: Any = None
    ) -> tuple[torch.Tensor, DraftProbs | None]:
        candidates = Candidates(*map(slots.to_blocks, self._model.candidates(rows)))
        return self._walk(candidates, anchors, sampling_info)

    def _walk(
        self, candidates: Candidates, anchors: torch.Tensor, sampling_info: Any
    ) -> tuple[torch.Tensor, DraftProbs | None]:
        draw = None
        if sampling_info is not None:
            draw = selector_draw(sampling_info, candidates.ids.shape[1])
        return self._model.candidate_selector.walk(candidates, anchors, draw)
