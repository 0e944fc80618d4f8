"""The P-EAGLE drafter (arXiv 2602.01469): one causal forward drafts all tokens.

The same forward runs the tokens that were just verified.

Row i of a request is the token at position i + 1 with the target's fused hidden state of position i. Its KV
is in the slot of position i + 1, beside the target's. It depends on nothing later, so the prefix cache may
share it. The draft reads through its own request table, the target's shifted by one.

Between two cycles at most B rows of a request are pending: verified, but not run through the draft yet. A
block is D = 2 (B - 1) rows for every request, whatever was accepted:

    [pending rows] [B - 2 mask rows] [idle rows]

Idle rows draft nothing, are not read, and their keys go to SGLang's padding slot 0. Only the device
knows where such a block begins. An attention backend that plans on the host (FlashInfer) gets another block,
which ends at a row that the length alone decides:

    [rows with KV] [pending rows] [B - 2 mask rows]

There the first group is idle: its outputs and its keys are dropped. That needs a backend which reads the keys
of the block from the KV pool, as those rows' real keys are there. SGLang's Triton backend reads them from its
input instead. Mask rows write to the slots of the tokens they stand for, which the pending rows of the next
cycle overwrite. If a request ends and no further step includes it, its last block of at most B - 1 tokens
goes to the prefix cache with keys of mask rows. Its readers draft a little worse. The output is not affected.

The first row after a cached prefix has the learned state, as the target's state before it is not cached. Its
KV stays with the request, unless the prefix cache has the same token's: then it exchanges the request's slot
for its own, whose row has the state. With a hierarchical cache that token may be on the host alone. SGLang
then takes the request's slot into the cache, so drafts may differ a little from a hit on the device.

A cycle that verifies the anchor alone does not draft, and adds one pending row. At B pending rows all are
run, in a block whose drafts are ignored. If requests have different verify lengths, each has its own
number of pending rows. The host knows a bound: all that a request has verified since its last draft forward.
A request whose next rows might not fit is drafted for, whatever it verifies."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks
from sglang_dflash.kernels.ops.speculative.peagle_rows import (
    PendingRows,
    RequestTables,
    append_rows,
    prepare_rows,
)
from sglang_dflash.srt.models.block_draft import DraftOutput
from sglang_dflash.srt.models.peagle import PEagleRows
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.host import ragged_ranges
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests, Prompts
from sglang_dflash.srt.speculative.dflash_info import DFlashVerifyInput
from sglang_dflash.srt.speculative.dflash_utils import defer_row_reuse
from sglang_dflash.srt.speculative.drafters.base import Drafter


@dataclass
class PEagleVerifyInput(DFlashVerifyInput):
    """Spec info of a draft forward: the model reads `draft_rows`."""

    draft_rows: PEagleRows | None = None


def mirror_exchanged_slots(pool: Any, table: torch.Tensor) -> None:
    """Repeat in the draft's table what SGLang writes to ranges of a request's columns.

    After a prefill the prefix cache exchanges a request's slots for its own, if it has the same tokens, and
    frees the request's. Slots of decode steps are written otherwise, and `prepare_rows` copies them.

    Args:
        pool: the target's ReqToTokenPool.
        table: [rows, max_len], row i beside token i + 1.
    """
    write = pool.write

    @functools.wraps(write)
    def write_both(indices: Any, values: torch.Tensor) -> None:
        write(indices, values)
        request, columns = indices
        if isinstance(columns, slice):
            first, stop, _ = columns.indices(table.shape[1])
            first = max(first, 1)  # the first token has no row
            if first < stop:
                table[request, first - 1 : stop - 1] = pool.req_to_token[request, first:stop]

    pool.write = write_both


class PEagleDrafter(Drafter):
    """Drafts with rows of the draft's own, which run together with the block."""

    has_own_table = True
    writes_context_apart = False

    def __init__(self, draft_runner: Any, target_model: Any, block_size: int):
        super().__init__(draft_runner, target_model, block_size)
        self._drafted = block_size - 1
        self.num_draft_rows = max(1, 2 * self._drafted)  # SGLang plans for a row even if nothing is drafted

    def attach_pools(self, target_runner: Any) -> None:
        self._target_runner = target_runner
        self._source = target_runner.req_to_token_pool.req_to_token
        self._table = self._runner.req_to_token_pool.req_to_token
        mirror_exchanged_slots(target_runner.req_to_token_pool, self._table)
        weight = self._model.norm.weight
        rows, block_size = self._source.shape[0], self._block_size
        self._pending = PendingRows(
            tokens=torch.zeros(rows, block_size, dtype=torch.int64, device=weight.device),
            fused=weight.new_zeros(rows, block_size, weight.numel()),
            count=torch.ones(rows, dtype=torch.int64, device=weight.device),
            was_run=torch.zeros(rows, dtype=torch.int32, device=weight.device),
        )
        # Fused states from a verify graph.
        self._fused_in_graph = weight.new_zeros(rows * block_size, weight.numel())
        # Upper bounds of `count`, known on the host.
        self.most_pending = np.ones(rows, dtype=np.int64)
        self._model.allocate_blocks(rows, self.num_draft_rows, self._drafted)

    @property
    def _last_start(self) -> int | None:
        """Last row where a block may begin, so that its idle rows stay in the request table.

        The mask rows of the longest text end there. None: a block has to end with its last mask row.
        """
        if self._runner.attn_backend.needs_cpu_seq_lens:
            return None
        return max(0, self._runner.model_config.context_len - self._block_size)

    def begin_prefill(self, prompts: Prompts) -> None:
        """See `Drafter`. Copies table rows, and runs the pending rows of running requests."""
        if not self._drafted:
            return
        requests = prompts.req_pool_indices
        longest = max(prompts.ends) - 1
        self._table[requests, :longest] = self._source[requests, 1 : longest + 1]
        if prompts.num_running:
            # The prefill adds one row to a running request. Its pending rows run first.
            lengths = torch.tensor(prompts.prefix_lens[-prompts.num_running :])
            device_lengths = lengths.to(self._source.device, non_blocking=True)
            self._run_blocks(
                requests[-prompts.num_running :],
                committed=device_lengths,
                committed_host=lengths,
                can_run_cuda_graph=False,
            )

    def prefill(
        self, prompts: Prompts, aux_hidden: torch.Tensor, cache_loc: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        if not self._drafted:
            return
        requests, device = prompts.req_pool_indices, aux_hidden.device
        ends = torch.tensor(prompts.extend_lens).cumsum(0)
        starts = (ends - torch.tensor(prompts.extend_lens)).to(device, non_blocking=True)
        is_continued = torch.tensor(prompts.is_continued).to(device, non_blocking=True)
        fused = self._model.fuse(aux_hidden)
        # A row takes the state of the position before its own. After a cached prefix there is none, and the
        # learned state replaces it.
        before = fused.roll(1, dims=0)
        carried = self._pending.fused[requests, self._pending.count[requests] - 1]
        before[starts] = torch.where(is_continued[:, None], carried, self._model.fused_mask)
        self._pending.fused[requests, 0] = fused[(ends - 1).to(device, non_blocking=True)]
        self._pending.tokens[requests, 0] = next_tokens
        self._pending.count[requests], self._pending.was_run[requests] = 1, 0
        self.most_pending[prompts.table_rows] = 1
        self._run_prompts(prompts, before, cache_loc)

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        if not self._drafted:
            return
        rows, longest = requests.req_pool_indices, max(requests.lengths) - 1
        self._table[rows, :longest] = self._source[rows, 1 : longest + 1]
        # The other server has the state of the last token. The learned state replaces it, as after a cached
        # prefix.
        self._pending.tokens[rows, 0] = requests.bonus_tokens
        self._pending.fused[rows, 0] = self._model.fused_mask
        self._pending.count[rows], self._pending.was_run[rows] = 1, 0
        self.most_pending[requests.table_rows] = 1

    def propose(
        self, cycle: Cycle, sampling_info: Any = None, lengths: np.ndarray | None = None
    ) -> DraftBlock:
        output = self._run_blocks(
            cycle.req_pool_indices,
            committed=cycle.committed,
            committed_host=cycle.committed_host,
            can_run_cuda_graph=cycle.can_run_cuda_graph,
        )
        assert output.hidden_states is not None
        count = cycle.bs * self._drafted  # a CUDA graph pads its output
        if sampling_info is None and output.draft_tokens is not None:
            drafted = output.draft_tokens[:count].view(cycle.bs, -1)
            return DraftBlock(torch.cat((cycle.tokens[:, :1], drafted), dim=1))
        rows = output.hidden_states[:count].view(cycle.bs, self._drafted, -1)
        return self._complete(cycle, rows, sampling_info, lengths)

    def write_context_in_graph(
        self, aux_hidden: torch.Tensor, positions: torch.Tensor, cache_loc: torch.Tensor
    ) -> None:
        if self._drafted:
            self._fused_in_graph[: aux_hidden.shape[0]] = self._model.fuse(aux_hidden)

    def commit(self, cycle: Cycle, aux_hidden: torch.Tensor | None, accepted: AcceptedBlocks) -> None:
        """See `Drafter`. Verified tokens are pending, after those that the draft has not run."""
        if not self._drafted:
            return
        fused = self._fused_in_graph if aux_hidden is None else self._model.fuse(aux_hidden)
        append_rows(
            cycle.req_pool_indices,
            accept_len=accepted.accept_len,
            out_tokens=accepted.tokens,
            fused=fused,
            slots=None if cycle.layout.is_rectangle else cycle.layout.slots,
            pending=self._pending,
        )
        if cycle.layout.is_rectangle and cycle.verify_len == self._block_size:
            self.most_pending[:] = self._block_size  # `rows_to_draft` may not have been asked

    def rows_to_draft(self, rows: np.ndarray, lengths: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """See `Drafter`. A request has room for a block's rows, and pending ones wait there too.

        Requests with half a block go along: one forward for all takes less time than one for each.
        """
        pending, chosen = self.most_pending[rows], wanted
        is_overdue = pending + lengths + 1 > self._block_size
        if is_overdue.any():
            chosen = wanted | is_overdue | (2 * pending >= self._block_size)
        self.most_pending[rows] = np.where(chosen, 0, pending) + lengths + 1
        return chosen

    def _run_blocks(
        self,
        requests: torch.Tensor,
        committed: torch.Tensor,
        committed_host: torch.Tensor,
        can_run_cuda_graph: bool,
    ) -> DraftOutput:
        """Run one forward over a block per request. Rows 0 .. committed - 1 of each are verified."""
        bs, num_rows = requests.numel(), self.num_draft_rows
        blocks = self._model.blocks(bs)
        tables = RequestTables(self._source, self._table, self.mask_token_id, self._last_start)
        tokens, positions, cache_loc, start = prepare_rows(
            requests,
            seq_lens=committed,
            pending=self._pending,
            tables=tables,
            fused_mask=self._model.fused_mask,
            fused=blocks.fused,
            first_drafting=blocks.first_drafting,
        )
        if self._last_start is None:
            seq_lens_cpu = (committed_host - self._block_size).clamp(min=0) + num_rows
        else:
            seq_lens_cpu = (committed_host - 1).clamp(max=self._last_start) + num_rows
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=tokens.flatten(),
            req_pool_indices=requests,
            seq_lens=start,
            out_cache_loc=cache_loc,
            seq_lens_sum=sum(seq_lens_cpu.tolist()),
            seq_lens_cpu=seq_lens_cpu,
            positions=positions.flatten(),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=PEagleVerifyInput(num_rows, CaptureHiddenMode.NULL, draft_rows=blocks),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=bs * num_rows,
            can_run_decode_cuda_graph=can_run_cuda_graph,
        )
        self._bind(forward_batch, read_extent=num_rows)
        return self._runner.forward(forward_batch).logits_output

    def _run_prompts(self, prompts: Prompts, fused: torch.Tensor, cache_loc: torch.Tensor) -> None:
        """Run one forward over the rows of a prefill: one per token except a text's first.

        `fused` is [n, hidden].
        """
        prefix, extend = torch.tensor(prompts.prefix_lens), torch.tensor(prompts.extend_lens)
        is_first = (prefix == 0).long()
        first_rows = extend.cumsum(0) - extend + is_first
        prefix, extend = (prefix - 1).clamp_(min=0), extend - is_first
        [chosen] = torch.where(extend > 0)  # a text of one token has no rows
        if not chosen.numel():
            return
        prefix, extend = prefix[chosen], extend[chosen]
        device = fused.device
        rows = ragged_ranges(first_rows[chosen].tolist(), extend.tolist(), device)
        lengths = prefix + extend
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=chosen.numel(),
            input_ids=prompts.tokens_to_embed()[rows],
            req_pool_indices=prompts.req_pool_indices[chosen.to(device, non_blocking=True)],
            seq_lens=lengths.to(device, non_blocking=True),
            out_cache_loc=cache_loc[rows],
            seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=lengths,
            positions=prompts.positions[rows] - 1,
            extend_num_tokens=rows.numel(),
            extend_seq_lens=extend.to(device, torch.int32, non_blocking=True),
            extend_prefix_lens=prefix.to(device, torch.int32, non_blocking=True),
            extend_start_loc=(extend.cumsum(0) - extend).to(device, torch.int32, non_blocking=True),
            extend_prefix_lens_cpu=prefix.tolist(),
            extend_seq_lens_cpu=extend.tolist(),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=PEagleVerifyInput(1, CaptureHiddenMode.NULL, draft_rows=PEagleRows(fused[rows])),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=rows.numel(),
        )
        self._bind(forward_batch, read_extent=0)
        self._runner.forward(forward_batch)

    def _bind(self, forward_batch: ForwardBatch, read_extent: int) -> None:
        """Plan a forward over the draft's own table, whose rows differ from the target's."""
        defer_row_reuse(self._target_runner)  # if the target's forward follows, it lets them go again
        translator = self._runner.kv_index_translator
        plan = translator.plan(
            req_pool_indices=forward_batch.req_pool_indices,
            seq_lens=forward_batch.seq_lens,
            seq_lens_cpu=forward_batch.seq_lens_cpu,
            write_virtual=forward_batch.out_cache_loc,
            read_extent=read_extent,
        )
        plan.bind(forward_batch, translator)
