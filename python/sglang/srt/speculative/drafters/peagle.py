"""The P-EAGLE drafter (arXiv 2602.01469): one causal forward runs the tokens just verified and drafts the
next ones.

Row i of a request is the token at position i + 1 with the target's fused hidden state of position i, and its
KV lies in the slot of position i + 1, beside the target's: it depends on nothing later, so the prefix cache
may share it. The draft reads through a request table of its own, the target's shifted by one.

Between two cycles at most B rows of a request are pending: verified, but not run through the draft yet. A
block is D = 2 (B - 1) rows, as many for every request, whatever was accepted:

    [pending rows] [B - 2 mask rows] [idle rows]

Idle rows draft nothing, nobody sees them, and their keys go to SGLang's padding slot 0. Where such a block
begins only the device knows. An attention backend that plans with exact host lengths (FlashInfer) gets
another one instead, which ends at a row that the host knows:

    [rows that are in the KV already] [pending rows] [B - 2 mask rows]

There the first group is idle: its outputs are dropped, and its keys too. That needs a backend which reads the
keys of the block from the KV pool, where those rows' real ones are, and not from what it was just given, as
SGLang's Triton backend does. Mask rows write to the slots of the tokens they stand for, which the pending
rows of the next cycle overwrite. That cycle may not come: if a request ends and no step follows in which it
still takes part, its last block, at most B - 1 tokens, goes to the prefix cache with keys of mask rows. Who
reads them drafts a little worse; nothing drafted is ever kept unverified.

A cycle that verifies the anchor alone does not draft, and adds one pending row. When there are B of some
request, all are run, in a block whose drafts nobody looks at."""

from dataclasses import dataclass

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.kernels.ops.speculative.peagle_rows import Pending, commit_rows, prepare_rows
from sglang_dflash.srt.models.block_draft import DraftOutput
from sglang_dflash.srt.models.peagle import PEagleRows
from sglang_dflash.srt.speculative.acceptance.greedy import Verdict
from sglang_dflash.srt.speculative.dflash_info import Cycle, DFlashVerifyInput, Prompts, packed_ranges
from sglang_dflash.srt.speculative.drafters.base import DraftBlock
from sglang_dflash.srt.speculative.drafters.sampling import DraftSampling, draw_drafts
from sglang_dflash.srt.speculative.scale_out.disaggregation import Arrival


@dataclass
class PEagleVerifyInput(DFlashVerifyInput):
    """The spec_info of a draft forward: SGLang plans with the block size, the model reads `draft_rows`."""

    draft_rows: PEagleRows | None = None

    @classmethod
    def of_rows(cls, block_rows: int, rows: PEagleRows) -> "PEagleVerifyInput":
        """Build the spec_info of blocks of `block_rows` rows."""
        return cls(block_rows, CaptureHiddenMode.NULL, draft_rows=rows)


class PEagleDrafter:
    """Drives the draft model through a SGLang model runner of its own."""

    has_own_table = True
    writes_context_apart = False

    def __init__(self, draft_runner, target_model, verify_width: int):
        self._runner = draft_runner
        self._model = draft_runner.model
        self.mask_token_id = self._model.mask_token_id
        self._verify_width = verify_width
        self._drafted = verify_width - 1
        self.block_width = max(1, 2 * self._drafted)  # SGLang plans for a row even where nothing is drafted
        self._sampling = DraftSampling.from_environment()
        self._model.borrow_from_target(target_model.get_input_embeddings(), target_model.lm_head)

    def attach_pools(self, target_runner) -> None:
        self._source = target_runner.req_to_token_pool.req_to_token
        self._table = self._runner.req_to_token_pool.req_to_token
        weight = self._model.norm.weight
        rows, width = self._source.shape[0], self._verify_width
        self._pending = Pending(
            tokens=torch.zeros(rows, width, dtype=torch.int64, device=weight.device),
            fused=weight.new_zeros(rows, width, weight.numel()),
            count=torch.ones(rows, dtype=torch.int64, device=weight.device),
        )
        self._absorbed = weight.new_zeros(
            rows * width, weight.numel()
        )  # fused states that a verify graph leaves
        # No running request has more, as all of them take part in every cycle. Known without asking the
        # device.
        self._most_pending = 1
        self._model.allocate_blocks(rows, self.block_width, self._drafted)

    @property
    def _last_start(self) -> int | None:
        """The last row where a block may begin, so that its idle rows stay in the context; None where a block
        has to end with its last mask row."""
        if self._runner.attn_backend.needs_cpu_seq_lens:
            return None
        return self._runner.model_config.context_len - self.block_width

    def begin_prefill(self, prompts: Prompts) -> None:
        if not self._drafted:
            return
        requests = prompts.req_pool_indices
        longest = (
            max(prefix + new for prefix, new in zip(prompts.prefix_lens, prompts.extend_lens, strict=True))
            - 1
        )
        self._table[requests, :longest] = self._source[requests, 1 : longest + 1]
        if prompts.num_running:
            # The prefill adds one row to a running request; what is pending before it goes first.
            lengths = torch.tensor(prompts.prefix_lens[-prompts.num_running :])
            device_lengths = lengths.to(self._source.device, non_blocking=True)
            self._run_blocks(requests[-prompts.num_running :], device_lengths, lengths, False)

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
        # A row takes the state of the position before its own. Nobody kept the one that precedes a cached
        # prefix's end: the learned state stands in for it.
        before = fused.roll(1, dims=0)
        carried = self._pending.fused[requests, self._pending.count[requests] - 1]
        before[starts] = torch.where(is_continued[:, None], carried, self._model.fused_mask)
        self._pending.fused[requests, 0] = fused[(ends - 1).to(device, non_blocking=True)]
        self._pending.tokens[requests, 0] = next_tokens
        self._pending.count[requests] = 1
        self._run_prompts(prompts, before, cache_loc)

    def join(self, arrival: Arrival) -> None:
        if not self._drafted:
            return
        requests, longest = arrival.req_pool_indices, max(arrival.lengths) - 1
        self._table[requests, :longest] = self._source[requests, 1 : longest + 1]
        # The other server kept the state of the last token: the learned one stands in for it, as after a
        # cached prefix.
        self._pending.tokens[requests, 0] = arrival.bonus_tokens
        self._pending.fused[requests, 0] = self._model.fused_mask
        self._pending.count[requests] = 1

    def propose(self, cycle: Cycle, sampling_info=None) -> DraftBlock:
        if cycle.width == 1:
            return DraftBlock(tokens=cycle.tokens)
        committed = cycle.host_lens - self._verify_width
        output = self._run_blocks(cycle.req_pool_indices, cycle.seq_lens, committed, cycle.can_run_cuda_graph)
        count = cycle.bs * self._drafted  # a CUDA graph pads what it returns
        if sampling_info is None:
            drafted, probs = output.draft_tokens[:count].view(cycle.bs, -1), None
        else:
            rows = output.hidden_states[:count].view(cycle.bs, self._drafted, -1)
            drafted, probs = draw_drafts(self._model, rows, sampling_info, self._sampling)
        return DraftBlock(torch.cat((cycle.tokens[:, :1], drafted), dim=1), probs)

    def absorb(self, aux_hidden: torch.Tensor, positions: torch.Tensor, cache_loc: torch.Tensor) -> None:
        if self._drafted:
            self._absorbed[: aux_hidden.shape[0]] = self._model.fuse(aux_hidden)

    def commit(self, cycle: Cycle, aux_hidden: torch.Tensor | None, verdict: Verdict) -> None:
        if not self._drafted:
            return
        requests, rows = cycle.req_pool_indices, cycle.bs * cycle.width
        if cycle.width == 1 and self._most_pending == self._verify_width:
            self._run_blocks(requests, cycle.seq_lens, cycle.host_lens - 1, cycle.can_run_cuda_graph)
            self._pending.count[requests] = self._most_pending = 0
        # Column k: the token after block position k, and the state of that position. Those beyond what was
        # kept mean nothing, and the count says so.
        fused = self._absorbed[:rows] if aux_hidden is None else self._model.fuse(aux_hidden)
        commit_rows(requests, verdict.accept_len, verdict.out_tokens, fused, self._pending)
        self._most_pending = self._most_pending + 1 if cycle.width == 1 else cycle.width

    def _run_blocks(
        self,
        requests: torch.Tensor,
        seq_lens: torch.Tensor,
        host_lens: torch.Tensor,
        can_run_cuda_graph: bool,
    ) -> DraftOutput:
        """One forward over a block per request.

        seq_lens: [bs] int64, committed lengths n: rows 0 .. n - 1 are verified. host_lens: the same or a
        bound, on the host."""
        bs, width, verify_width = requests.numel(), self.block_width, self._verify_width
        blocks = self._model.blocks(bs)
        tokens, positions, cache_loc, start = prepare_rows(
            requests,
            seq_lens,
            self._pending,
            self._model.fused_mask,
            self._source,
            self._table,
            self.mask_token_id,
            blocks.fused,
            blocks.first_drafting,
            self._last_start,
        )
        if self._last_start is None:
            host_lens = (host_lens - verify_width).clamp(min=0) + width
        else:
            host_lens = (host_lens - 1).clamp(max=self._last_start) + width
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=tokens.flatten(),
            req_pool_indices=requests,
            seq_lens=start,
            out_cache_loc=cache_loc,
            seq_lens_sum=int(host_lens.sum()),
            seq_lens_cpu=host_lens,
            positions=positions.flatten(),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=PEagleVerifyInput.of_rows(width, blocks),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=bs * width,
            can_run_decode_cuda_graph=can_run_cuda_graph,
        )
        self._bind(forward_batch, read_extent=width)
        return self._runner.forward(forward_batch).logits_output

    def _run_prompts(self, prompts: Prompts, fused: torch.Tensor, cache_loc: torch.Tensor) -> None:
        """One forward over the rows of a prefill: every token's, but for a text's first. fused: [n,
        hidden]."""
        prefix, extend = torch.tensor(prompts.prefix_lens), torch.tensor(prompts.extend_lens)
        is_first = (prefix == 0).long()
        first_rows = extend.cumsum(0) - extend + is_first
        prefix, extend = (prefix - 1).clamp_(min=0), extend - is_first
        [chosen] = torch.where(extend > 0)  # a text of one token has no rows
        if not chosen.numel():
            return
        prefix, extend = prefix[chosen], extend[chosen]
        device = fused.device
        rows = packed_ranges(first_rows[chosen].tolist(), extend.tolist(), device)
        lengths = prefix + extend
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=chosen.numel(),
            input_ids=prompts.tokens[rows],
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
            spec_info=PEagleVerifyInput.of_rows(1, PEagleRows(fused[rows])),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=rows.numel(),
        )
        self._bind(forward_batch, read_extent=0)
        self._runner.forward(forward_batch)

    def _bind(self, forward_batch: ForwardBatch, read_extent: int) -> None:
        """Plan a forward over the draft's own table. Its rows are fewer, or other, than those of the target's
        forward."""
        translator = self._runner.kv_index_translator
        plan = translator.plan(
            req_pool_indices=forward_batch.req_pool_indices,
            seq_lens=forward_batch.seq_lens,
            seq_lens_cpu=forward_batch.seq_lens_cpu,
            write_virtual=forward_batch.out_cache_loc,
            read_extent=read_extent,
        )
        plan.bind(forward_batch, translator)
