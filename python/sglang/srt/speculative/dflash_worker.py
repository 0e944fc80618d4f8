"""The conductor of a speculative cycle: draft -> verify -> accept -> commit.

Speaks SGLang's spec-V2 worker contract to the scheduler (docs/contracts.md) and holds no per-request state:
what crosses a cycle is the bonus token and the length (`DFlashDraftInput`), which SGLang relays.

At decode entry with committed length n, target and draft KV exist for positions 0..n-1 in the same slots, and
the bonus token at position n has neither. The block covers n..n+B-1. After a drafts are kept the committed
length is n + a + 1, and draft KV for n..n+a comes from the aux hidden states of this step's verify."""

import logging

import torch
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from sglang.srt.speculative.spec_utils import GrammarTree

from sglang_dflash.kernels.ops.speculative.accept import Acceptance, accept_greedy, settle
from sglang_dflash.srt.models.dflash import DFlashDraftModel
from sglang_dflash.srt.models.dflash2 import DFlash2DraftModel
from sglang_dflash.srt.models.mask_token import read_mask_embedding
from sglang_dflash.srt.models.peagle import PEagleDraftModel
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.acceptance.constraints import constrain
from sglang_dflash.srt.speculative.acceptance.greedy import Verdict
from sglang_dflash.srt.speculative.acceptance.penalties import Penalties
from sglang_dflash.srt.speculative.acceptance.rejection import (
    accept_by_block_verification,
    accept_by_rejection,
)
from sglang_dflash.srt.speculative.acceptance.simulated import SimulatedAcceptance
from sglang_dflash.srt.speculative.acceptance.target_sampling import draw_target_tokens, target_probs
from sglang_dflash.srt.speculative.cycle.verify_tail import VerifyTail
from sglang_dflash.srt.speculative.dflash_info import Cycle, DFlashDraftInput, DFlashVerifyInput, Prompts
from sglang_dflash.srt.speculative.dflash_utils import PhaseClock, check_kv_budget, check_target_model
from sglang_dflash.srt.speculative.drafters import copy_switch
from sglang_dflash.srt.speculative.drafters.base import DraftBlock
from sglang_dflash.srt.speculative.drafters.copy_ahead import CopyAhead
from sglang_dflash.srt.speculative.drafters.copy_stats import Outcomes
from sglang_dflash.srt.speculative.drafters.dflash import DFlashDrafter
from sglang_dflash.srt.speculative.drafters.dflash2 import DFlash2Drafter
from sglang_dflash.srt.speculative.drafters.peagle import PEagleDrafter
from sglang_dflash.srt.speculative.drafters.prewarm import prewarm_probabilistic_step
from sglang_dflash.srt.speculative.scale_out.disaggregation import arrivals
from sglang_dflash.srt.speculative.scale_out.dp_attention import DraftRanks, keep_in_step, run_idle
from sglang_dflash.srt.speculative.targets.states import states_of
from sglang_dflash.srt.speculative.targets.weight_updates import route_weight_updates
from sglang_dflash.srt.speculative.width.adaptive import FixedWidth
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings
from sglang_dflash.srt.speculative.width.start_up import start_adaptive

logger = logging.getLogger(__name__)

_DRAFTERS = {
    DFlashDraftModel: DFlashDrafter,
    DFlash2DraftModel: DFlash2Drafter,
    PEagleDraftModel: PEagleDrafter,
}


class DFlashWorker(BaseSpecWorker):
    """Built by the scheduler once the target's weights are loaded; from then on it stands in for the target's
    worker."""

    def __init__(self, server_args, gpu_id: int, nccl_port: int, target_worker: TpModelWorker):
        super().__init__()
        self._target_worker = target_worker
        target_runner = target_worker.model_runner
        self.device = target_worker.device
        self._gpu_id = gpu_id
        spec = get_spec()
        # The anchor and the drafted tokens: the most a cycle verifies, and what SGLang reserves for. How many
        # rows the draft runs for them is the drafter's business, how many of them a cycle verifies the
        # width's.
        self.verify_width = spec.speculative_num_draft_tokens
        # Read by SGLang's metrics.
        self.speculative_num_steps = spec.speculative_num_steps
        self.speculative_num_draft_tokens = self.verify_width
        self._ranks = DraftRanks()
        self.draft_parallel_layout = self._ranks.layout  # by which SGLang sizes the draft's KV
        with self._ranks.as_draft():
            self._draft_worker = TpModelWorker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                is_draft_worker=True,
                # The draft runs at the target's positions, whatever its own config says about its length.
                context_length=target_runner.model_config.context_len,
                draft_attention_backend=spec.speculative_draft_attention_backend,
            )
        self._draft_worker.draft_runner = (
            self._draft_worker.model_runner
        )  # where SGLang's device timers look for it
        draft_model = self._draft_worker.model_runner.model
        check_target_model(target_runner.model, len(draft_model.draft.target_layer_ids))
        checkpoint = spec.speculative_draft_model_path, spec.speculative_draft_model_revision
        draft_model.prepare_mask(target_worker.tokenizer, read_mask_embedding(*checkpoint))
        drafter = _DRAFTERS[type(draft_model)](
            self._draft_worker.model_runner, target_runner.model, self.verify_width
        )
        self._drafter = self._ranks.place(drafter, target_runner.model)
        self._rejection_rule = None
        if spec.speculative_use_rejection_sampling:
            by_block = spec.speculative_use_block_verification
            self._rejection_rule = accept_by_block_verification if by_block else accept_by_rejection
        # Ranks that disagree on one token hang at the next collective: what was chosen, rank 0 chooses for
        # all of them. (SGLANG_SPEC_TP_SYNC says where; nothing happens with one rank.)
        self._tp_sync = SpecTpSync(get_dp_tp_group())
        self._simulated = SimulatedAcceptance.from_environment()
        self._clock = PhaseClock.from_environment()
        self._metrics = DFlashMetrics.from_server(self.verify_width - 1)
        self._width = FixedWidth(self.verify_width)
        self._copies: Outcomes | None = None
        route_weight_updates(target_runner, self._draft_worker.model_runner)
        logger.info(
            "sglang-dflash %s with %s: block size %d, %d draft layers reading target layers %s, draft attention %s.",
            type(self).__name__,
            type(drafter).__name__,
            self.verify_width,
            draft_model.draft.num_hidden_layers,
            list(draft_model.draft.target_layer_ids),
            spec.speculative_draft_attention_backend,
        )

    def __getattr__(self, name):
        # SGLang treats this worker as the target's in many places. Guarded, or a lookup before __init__
        # recurses.
        if name == "_target_worker":
            raise AttributeError(name)
        return getattr(self._target_worker, name)

    # -- start-up

    def alloc_memory_pool(
        self, memory_pool_config=None, req_to_token_pool=None, token_to_kv_pool_allocator=None
    ):
        # Without a request table given, the draft's runner makes one of its own.
        table = None if self._drafter.has_own_table else req_to_token_pool
        with self._ranks.as_draft():
            super().alloc_memory_pool(memory_pool_config, table, token_to_kv_pool_allocator)
        target_runner = self._target_worker.model_runner
        check_kv_budget(target_runner, self._draft_worker.model_runner)
        self._drafter.attach_pools(target_runner)
        self.verify_tail = VerifyTail(self._drafter, target_runner, self._draft_worker.model_runner)
        pool_size = target_runner.req_to_token_pool.req_to_token.shape[0]
        self._penalties = Penalties(pool_size, target_runner.model_config.vocab_size, self.device)

    def init_attention_backends(self):
        with self._ranks.as_draft(), self._draft_width():
            super().init_attention_backends()
        self._target_states = states_of(self._target_worker, self.verify_width)

    def init_cuda_graphs(self):
        # Where nothing is ever drafted there is nothing to capture.
        captures = self.verify_width > 1 and self._ranks.may_capture(self._tp_sync, self.device, self._gpu_id)
        with self._ranks.as_draft(), self._draft_width():
            self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=captures)
        settings = AdaptiveSettings.from_environment()
        if settings is not None:
            self._width = start_adaptive(self, settings, get_parallel().tp_group, self._metrics)
        if copy_switch.is_asked_for():
            # After what adaptive width measures, which has no texts.
            self._drafter = CopyAhead.of(
                self._drafter, self._target_worker.model_runner, self.verify_width, self._metrics
            )
            self._copies = self._drafter.outcomes

    def prewarm_sampling(self):
        """Called once at start-up, when both models' graphs exist."""
        result = super().prewarm_sampling()
        if self._rejection_rule is not None and self.device == "cuda" and self.verify_width > 1:
            runner = self._target_worker.model_runner
            with self._ranks.as_draft():
                prewarm_probabilistic_step(
                    self._draft_worker.model_runner.model,
                    runner.model_config.hidden_size,
                    runner.max_running_requests,
                    self.verify_width,
                    runner.model_config.vocab_size,
                    runner.model_config.dtype,
                    self.device,
                )
        return result

    def _draft_width(self):
        """The draft's backends and graphs are made for the width of its own block, which need not be the
        verified one's."""
        return get_spec().override(speculative_num_draft_tokens=max(1, self._drafter.block_width))

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """SGLang copies lengths to the host each step if any of these asks for it."""
        return (self._target_worker.model_runner.attn_backend, self._draft_worker.model_runner.attn_backend)

    @property
    def drafter(self):
        return self._drafter

    @property
    def width_report(self) -> dict:
        """What `/server_info` says about the verify width."""
        return self._width.report()

    @property
    def copy_report(self) -> dict:
        """What it says about copies."""
        return self._copies.report() if self._copies is not None else {}

    def weight_update_runners(self):
        return [("draft", self._draft_worker.model_runner)]

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Called by the scheduler once a step's accept lengths are on the host."""
        drafted = self._width.on_accept_lens(num_correct_drafts_per_req)
        self._metrics.count_verified(num_correct_drafts_per_req, drafted)
        if self._copies is not None:
            self._copies.kept(num_correct_drafts_per_req, drafted)

    # -- one step

    def forward_batch_generation(
        self, batch, on_publish=None, grammar_barrier=None, pp_proxy_tensors=None
    ) -> GenerationBatchResult:
        """Called once per scheduler step with a prefill, mixed, decode or, with DP attention, idle batch."""
        if batch.forward_mode.is_idle():
            return run_idle(batch, self._target_worker, self.verify_width)
        if batch.sampling_info is not None and batch.sampling_info.sampling_seed is not None:
            # SGLang seeds a draw with the token's rank if some request of the batch filters, else with its
            # id. Always by rank, it does not depend on the others.
            batch.sampling_info.need_top_k_sampling = True
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish, grammar_barrier)
        return self._decode(batch, on_publish, grammar_barrier)

    def _prefill(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        """Target prefill, capturing every token's aux hidden states; the draft's KV of those tokens is
        written before this returns, because the scheduler may then hand the slots to the prefix cache."""
        prompts = Prompts.of(batch)
        self._width.on_prefill(batch, prompts.num_running)
        self._drafter.begin_prefill(prompts)
        is_penalized = Penalties.are_asked_for(batch.sampling_info)
        if is_penalized:
            self._penalties.begin_prefill(batch, prompts.num_running)
        if prompts.num_running and batch.has_grammar and grammar_barrier is not None:
            # Under overlap the running requests' grammars may be a step behind, and SGLang samples in this
            # very forward.
            grammar_barrier()
        result = self._target_worker.forward_batch_generation(
            batch, capture_hidden_mode=CaptureHiddenMode.FULL, return_kv_loc_plan=True
        )
        plan, result.kv_loc_plan = result.kv_loc_plan, None
        # The very object the batch holds: SGLang then knows that prefill did not change the lengths.
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        # Tensor parallelism may pad the token dimension; padding rows come last.
        aux_hidden = result.logits_output.hidden_states[: prompts.positions.numel()]
        cache_loc = plan.write_ids(self._draft_worker.model_runner.kv_index_translator)
        next_tokens = self._tp_sync.sync(SpecTpSyncSite.DFLASH_TARGET, result.next_token_ids).long()
        if is_penalized:
            self._penalties.count_prefill(batch, next_tokens)
        self._drafter.prefill(prompts, aux_hidden, cache_loc, next_tokens)
        result.logits_output.hidden_states = None  # or SGLang copies them to the host
        result.next_draft_input = DFlashDraftInput(
            next_tokens, result.new_seq_lens, new_seq_lens_cpu=prompts.lens_cpu
        )
        return result

    def _take_arrivals(self) -> None:
        """Requests that another server has prefilled, before their first cycle."""
        for arrival in arrivals.take():
            self._width.on_prefill(arrival, 0)
            self._drafter.join(arrival)
            self._penalties.join(arrival)

    def _decode(self, batch, on_publish, grammar_barrier) -> GenerationBatchResult:
        clock = self._clock
        clock.start()
        self._take_arrivals()
        draws_drafts = self._draws_drafts(batch)
        # Settled before anything is drafted: what is verified may not depend on what was drawn.
        width = self.speculative_num_draft_tokens = self._width.choose_width(batch, draws_drafts)
        clock.lap("prepare")
        cycle, block = self.draft_block(batch, width, batch.sampling_info if draws_drafts else None)
        # Its copy to the host has to be on its way before verify is: grammars then run beside it on the host.
        grammar_tree = GrammarTree.from_linear_chain(block.tokens) if batch.has_grammar else None
        clock.lap("draft")
        target_out = self._verify(batch, cycle, block)
        logits_output = target_out.logits_output
        clock.lap("verify")
        constrain(
            batch,
            block.tokens,
            logits_output.next_token_logits,
            self._penalties,
            grammar_tree,
            grammar_barrier,
        )
        verdict, accepted = self._accept(batch, cycle, block, logits_output.next_token_logits)
        if Penalties.are_asked_for(batch.sampling_info):
            self._penalties.count_block(batch, verdict)
        self._target_states.commit(batch, accepted.commit_lens)
        if on_publish is not None:
            on_publish(accepted.new_seq_lens)
        if batch.return_logprob:
            compute_spec_logprobs(batch, logits_output, verdict.out_tokens.flatten(), chain_stride=width)
        clock.lap("accept")
        self._drafter.commit(cycle, self.verify_tail.left_to_commit(target_out), verdict)
        logits_output.hidden_states = None
        clock.lap("commit")
        clock.end_cycle(cycle.bs)
        self._width.on_launched()
        return GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=accepted.said.flatten(),
            accept_lens=accepted.commit_lens,
            next_draft_input=DFlashDraftInput(
                verdict.bonus, accepted.new_seq_lens, new_seq_lens_cpu=cycle.new_seq_lens_cpu
            ),
            new_seq_lens=accepted.new_seq_lens,
            can_run_cuda_graph=target_out.can_run_cuda_graph,
            speculative_num_draft_tokens=width,
            routed_experts_output=target_out.routed_experts_output,
            indexer_topk_output=target_out.indexer_topk_output,
        )

    def draft_block(self, batch, width: int, sampling_info) -> tuple[Cycle, DraftBlock]:
        """The first `width` slots of a block per request. The draft fills the whole of it, or, where none of
        it is to be verified, does not run. sampling_info: where its tokens are drawn."""
        cycle = self._begin_cycle(batch, self.verify_width if width > 1 else 1)
        block = self._drafter.propose(cycle, sampling_info)
        if block.probs is not None:
            self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, block.tokens)
        return cycle.narrowed(width), block.narrowed(width)

    def _begin_cycle(self, batch, width: int) -> Cycle:
        return Cycle.begin(batch, self._target_worker.model_runner, self._drafter.mask_token_id, width)

    def _verify(self, batch, cycle: Cycle, block: DraftBlock) -> GenerationBatchResult:
        """One causal target forward over all blocks: logits [bs * B, vocab] and aux hidden states of every
        row.

        The scheduler restores the batch's fields after this step, so they may be overwritten.
        """
        runner = self._target_worker.model_runner
        tokens = block.tokens.flatten()
        batch.input_ids = tokens
        batch.out_cache_loc = cycle.cache_loc
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.seq_lens_cpu = cycle.host_lens
        batch.seq_lens_sum = int(cycle.host_lens.sum())
        batch.spec_info = DFlashVerifyInput.of_target(cycle.width, tokens, cycle.positions.flatten())
        self._target_states.begin_verify(batch)
        forward_batch = ForwardBatch.init_new(
            batch,
            runner,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            return_hidden_states_before_norm=False,
            kv_loc_plan=cycle.kv_loc_plan,
            write_cols=cycle.write_cols,
        )
        keep_in_step(forward_batch)
        return self._target_worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True
        )

    def _draws_drafts(self, batch) -> bool:
        """Whether this batch's blocks are drawn from the draft's distribution: where the server asks for it,
        and some request samples. Seeded draws are the target's alone, by position, so that batch mates do not
        matter."""
        info = batch.sampling_info
        if self._rejection_rule is None or info.is_all_greedy:
            return False
        if info.sampling_seed is not None:
            self._metrics.count_fallback("sampling_seed", blocks=len(info))
            return False
        return True

    def _accept(
        self, batch, cycle: Cycle, block: DraftBlock, logits: torch.Tensor
    ) -> tuple[Verdict, Acceptance]:
        """What is kept, and what that leaves behind. What rests on broken logits the scheduler is told as a
        token outside the vocabulary, at which it ends the request with "NaN happened"."""
        broken_token = self._target_worker.model_runner.model_config.vocab_size
        if block.probs is not None:
            verdict, best = self._reject(batch, block, logits)
        else:
            target_tokens, best = self._target_tokens(batch, cycle, logits)
            accepted = accept_greedy(block.tokens, target_tokens, best, cycle.seq_lens, broken_token)
            verdict = Verdict(accepted.accept_len, target_tokens, accepted.bonus)
            if self._simulated is None:
                return verdict, accepted
        if self._simulated is not None:
            verdict = self._simulated.override(verdict, block.tokens)
            best = torch.zeros_like(best)  # random weights may say anything
        return verdict, settle(verdict, best, cycle.seq_lens, broken_token)

    def _target_tokens(self, batch, cycle: Cycle, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`draw_target_tokens` under each request's own sampling parameters."""
        info = batch.sampling_info
        if batch.return_logprob and not info.is_all_greedy:
            logits = (
                logits.clone()
            )  # sampling overwrites them, and the log probabilities are still to be read
        sampler = self._target_worker.model_runner.sampler
        tokens, best = draw_target_tokens(
            logits, info, cycle.positions.flatten(), cycle.positions.shape[1], sampler
        )
        greedy, sampled = SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        return self._tp_sync.sync(greedy if info.is_all_greedy else sampled, tokens), best

    def _reject(self, batch, block: DraftBlock, logits: torch.Tensor) -> tuple[Verdict, torch.Tensor]:
        """Keep what was drawn as often as the target would have, given what the draft's probabilities
        were."""
        bs, width = block.tokens.shape
        if batch.return_logprob:
            logits = logits.clone()  # they are overwritten, and the log probabilities are still to be read
        probs, best = target_probs(logits, batch.sampling_info, width)
        uniforms = torch.rand(bs, width, device=logits.device)
        verdict = self._rejection_rule(block.tokens, probs, block.probs, uniforms[:, 1:], uniforms[:, 0])
        return self._agree(verdict), best

    def _agree(self, verdict: Verdict) -> Verdict:
        """Rank 0's, in one broadcast."""
        site = SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        if not self._tp_sync.enabled(site):
            return verdict
        decided = self._tp_sync.sync(
            site, torch.cat((verdict.out_tokens, verdict.accept_len[:, None]), dim=1)
        )
        out_tokens, accept_len = decided[:, :-1].contiguous(), decided[:, -1:]
        return Verdict(accept_len[:, 0].int(), out_tokens, out_tokens.gather(1, accept_len)[:, 0])
