"""Decide which drafted tokens of verified blocks become output."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers import overlap_utils
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite

from sglang_dflash.kernels.ops.speculative.accept import (
    AcceptedBlocks,
    RelayTables,
    accept_blocks,
    accept_matching_prefix,
)
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.acceptance.rejection import accept_drawn, rejection_rule
from sglang_dflash.srt.speculative.acceptance.simulation import Simulation, constant, simulation_of_server
from sglang_dflash.srt.speculative.acceptance.target_sampling import (
    SamplingMasks,
    draw_target_tokens,
    filters_of_sampled,
    target_probs,
)
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.host import on_device
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout
from sglang_dflash.srt.speculative.cycle.plan import NO_CAPS


def make_relay(num_rows: int, device: Any) -> Any:
    """Make tables of lengths and bonus tokens, and offer them to SGLang.

    It takes the tables under overlap scheduling, if it has not made its own. Tables that it has not taken are
    written as well, and not read. Release 0.5.22 cannot take any, and basic mode offers none.

    Args:
        num_rows: of the request table, and so of the tables.
        device: of the tables.
    """
    if DFlashOptions.BASIC_MODE.get() or not hasattr(overlap_utils, "FutureRelayBuffers"):
        lengths, tokens = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
        return SimpleNamespace(new_seq_lens=lengths, output_tokens=tokens)
    relay = overlap_utils.FutureRelayBuffers(req_pool_size=num_rows, device=device)
    overlap_utils.offer_future_relay_buffers(relay)
    return relay


def limit_to_caps(accept_len: torch.Tensor, layout: VerifyLayout, caps: np.ndarray) -> torch.Tensor:
    """Limit accept lengths [bs] int32 to what each request verifies, and to its cap."""
    if not layout.is_rectangle:
        accept_len = accept_len.minimum(layout.max_accept)
    if (caps < layout.num_draft_tokens).any():
        accept_len = accept_len.minimum(on_device(caps, torch.int32, accept_len.device))
    return accept_len


class Acceptor:
    """Accept drafted tokens so that the output is exactly the target's.

    Ranks that disagree on one token hang at the next collective, so rank 0 decides for all of them.
    SGLANG_SPEC_TP_SYNC says at which sites. Nothing is sent with one rank.

    Args:
        sampler: SGLang's sampler of the target.
        vocab_size: of the target. A request with broken logits reports this id, on which SGLang ends the
            request with "NaN happened".
        tp_sync: SGLang's synchronisation of the ranks that must choose the same tokens.
        rule: for drawn drafts, a key of REJECTION_RULES. None: no drafts are drawn.
        simulation: replaces all decisions, for benchmarks. None: decisions are real.
        metrics: counts batches that cannot be drawn.
        longest: the most tokens of a text, see `accept_blocks`.
        relay: of `make_relay`, takes lengths and bonus tokens for the next step.

    Attributes:
        can_draw: whether drafts are drawn.
    """

    def __init__(
        self,
        sampler: Any,
        vocab_size: int,
        tp_sync: SpecTpSync,
        rule: str,
        simulation: Simulation | None,
        metrics: DFlashMetrics,
        longest: int,
        relay: Any,
    ):
        self._metrics, self._longest, self._relay = metrics, longest, relay
        self._sampler, self._broken_token, self._tp_sync = sampler, vocab_size, tp_sync
        self.can_draw, self._rule, self._simulation = bool(rule), rule, simulation

    @classmethod
    def for_server(cls, target_runner: Any, tp_sync: SpecTpSync, metrics: DFlashMetrics) -> "Acceptor":
        """Make the acceptor that the server's options ask for, once the request table exists."""
        config, spec, device = target_runner.model_config, get_spec(), target_runner.device
        num_rows = target_runner.req_to_token_pool.req_to_token.shape[0]
        return cls(
            target_runner.sampler,
            vocab_size=config.vocab_size,
            tp_sync=tp_sync,
            rule=rejection_rule(spec),
            simulation=simulation_of_server(num_rows, spec.speculative_num_draft_tokens, device),
            metrics=metrics,
            longest=config.context_len,
            relay=make_relay(num_rows, device),
        )

    def draws_drafts(self, sampling_info: Any, is_capped: bool = False) -> bool:
        """Return whether a batch's blocks are drawn: if the server draws and some request samples.

        Seeded draws are the target's alone, by position, so that other requests of the batch do not matter.
        A cap shortens a block, which the rules for drawn blocks do not provide for.
        """
        if not self.can_draw or sampling_info.is_all_greedy:
            return False
        if sampling_info.sampling_seed is None and not is_capped:
            return True
        reason = "speculative_max_tokens" if is_capped else "sampling_seed"
        self._metrics.count_fallback(reason, blocks=len(sampling_info))
        return False

    def broadcast_drafts(self, block: DraftBlock) -> None:
        """Overwrite drawn tokens with rank 0's."""
        if block.probs is not None:
            self._tp_sync.sync(SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE, block.tokens)

    def accept(
        self, batch: Any, cycle: Cycle, block: DraftBlock, logits_output: Any, caps: np.ndarray = NO_CAPS
    ) -> AcceptedBlocks:
        """Accept verified blocks.

        Args:
            batch: the scheduler's.
            cycle: the step's blocks.
            block: the drafted tokens. Not drawn if a cap is below what a request verifies.
            logits_output: SGLang's, with logits [T, vocab] of the cycle's rows, biased and masked. Sampling
                overwrites them. It takes what the tokens were drawn from, if a request returns it.
            caps: the most drafted tokens of each request to accept. [bs]
        """
        sampling_info, layout, relay = batch.sampling_info, cycle.layout, self._relay
        masks = SamplingMasks(sampling_info, layout.verify_len)
        logits = logits_output.next_token_logits
        if batch.return_logprob and not sampling_info.is_all_greedy:
            logits = logits.clone()  # log probabilities are still to be read
        if not masks.are_requested:
            sampling_info = filters_of_sampled(batch)
        drawn_masks = probs = None
        accept_len = None  # `accept_blocks` decides
        if block.probs is not None:
            accept_len, tokens, max_logits, probs = self._reject(sampling_info, block, logits, layout)
        else:
            tokens, max_logits, drawn_masks = draw_target_tokens(
                logits,
                sampling_info=sampling_info,
                positions=cycle.positions,
                layout=layout,
                sampler=self._sampler,
            )
            greedy, sampled = SpecTpSyncSite.DFLASH_ACCEPT_GREEDY, SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
            tokens = self._tp_sync.sync(greedy if sampling_info.is_all_greedy else sampled, tokens)
        if self._simulation is not None:
            accept_len, tokens = self._simulation.decide(batch.req_pool_indices, tokens, block.tokens)
            accept_len = limit_to_caps(accept_len, layout, caps)
            # Random weights may give any logits.
            max_logits = constant(tuple(max_logits.shape), 0.0, max_logits.dtype, max_logits.device)
        elif block.probs is None and not (layout.is_rectangle and (caps >= layout.num_draft_tokens).all()):
            accept_len = limit_to_caps(accept_matching_prefix(block.tokens, tokens), layout, caps)
        accepted = accept_blocks(
            accept_len,
            tokens=tokens,
            max_logits=max_logits,
            committed=cycle.committed,
            broken_token=self._broken_token,
            relay=RelayTables(batch.req_pool_indices, relay.new_seq_lens, relay.output_tokens),
            longest=self._longest,
            block=block.tokens if accept_len is None else None,
        )
        # SGLang need not copy these lengths and tokens: they are in the tables.
        relay.published_seq_lens, relay.published_bonus = accepted.committed, accepted.bonus
        if masks.are_requested:
            probs = None if probs is None else layout.to_blocks(probs)
            logits_output.sampling_mask_output = masks.output(accepted, drawn_masks, probs)
        return accepted

    def _reject(
        self, sampling_info: Any, block: DraftBlock, logits: torch.Tensor, layout: VerifyLayout
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rank 0's accept lengths and tokens, largest logits, the target's distributions."""
        assert block.probs is not None
        probs, max_logits = target_probs(logits, sampling_info, layout)
        uniforms = torch.rand(block.tokens.shape, device=logits.device)
        accept_len, tokens = accept_drawn(
            self._rule,
            block=block.tokens,
            target_probs=probs,
            draft=block.probs,
            accept_uniforms=uniforms[:, 1:],
            final_uniforms=uniforms[:, 0],
            layout=layout,
        )
        site = SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        if self._tp_sync.enabled(site):  # one broadcast for both
            decided = self._tp_sync.sync(site, torch.cat((tokens, accept_len[:, None]), dim=1))
            accept_len, tokens = decided[:, -1].int(), decided[:, :-1].contiguous()
        return accept_len, tokens, max_logits, probs
