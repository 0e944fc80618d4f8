"""A drafter around another one: per request and cycle it proposes what followed the last tokens before, or
the draft's block.

Which of the two depends on the request's text and on how copies fared in it, never on what the draft drew, so
it is lossless for sampled requests: a copied token is proposed with certainty, whatever the draft method."""

import logging
from collections.abc import Sequence

import numpy as np
import torch

from sglang_dflash.kernels.ops.speculative.copy_ahead import RULE, append_tokens, choose_copies, find_match
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.acceptance.greedy import Verdict
from sglang_dflash.srt.speculative.dflash_info import Cycle, Prompts, on_device, packed_ranges
from sglang_dflash.srt.speculative.drafters.base import DraftBlock, Drafter
from sglang_dflash.srt.speculative.drafters.copy_stats import Outcomes
from sglang_dflash.srt.speculative.scale_out.disaggregation import Arrival

logger = logging.getLogger(__name__)


class CopyAhead:
    """drafter: asked where a request copies nothing, and told of everything. rows, context_len: of the
    request table. vocab_size: what a block may contain.

    The texts are on the device, as under overlap scheduling the host learns tokens a step late: 4 bytes per
    row and position. A row is written anew when a request takes it.

    No draft forward where all running requests copy. On a CPU that is seen; elsewhere it is guessed from what
    the host knows (`Outcomes.all_copy`). A drafter whose forward also writes its context (P-EAGLE's) runs
    every time."""

    def __init__(
        self,
        drafter: Drafter,
        rows: int,
        context_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        metrics,
    ):
        self._drafter = drafter
        self._vocab_size = vocab_size
        # A block's tokens are written behind its anchor whatever was kept of them.
        self._history = torch.full((rows, context_len + block_size + 1), -1, dtype=torch.int32, device=device)
        start = torch.tensor([RULE.copies_start, RULE.drafts_start])
        self._start = start.to(device)
        self._records = self._start.repeat(rows, 1)
        self._lengths: torch.Tensor | None = None
        self._was_drafted = True
        self._sees = device.type == "cpu"
        self.outcomes = Outcomes(metrics)
        self.mask_token_id, self.block_width = drafter.mask_token_id, drafter.block_width
        self.has_own_table, self.writes_context_apart = drafter.has_own_table, drafter.writes_context_apart
        self.absorb = drafter.absorb
        logger.info(
            "DFLASH copies ahead: texts of %d requests take %.1f MB.", rows, self._history.numel() * 4 / 1e6
        )

    @classmethod
    def of(cls, drafter: Drafter, target_runner, block_size: int, metrics) -> "CopyAhead":
        """Once the pools exist."""
        rows, context_len = target_runner.req_to_token_pool.req_to_token.shape
        vocab_size, device = target_runner.model_config.vocab_size, torch.device(target_runner.device)
        return cls(drafter, rows, context_len, block_size, vocab_size, device, metrics)

    def attach_pools(self, target_runner) -> None:
        self._drafter.attach_pools(target_runner)

    def begin_prefill(self, prompts: Prompts) -> None:
        self.outcomes.began()
        new = len(prompts.extend_lens) - prompts.num_running
        # What the prefix cache had of a new request is not among the tokens of the prefill.
        cached = [
            0 if is_continued else length
            for is_continued, length in zip(prompts.is_continued, prompts.prefix_lens, strict=True)
        ]
        texts = [
            req.get_fill_ids()[:n] if n else () for req, n in zip(prompts.reqs[:new], cached, strict=False)
        ]
        self._write(prompts.req_pool_indices[:new], texts)
        self._records[prompts.req_pool_indices[:new]] = self._start
        rows = _repeated(prompts.req_pool_indices, prompts.extend_lens, prompts.tokens.numel())
        self._history[rows, prompts.positions] = self._valid(prompts.tokens)
        self._drafter.begin_prefill(prompts)

    def prefill(
        self, prompts: Prompts, aux_hidden: torch.Tensor, cache_loc: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        ends = [prefix + new for prefix, new in zip(prompts.prefix_lens, prompts.extend_lens, strict=True)]
        self._history[prompts.req_pool_indices, on_device(ends, torch.int64, next_tokens.device)] = (
            next_tokens.int()
        )
        self._drafter.prefill(prompts, aux_hidden, cache_loc, next_tokens)

    def join(self, arrival: Arrival) -> None:
        self.outcomes.began()
        texts = [[*req.origin_input_ids, *said] for req, said in zip(arrival.reqs, arrival.said, strict=True)]
        self._write(arrival.req_pool_indices, texts)
        self._records[arrival.req_pool_indices] = self._start
        self._drafter.join(arrival)

    def propose(self, cycle: Cycle, sampling_info=None) -> DraftBlock:
        self._lengths, self._was_drafted = None, True
        if cycle.width == 1:
            self.outcomes.proposed(cycle.bs, None, False)
            return self._drafter.propose(cycle, sampling_info)
        text = self._history, cycle.req_pool_indices, cycle.seq_lens
        keys = find_match(*text, int(cycle.host_lens.max()), RULE)
        copied, self._lengths = choose_copies(text[0], self._records, *text[1:], keys, cycle.width, RULE)
        self._was_drafted = not self._needs_no_draft()
        self.outcomes.proposed(cycle.bs, self._lengths, self._was_drafted)
        if self._was_drafted:
            return over(self._drafter.propose(cycle, sampling_info), copied)
        # Where a request copies nothing after all, the anchor stands for what it did not propose.
        tokens = torch.where(copied >= 0, copied, cycle.tokens[:, :1])
        return DraftBlock(tokens, None if sampling_info is None else DraftProbs.one_hot(tokens[:, 1:]))

    def _needs_no_draft(self) -> bool:
        if not self.writes_context_apart:
            return False
        return bool((self._lengths > 0).all()) if self._sees else self.outcomes.all_copy

    def commit(self, cycle: Cycle, aux_hidden: torch.Tensor | None, verdict: Verdict) -> None:
        lengths = torch.zeros_like(verdict.accept_len) if self._lengths is None else self._lengths
        append_tokens(
            self._history,
            self._records,
            cycle.req_pool_indices,
            cycle.seq_lens,
            verdict.out_tokens,
            verdict.accept_len,
            lengths,
            self._was_drafted,
            RULE,
        )
        self._drafter.commit(cycle, aux_hidden, verdict)

    def _valid(self, tokens: torch.Tensor) -> torch.Tensor:
        """-1 in the place of what stands for an image. int32."""
        return torch.where((tokens >= 0) & (tokens < self._vocab_size), tokens, -1).int()

    def _write(self, rows: torch.Tensor, texts: Sequence[Sequence[int]]) -> None:
        """Texts, on the host, from position 0 on."""
        counts = [len(text) for text in texts]
        if not any(counts):
            return
        tokens = on_device(
            np.concatenate([np.asarray(text, dtype=np.int64) for text in texts]), torch.int64, rows.device
        )
        positions = packed_ranges([0] * len(counts), counts, rows.device)
        self._history[_repeated(rows, counts, tokens.numel()), positions] = self._valid(tokens)


def over(block: DraftBlock, copied: torch.Tensor) -> DraftBlock:
    """A drafted block with copied tokens in their places, where copied [bs, B] int64 has any."""
    is_copied = copied >= 0
    tokens, probs = torch.where(is_copied, copied, block.tokens), block.probs
    if probs is not None:
        is_first = torch.arange(probs.ids.shape[2], device=tokens.device) == 0
        is_certain = is_copied[:, 1:, None]
        probs = DraftProbs(
            torch.where(is_certain & is_first, tokens[:, 1:, None], probs.ids),
            torch.where(is_certain, is_first.to(probs.probs.dtype), probs.probs),
        )
    return DraftBlock(tokens, probs)


def _repeated(rows: torch.Tensor, counts: Sequence[int], total: int) -> torch.Tensor:
    """Each row as many times as it has tokens: [total] int64."""
    return rows.repeat_interleave(on_device(counts, torch.int64, rows.device), output_size=total)
