"""The DFlash drafter (arXiv 2602.06036): one non-causal forward per block, context written from the target's
states."""

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_disagg, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.models.block_draft import DraftOutput
from sglang_dflash.srt.speculative.acceptance.greedy import Verdict
from sglang_dflash.srt.speculative.dflash_info import Cycle, DFlashVerifyInput, Prompts
from sglang_dflash.srt.speculative.drafters.base import DraftBlock
from sglang_dflash.srt.speculative.drafters.sampling import DraftSampling, draw_drafts
from sglang_dflash.srt.speculative.drafters.waiting_rows import ContextRows, WaitingRows
from sglang_dflash.srt.speculative.drafters.window import FullView, WindowView
from sglang_dflash.srt.speculative.scale_out.disaggregation import Arrival

# Cycles without drafts whose context is written at once on a CPU.
_WAITING_CYCLES = 8


class DFlashDrafter:
    """Drives the draft model through a SGLang model runner of its own.

    The draft's KV pool is indexed by the target's slots, so prefix-cache hits, retraction and aborts need no
    bookkeeping here: whoever wrote a slot's target KV wrote its draft KV as well.
    """

    writes_context_apart = True

    def __init__(self, draft_runner, target_model, verify_width: int):
        self._runner = draft_runner
        self._model = draft_runner.model
        self._model.borrow_from_target(target_model.get_input_embeddings(), target_model.lm_head)
        self.mask_token_id = self._model.mask_token_id
        self._verify_width = verify_width
        # Where the anchor's row drafts too, the last position needs no row.
        self._draft_width = verify_width - 1 + self._model.draft.num_idle_rows
        self._view = FullView(verify_width, self._draft_width)
        self._block_input = DFlashVerifyInput(
            draft_token_num=self._draft_width, capture_hidden_mode=CaptureHiddenMode.NULL
        )
        self._sampling = DraftSampling.from_environment()
        self._waiting = WaitingRows(_WAITING_CYCLES)
        # Where another server's KV may arrive in a slot at any time, none may.
        self._rows_may_wait = get_disagg().disaggregation_mode == "null"
        self._model.stack_kv_weights()

    @property
    def block_width(self) -> int:
        return self._draft_width

    @property
    def has_own_table(self) -> bool:
        """Only for a window: its contents are rewritten before each block."""
        return get_spec().speculative_draft_window_size is not None

    def attach_pools(self, target_runner) -> None:
        self._model.use_pool(self._runner.token_to_kv_pool)
        self._model.allocate_blocks(target_runner.req_to_token_pool.req_to_token.shape[0], self._verify_width)
        if self.has_own_table:
            spec = get_spec()
            self._view = WindowView(
                spec.speculative_draft_window_size,
                target_runner,
                self._runner,
                spec.speculative_draft_attention_backend,
                self._verify_width,
                self._draft_width,
            )

    def begin_prefill(self, prompts: Prompts) -> None:
        self._write_waiting()  # the prompt may begin with what they belong to

    def prefill(
        self, prompts: Prompts, aux_hidden: torch.Tensor, cache_loc: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        self._write(ContextRows(aux_hidden, prompts.positions, cache_loc))

    def join(self, arrival: Arrival) -> None:
        pass  # all of the context is in the pool

    def propose(self, cycle: Cycle, sampling_info=None) -> DraftBlock:
        if cycle.width == 1:
            return DraftBlock(tokens=cycle.tokens)
        self._write_waiting()
        output = self._run_block(cycle)
        if sampling_info is None:
            return DraftBlock(output.blocks[: cycle.bs])  # a CUDA graph pads what it returns
        drafted, probs = self._draw(cycle, output, sampling_info)
        return DraftBlock(torch.cat((cycle.tokens[:, :1], drafted), dim=1), probs)

    def _draw(self, cycle: Cycle, output: DraftOutput, sampling_info) -> tuple[torch.Tensor, DraftProbs]:
        """Tokens [bs, B - 1] and what they were drawn from."""
        rows = output.hidden_states.view(cycle.bs, self._draft_width, -1)[
            :, self._model.draft.num_idle_rows :
        ]
        return draw_drafts(self._model, rows, sampling_info, self._sampling)

    def absorb(self, aux_hidden: torch.Tensor, positions: torch.Tensor, cache_loc: torch.Tensor) -> None:
        self._write(ContextRows(aux_hidden, positions, cache_loc))

    def commit(self, cycle: Cycle, aux_hidden: torch.Tensor | None, verdict: Verdict) -> None:
        if aux_hidden is None:
            return
        cache_loc = cycle.kv_loc_plan.write_ids(self._runner.kv_index_translator, cols=cycle.write_cols)
        rows = ContextRows(aux_hidden, cycle.positions.flatten(), cache_loc)
        # What a rejected row leaves in its slot is never read: the next block starts at the first of them.
        # Skipping them spares writes on a GPU; on a CPU picking the others out costs more than it spares.
        if aux_hidden.is_cuda:
            self._write(rows, verdict.accept_len)
        elif cycle.width == 1 and self._rows_may_wait:
            if not self._waiting.has_room_for(cycle.req_pool_indices):
                self._write_waiting()
            self._waiting.add(cycle.req_pool_indices, rows)
        else:
            self._write(rows)

    def _write_waiting(self) -> None:
        rows = self._waiting.take()
        if rows is not None:
            self._write(rows)

    def _write(self, rows: ContextRows, accept_len: torch.Tensor | None = None) -> None:
        pool = self._runner.token_to_kv_pool
        self._model.write_context_kv(rows.aux_hidden, rows.positions, rows.cache_loc, pool, accept_len)

    def _run_block(self, cycle: Cycle) -> DraftOutput:
        """One forward over the draft's rows of all blocks."""
        width = self._draft_width
        # The first `width` positions of the verified block, with host lengths to match.
        columns = None if width == self._verify_width else slice(0, width)
        view = self._view.of(cycle)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=cycle.bs,
            input_ids=cycle.tokens[:, :width].flatten(),
            req_pool_indices=cycle.req_pool_indices,
            seq_lens=view.seq_lens,
            out_cache_loc=cycle.cache_loc,
            seq_lens_sum=int(view.host_lens.sum()),
            seq_lens_cpu=view.host_lens,
            positions=cycle.positions[:, :width].flatten(),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._block_input,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=cycle.bs * width,
            can_run_decode_cuda_graph=cycle.can_run_cuda_graph,
        )
        view.kv_loc_plan.bind(forward_batch, self._runner.kv_index_translator, cols=columns)
        return self._runner.forward(forward_batch).logits_output
