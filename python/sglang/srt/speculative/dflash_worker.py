"""The scheduler's worker for DFLASH: start-up, prefill and decode cycles.

A cycle is draft -> verify -> accept -> commit. CUDA graphs hold the draft's forward and the verify forward.
The latter ends with what of the commit needs no acceptance (`VerifyTail`).

Follows SGLang's contract for speculative workers, version 2 (docs/dev/contracts.md), and keeps no state per
request. The bonus token and the length cross a cycle in `DFlashDraftInput`, which SGLang relays.

At the start of a decode step with n committed tokens, target and draft have KV for positions 0..n-1 in the
same slots. The bonus token at position n has none. The block covers n..n+B-1. If a drafted tokens are
accepted, n + a + 1 tokens are committed. The draft's KV for n..n+a comes from the aux hidden states of this
step's verify."""

from collections import deque
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_parallel, get_serving, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree

from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks
from sglang_dflash.srt.compat import resolve_draft_ranks, run_as_draft
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.observability.traffic import start_recording
from sglang_dflash.srt.speculative.acceptance.acceptor import Acceptor
from sglang_dflash.srt.speculative.acceptance.constraints import Penalties, constrain
from sglang_dflash.srt.speculative.acceptance.processors import need_tokens
from sglang_dflash.srt.speculative.caps import requested_caps
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.lengths import check_backends
from sglang_dflash.srt.speculative.cycle.observer import CycleObserver, observers_from_environment
from sglang_dflash.srt.speculative.cycle.plan import CycleInFlight, CyclePlan, Proposals
from sglang_dflash.srt.speculative.cycle.prompts import Prompts
from sglang_dflash.srt.speculative.cycle.verify import verify
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput
from sglang_dflash.srt.speculative.dflash_utils import defer_row_reuse, has_room_for_draft_graphs
from sglang_dflash.srt.speculative.drafters.base import VerifyTail
from sglang_dflash.srt.speculative.drafters.blocks import draft_blocks
from sglang_dflash.srt.speculative.drafters.build import build_drafter, load_draft, without_logits_buffer
from sglang_dflash.srt.speculative.drafters.copies import Copies, CopySource, CopyStats, Matches
from sglang_dflash.srt.speculative.idle_rank import run_idle
from sglang_dflash.srt.speculative.kv_pool import check_shares_slots, limit_to_kv_pool
from sglang_dflash.srt.speculative.targets.recurrent import RecurrentStates, log_if_states_cap_batch
from sglang_dflash.srt.speculative.warm_up import warm_up
from sglang_dflash.srt.speculative.width.controller import LengthChooser, WholeBlocks
from sglang_dflash.srt.speculative.width.measure import lens_to_measure, make_chooser


def _do_nothing(*_: Any) -> None:
    """Stand for what SGLang does during a step with overlap scheduling alone."""


class DFlashWorker(BaseSpecWorker):
    """The scheduler's worker, which replaces the target's once its weights are loaded.

    Attributes:
        block_size: slots of a block, the anchor included: the most that a cycle verifies.
        drafter: fills blocks and keeps the draft's context.
        acceptor: decides which drafted tokens are output.
        observers: called at each stage of a step.
    """

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker):
        super().__init__()
        self._target_worker = target_worker
        target_runner = target_worker.model_runner
        self.device = target_worker.device
        self.gpu_id = gpu_id
        spec = get_spec()
        # SGLang's metrics read the two other names.
        self.block_size = self.speculative_num_draft_tokens = spec.speculative_num_draft_tokens
        self.speculative_num_steps = spec.speculative_num_steps
        # The target's ranks, or with DP attention those sharing requests. SGLang sizes the draft's KV by it.
        ranks = self.draft_parallel_layout = resolve_draft_ranks()
        self._draft_worker = load_draft(
            server_args, gpu_id=gpu_id, nccl_port=nccl_port, target_worker=target_worker, draft_ranks=ranks
        )
        draft_runner = self._draft_worker.model_runner
        self.metrics = DFlashMetrics.from_server(self.block_size - 1)
        self.drafter = build_drafter(draft_runner, target_runner.model, self.block_size, ranks)
        self.copies = CopySource(self.block_size, CopyStats(self.metrics))
        self.tp_sync = SpecTpSync(get_dp_tp_group())
        self._lengths: LengthChooser = WholeBlocks(self.block_size)
        self._in_flight: deque[CycleInFlight] = deque()  # launched cycles, oldest first
        self._recorder = start_recording(target_worker, self.metrics.count_recorded)
        self.observers: list[CycleObserver] = []

    def __getattr__(self, name: str) -> Any:
        # SGLang uses this worker as the target's in many places. A lookup before __init__ would recurse.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    # -- start-up

    def alloc_memory_pool(
        self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None
    ):
        """Allocate the draft's KV pool on the target's slots, and the tables of request rows."""
        # If no request table is given, the draft's runner makes its own.
        table = None if self.drafter.has_own_table else req_to_token_pool
        with run_as_draft(self.draft_parallel_layout):
            super().alloc_memory_pool(memory_pool_config, table, token_to_kv_pool_allocator)
        target_runner = self._target_worker.model_runner
        check_shares_slots(target_runner, self._draft_worker.model_runner)
        log_if_states_cap_batch(target_runner, self.block_size)
        self.drafter.attach_pools(target_runner)
        limit_to_kv_pool(target_runner)
        self.verify_tail = VerifyTail(self.drafter, target_runner)
        num_rows = target_runner.req_to_token_pool.req_to_token.shape[0]
        self.penalties = Penalties(num_rows, target_runner.model_config.vocab_size, self.device)
        self.acceptor = Acceptor.for_server(target_runner, self.tp_sync, self.metrics)

    def init_attention_backends(self):
        """Make the attention backends of both models."""
        with run_as_draft(self.draft_parallel_layout), self._with_draft_rows():
            super().init_attention_backends()
        check_backends(*self.spec_v2_attn_backends)
        self.target_states = RecurrentStates(self._target_worker, self.block_size)

    def init_cuda_graphs(self):
        """Capture the draft's CUDA graphs, and measure cycles if the verify length is adaptive."""
        ranks = self.draft_parallel_layout
        # Not with DP attention: SGLang's graph runner asks every batch for the other ranks' rows, and the
        # draft runs without those ranks.
        captures = self.block_size > 1 and not ranks.local_dp
        captures = captures and has_room_for_draft_graphs(self.tp_sync, self.device, self.gpu_id)
        verify_lens = lens_to_measure(self)
        self._draft_worker.model_runner.model.ends_before_head = bool(verify_lens)
        with run_as_draft(ranks), self._with_draft_rows(), without_logits_buffer(self.device):
            self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=captures)
        self._lengths = make_chooser(self, verify_lens, get_parallel().tp_group, self.metrics)
        if DFlashOptions.COPY_AHEAD.get():
            target_runner = self._target_worker.model_runner
            rows, context_len = target_runner.req_to_token_pool.req_to_token.shape
            vocab_size = target_runner.model_config.vocab_size
            self.copies.allocate(rows, context_len, vocab_size, torch.device(target_runner.device))
        # Each holds a table by request row, and is told about every request that takes one, in this order.
        self._row_tables = (self._lengths, self.copies, self.drafter, self.penalties)
        # Observers see no cycle that is measured above: it belongs to no request.
        self.observers = observers_from_environment()

    def prewarm_sampling(self):
        """Allocate the memory of cycles and compile their kernels, once all graphs exist."""
        result = super().prewarm_sampling()
        target_runner = self._target_worker.model_runner
        if target_runner.req_to_token_pool.req_to_token.is_cuda:
            headroom = warm_up(self, self._lengths)
            # SGLang sizes the KV pool next, and leaves this room.
            if target_runner.token_to_kv_pool.post_capture_active:
                result = replace(result, sampling_headroom_bytes=headroom)
                target_runner.sampling_prewarm_result = result
        # Cycles until here have told SGLang that it may rewrite rows, which is not so in the first step.
        defer_row_reuse(target_runner)
        return result

    def _with_draft_rows(self):
        """Make the draft's backends and graphs for the rows of the draft's block."""
        return get_spec().override(speculative_num_draft_tokens=max(1, self.drafter.num_draft_rows))

    # -- read by SGLang

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """Attention backends. If one needs lengths, SGLang copies them to the host each step."""
        return (self._target_worker.model_runner.attn_backend, self._draft_worker.model_runner.attn_backend)

    @property
    def reports(self) -> dict[str, dict[str, Any]]:
        """Fields of `/server_info`. Features that are off are left out."""
        return {
            "speculative_width": self._lengths.report(),
            "speculative_copy_ahead": self.copies.stats.report() if DFlashOptions.COPY_AHEAD.get() else {},
            "speculative_record": dict(self._recorder.writer.counts) if self._recorder else {},
        }

    def weight_update_runners(self):
        """List the runners whose weights may be updated beside the target's."""
        return [("draft", self._draft_worker.model_runner)]

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Learn from a cycle. The scheduler calls this once the accept lengths are on the host."""
        accept_lens = num_correct_drafts_per_req
        if not accept_lens:
            return  # an idle rank
        cycle = self._in_flight.popleft()
        assert len(accept_lens) == len(cycle.reqs), "SGLang reports every cycle once, in order"
        max_accept = cycle.plan.max_accept.tolist()
        self.metrics.count_verified(accept_lens, max_accept, get_serving().weight_version)
        if self._recorder is not None:
            self._recorder.on_cycle(cycle.reqs, accept_lens, max_accept)
        self.copies.stats.on_accept_lens(cycle.proposals, accept_lens, max_accept)
        self._lengths.on_accept_lens(accept_lens, cycle.proposals)

    # -- one step

    def forward_batch_generation(
        self, batch, on_publish=_do_nothing, grammar_barrier=_do_nothing, pp_proxy_tensors=None
    ) -> GenerationBatchResult:
        """Run one scheduler step: a prefill, mixed, decode or, with DP attention, idle batch."""
        if batch.forward_mode.is_idle():
            return run_idle(batch, self._target_worker, self.block_size)
        if batch.sampling_info.sampling_seed is not None:
            # SGLang seeds a draw with the token's rank if some request of the batch filters, else with its
            # id. Always by rank, a draw does not depend on the other requests.
            batch.sampling_info.need_top_k_sampling = True
        run = self.prefill if batch.forward_mode.is_extend() else self.decode
        return run(batch, on_publish, grammar_barrier)

    def prefill(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        """Run the target's prefill, and write the draft's KV of the same tokens.

        The draft's KV is written before this returns: the scheduler may then give the slots to the prefix
        cache."""
        prompts = Prompts.from_batch(batch)
        for table in self._row_tables:
            table.begin_prefill(prompts)
        is_penalized = Penalties.are_requested(batch.sampling_info)
        if is_penalized:
            self.penalties.penalize_prefill(batch)
        if prompts.num_running and batch.has_grammar:
            # Under overlap the running requests' grammars may be a step behind, and this forward samples.
            grammar_barrier()
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        plan, result.kv_loc_plan = result.kv_loc_plan, None
        # The same object that the batch holds tells SGLang that prefill did not change the lengths.
        result.new_seq_lens = batch.seq_lens
        on_publish(result.new_seq_lens)
        # Tensor parallelism may pad the token dimension. Padding rows come last.
        aux_hidden = result.logits_output.hidden_states[: prompts.positions.numel()]
        cache_loc = plan.write_ids(self._draft_worker.model_runner.kv_index_translator)
        next_tokens = self.tp_sync.sync(SpecTpSyncSite.DFLASH_TARGET, result.next_token_ids).long()
        if is_penalized:
            self.penalties.count(batch, next_tokens[:, None], torch.zeros_like(next_tokens).int())
        self.notify("on_prefilled", batch, prompts, aux_hidden)
        self.drafter.prefill(prompts, aux_hidden, cache_loc, next_tokens)
        self.copies.end_prefill(prompts, next_tokens)
        result.logits_output.hidden_states = None  # SGLang would copy them to the host
        result.next_draft_input = DFlashDraftInput(next_tokens, result.new_seq_lens)
        return result

    def decode(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        """Run one cycle for each request of the batch, at the verify length that pays."""
        self.notify("on_begun", batch)
        for requests in batch.spec_info.arrivals:
            for table in self._row_tables:
                table.admit_prefilled(requests)
        caps = requested_caps(batch.reqs, self.block_size)
        is_capped = bool(caps.min() < self.block_size - 1)
        draws = self.acceptor.draws_drafts(batch.sampling_info, is_capped)
        matches = self.copies.look_up(batch)
        plan = self._lengths.choose(batch, draws, matches.lengths, caps)
        verify_len = plan.layout.verify_len
        self.speculative_num_draft_tokens = verify_len
        self.notify("on_length_chosen", batch, verify_len)
        result, proposals = self.run_cycle(
            batch, plan=plan, matches=matches, on_publish=on_publish, grammar_barrier=grammar_barrier
        )
        self._in_flight.append(CycleInFlight(plan, proposals, [*batch.reqs]))
        self._lengths.on_launched()
        return result

    def run_cycle(
        self, batch, plan: CyclePlan, matches: Matches, on_publish=_do_nothing, grammar_barrier=_do_nothing
    ) -> tuple[GenerationBatchResult, Proposals | None]:
        """Draft, verify, constrain, accept and commit. Start-up measures this too.

        Args:
            batch: the scheduler's decode batch.
            plan: slots of each block to draft and to verify.
            matches: of the batch, by `CopySource.look_up`.
            on_publish: called with the new lengths as soon as they exist.
            grammar_barrier: SGLang's, waits until grammars are up to date.

        Returns:
            SGLang's result, and what `CopySource.record` returns.
        """
        layout = plan.layout
        cycle, block, copies, was_drafted = self._draft(batch, plan, matches)
        # The copy to the host starts before verify, so that grammars run beside it on the host.
        has_processors = batch.sampling_info.has_custom_logit_processor
        reads_chains = batch.has_grammar or (has_processors and need_tokens(batch.reqs))
        chains = GrammarTree.from_linear_chain(block.tokens) if reads_chains else None
        # Verify: one forward of the target over the rows of all blocks, planned with exact lengths.
        if batch.spec_info.arriving_lens is not None:
            cycle = replace(cycle, committed_host=batch.spec_info.arriving_lens.wait())
        if self.target_states.are_recurrent:
            self.target_states.begin_verify(batch)
        target_out = verify(self._target_worker, batch, cycle, block)
        logits_output, logits = target_out.logits_output, target_out.logits_output.next_token_logits
        self.notify("on_verified", batch, block, logits)
        # Constrain: apply all that shapes the logits of a request.
        constrain(
            batch,
            block=block.tokens,
            logits=logits,
            penalties=self.penalties,
            chains=chains,
            grammar_barrier=grammar_barrier,
            layout=layout,
        )
        # Accept: decide which tokens are output, and tell SGLang.
        accepted = self.acceptor.accept(
            batch, cycle=cycle, block=block, logits_output=logits_output, caps=plan.caps
        )
        if Penalties.are_requested(batch.sampling_info):
            self.penalties.count(batch, accepted.tokens, accepted.accept_len)
        if self.target_states.are_recurrent:
            self.target_states.commit(batch, accepted.commit_lens)
        on_publish(accepted.committed)
        if batch.return_logprob:
            places: dict[str, Any] = {"chain_stride": layout.verify_len}
            if not layout.is_rectangle:
                places = {"accept_index": layout.slots}
            compute_spec_logprobs(batch, logits_output, layout.to_rows(accepted.tokens), **places)
        self.notify("on_accepted", batch, cycle, accepted)
        # Commit: the draft and the copies take the accepted tokens.
        aux_hidden = self.verify_tail.states_to_commit(target_out)
        self.drafter.commit(cycle, aux_hidden, accepted)
        proposals = self.copies.record(cycle, copies, accepted, was_drafted)
        self.notify("on_committed", batch, cycle, aux_hidden, accepted)
        return _result(plan, target_out, accepted), proposals

    def _draft(self, batch, plan: CyclePlan, matches: Matches) -> tuple[Cycle, DraftBlock, Copies, bool]:
        """Fill the blocks, by the draft and by copies. Says whether the draft ran."""
        copies = self.copies.choose(batch, plan, matches)
        cycle, block, was_drafted = draft_blocks(
            self.drafter,
            batch=batch,
            plan=plan,
            block_size=self.block_size,
            needs_draft=plan.copies_each_match and self.copies.needs_draft(copies),
            target_runner=self._target_worker.model_runner,
        )
        cycle, block = cycle.with_layout(plan.layout), copies.overlay(block)
        self.acceptor.broadcast_drafts(block)
        self.notify("on_drafted", batch, cycle, block)
        return cycle, block, copies, was_drafted

    def notify(self, stage: str, *args: Any) -> None:
        for observer in self.observers:
            getattr(observer, stage)(*args)


def _result(plan: CyclePlan, target_out: Any, accepted: AcceptedBlocks) -> GenerationBatchResult:
    """Return a cycle's outcome as SGLang reads it."""
    target_out.logits_output.hidden_states = None
    return GenerationBatchResult(
        logits_output=target_out.logits_output,
        next_token_ids=accepted.reported.flatten(),
        accept_lens=accepted.commit_lens,
        # Slots that could be kept, the anchor included. They are on the host, and stay there.
        cap_lens=torch.from_numpy(plan.max_accept + 1),
        next_draft_input=DFlashDraftInput(accepted.bonus, accepted.committed),
        new_seq_lens=accepted.committed,
        can_run_cuda_graph=target_out.can_run_cuda_graph,
        speculative_num_draft_tokens=plan.verify_len,
        routed_experts_output=target_out.routed_experts_output,
        indexer_topk_output=target_out.indexer_topk_output,
    )
