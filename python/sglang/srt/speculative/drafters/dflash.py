"""The DFlash drafter (arXiv 2602.06036): one non-causal forward per block, context written from the target's states."""

import torch
import torch.distributed as dist
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.srt.speculative.acceptance import Verdict
from sglang_dflash.srt.speculative.dflash_info import Cycle, DFlashVerifyInput
from sglang_dflash.srt.speculative.drafters import DraftBlock


class DFlashDrafter:
    """Drives the draft model through a SGLang model runner of its own.

    The draft's KV pool is indexed by the target's slots, so prefix-cache hits, retraction and aborts need no
    bookkeeping here: whoever wrote a slot's target KV wrote its draft KV as well.
    """

    def __init__(self, draft_runner, target_model, verify_width: int):
        self._runner = draft_runner
        self._model = draft_runner.model
        self._mask_token_id = self._model.draft.mask_token_id
        self._verify_width = verify_width
        # Rows in front of the first one that drafts. Where the anchor's row drafts too, the last position needs no row.
        self._idle_rows = 0 if self._model.draft.sample_from_anchor else 1
        self._draft_width = verify_width - 1 + self._idle_rows
        self._block_input = DFlashVerifyInput(
            draft_token_num=self._draft_width, capture_hidden_mode=CaptureHiddenMode.NULL
        )
        self._model.borrow_from_target(target_model.get_input_embeddings(), target_model.lm_head)
        self._model.stack_kv_weights()

    def prefill(self, aux_hidden: torch.Tensor, positions: torch.Tensor, cache_loc: torch.Tensor) -> None:
        self._model.write_context_kv(aux_hidden, positions, cache_loc, self._runner.token_to_kv_pool)

    def propose(self, cycle: Cycle) -> DraftBlock:
        tokens = cycle.bonus_tokens.new_full((cycle.bs, self._verify_width), self._mask_token_id)
        tokens[:, 0] = cycle.bonus_tokens
        if self._verify_width > 1:
            hidden = self._run_block(cycle, tokens[:, : self._draft_width])
            drafted = greedy_tokens(hidden[:, self._idle_rows :].flatten(0, 1), self._model.head)
            tokens[:, 1:] = self._model.to_target_ids(drafted).view(cycle.bs, -1)
        return DraftBlock(tokens=tokens)

    def commit(self, cycle: Cycle, aux_hidden: torch.Tensor, verdict: Verdict) -> None:
        # Every row of the block is written, the rejected ones too: their slots hold nothing anyone reads before the
        # next block, which starts at the first of them, overwrites them. That spares a compaction of kept rows.
        self._model.write_context_kv(
            aux_hidden,
            cycle.positions.flatten(),
            cycle.kv_loc_plan.write_ids(self._runner.kv_index_translator),
            self._runner.token_to_kv_pool,
        )

    def _run_block(self, cycle: Cycle, tokens: torch.Tensor) -> torch.Tensor:
        """One forward over the draft's rows of all blocks: tokens [bs, D] -> hidden states [bs, D, hidden]."""
        width = self._draft_width
        # The first `width` positions of the verified block, with host lengths to match.
        columns = None if width == self._verify_width else slice(0, width)
        host_lens = cycle.host_lens - (self._verify_width - width)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=cycle.bs,
            input_ids=tokens.flatten(),
            req_pool_indices=cycle.req_pool_indices,
            seq_lens=cycle.seq_lens,
            out_cache_loc=cycle.cache_loc,
            seq_lens_sum=int(host_lens.sum()),
            seq_lens_cpu=host_lens,
            positions=cycle.positions[:, :width].flatten(),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._block_input,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=tokens.numel(),
            can_run_decode_cuda_graph=cycle.can_run_cuda_graph and width == self._verify_width,
        )
        cycle.kv_loc_plan.bind(forward_batch, self._runner.kv_index_translator, cols=columns)
        output = self._runner.forward(forward_batch).logits_output
        return output.hidden_states.view(cycle.bs, width, -1)


def greedy_tokens(hidden: torch.Tensor, lm_head) -> torch.Tensor:
    """Argmax of an LM head: hidden [n, hidden] -> token ids [n] int64, equal on all TP ranks.

    A vocabulary-parallel head is not gathered: ranks exchange their best logit and its id.
    """
    logits = lm_head.quant_method.apply(lm_head, hidden)
    shard = lm_head.shard_indices
    best, index = logits[:, : shard.num_org_elements].max(dim=-1)
    index = index + shard.org_vocab_start_index
    group = get_parallel().tp_group
    if group.world_size == 1:
        return index
    all_best = [torch.empty_like(best) for _ in range(group.world_size)]
    all_index = [torch.empty_like(index) for _ in range(group.world_size)]
    dist.all_gather(all_best, best, group=group.device_group)
    dist.all_gather(all_index, index, group=group.device_group)
    winner = torch.stack(all_best).argmax(dim=0, keepdim=True)
    return torch.stack(all_index).gather(0, winner).squeeze(0)
