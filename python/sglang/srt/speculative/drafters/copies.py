"""`--speculative-copy-ahead`: propose copies of a request's own text.

A copy is what followed the request's last tokens earlier in its prompt or output.

Per request and cycle the proposal is such a copy, or the draft's block. The choice depends on the request's
text and on earlier copies in it, never on the draft's tokens. So it is lossless for sampled requests: a
copied token has probability 1, whatever the draft method.

The feature is not called n-gram: SGLang has an algorithm and flags of that name, which draft from a store
that all requests share."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks
from sglang_dflash.kernels.ops.speculative.copy_ahead import RULE, append_tokens, choose_copies, find_match
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.plan import Proposals
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests, Prompts, on_device, packed_ranges
from sglang_dflash.srt.speculative.drafters.base import Drafter

logger = logging.getLogger(__name__)

DRAFT, COPY = "draft", "copy"
# Cycles in a row in which every request accepted a whole copied block, after which the next cycle skips the
# draft. Under overlap scheduling the last one or two are not known yet: a copy that ends in them costs its
# request about a cycle, and a draft forward is about a sixth of one (benchmark/ROOFLINE.md). A copy that has
# gone on for so long is likely to go on for as long again.
WHOLE_CYCLES = 8


class CopyStats:
    """Counts blocks, proposed and accepted tokens by source, here and in the metrics."""

    def __init__(self, metrics: DFlashMetrics):
        self._metrics = metrics
        self._admissions = 0
        self._whole = 0
        self._cycles = self._without_draft = 0
        self._blocks: Counter[str] = Counter()
        self._proposed: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()

    @property
    def all_copy(self) -> bool:
        """True if, as far as the host knows, every running request is inside a copy."""
        return self._whole >= WHOLE_CYCLES

    def on_admission(self) -> None:
        """Note new requests: older cycles are no longer about all of them."""
        self._admissions += 1
        self._whole = 0

    def proposals(
        self, lengths: torch.Tensor | None, was_drafted: bool, right: torch.Tensor | None = None
    ) -> Proposals:
        """Record a cycle that begins. Arguments are those of `Proposals`, on the device."""
        transferred = None
        if lengths is not None and lengths.is_cuda:
            transferred = torch.get_device_module(lengths.device).Event()
            lengths = lengths.to("cpu", non_blocking=True)
            right = None if right is None else right.to("cpu", non_blocking=True)
            transferred.record()
        return Proposals(lengths, transferred, was_drafted, self._admissions, right)

    def on_accept_lens(
        self, cycle: Proposals, accept_lens: Sequence[int], num_drafted: Sequence[int]
    ) -> None:
        """Count the accepted ones of `num_drafted` proposed tokens of each request."""
        self._cycles += 1
        if cycle.lengths is None:
            self._whole = 0
            return
        if cycle.transferred is not None:
            cycle.transferred.synchronize()  # over already: SGLang has waited for later work
        if not any(num_drafted):
            self._whole = 0
            return
        self._without_draft += not cycle.was_drafted
        is_copied = [length > 0 for length in cycle.lengths.tolist()]
        for source in (COPY, DRAFT):
            # If nothing was drafted, the tokens beside copies have no source.
            blocks = [
                (kept, drafted)
                for kept, drafted, copied in zip(accept_lens, num_drafted, is_copied, strict=True)
                if drafted and copied == (source == COPY) and (copied or cycle.was_drafted)
            ]
            accepted, proposed = (sum(block[i] for block in blocks) for i in (0, 1))
            self._blocks[source] += len(blocks)
            self._proposed[source] += proposed
            self._accepted[source] += accepted
            self._metrics.count_source(source, len(blocks), proposed, accepted)
        self._metrics.count_undrafted(not cycle.was_drafted)
        is_whole = all(is_copied) and list(accept_lens) == list(num_drafted)
        self._whole = self._whole + 1 if is_whole and cycle.admissions == self._admissions else 0

    def report(self) -> dict[str, Any]:
        """Return plain numbers for /server_info."""
        return {
            "cycles": self._cycles,
            "cycles_without_draft": self._without_draft,
            "blocks": dict(self._blocks),
            "proposed_tokens": dict(self._proposed),
            "accepted_tokens": dict(self._accepted),
        }


class CopyAhead:
    """A drafter around another one, which runs if a request copies nothing.

    Texts are on the device: under overlap scheduling the host learns tokens a step late. They take 4 bytes
    per row and position. A row is rewritten when a request takes it.

    The draft's forward is skipped if all running requests copy. On a CPU that is read from the device.
    Elsewhere it is predicted from what the host knows (`CopyStats.all_copy`). P-EAGLE's forward also
    writes context, and runs every time.

    Matches are looked up in plain cycles too. Compared with the tokens that the target then emits, they show
    what copies are worth while nothing is verified.

    Args:
        drafter: the inner drafter.
        block_size: B.
        stats: counts outcomes by source.

    Attributes:
        inner: the inner drafter.
        history: [rows, positions] int32, texts. -1: no token.
        knows_matches_on_host: whether the host reads from the device who copies. `allocate` sets it on a CPU.
    """

    def __init__(self, drafter: Drafter, block_size: int, stats: CopyStats):
        self.inner = drafter
        self._block_size = block_size
        self.stats = stats
        self.knows_matches_on_host = False
        self._keys: torch.Tensor | None = None  # of the next cycle's matches
        self._copied: torch.Tensor | None = None  # of the cycle under way
        self._lengths: torch.Tensor | None = None  # likewise
        self._was_drafted = True
        self._has_texts = False
        self.proposals = stats.proposals(None, False)
        self.mask_token_id, self.num_draft_rows = drafter.mask_token_id, drafter.num_draft_rows
        self.has_own_table, self.writes_context_apart = drafter.has_own_table, drafter.writes_context_apart
        self.defers_plain_cycles = drafter.defers_plain_cycles
        self.draw, self.absorb, self.to_draft = drafter.draw, drafter.absorb, drafter.to_draft

    def attach_pools(self, target_runner: Any) -> None:
        self.inner.attach_pools(target_runner)

    def allocate_texts(self, target_runner: Any) -> None:
        """Allocate texts for the request table, when all graphs have their memory."""
        rows, context_len = target_runner.req_to_token_pool.req_to_token.shape
        self.allocate(
            rows, context_len, target_runner.model_config.vocab_size, torch.device(target_runner.device)
        )

    def allocate(self, rows: int, context_len: int, vocab_size: int, device: torch.device) -> None:
        """Allocate texts for the rows of the request table, in a vocabulary of this size."""
        self._vocab_size = vocab_size
        # A block's tokens are written behind its anchor, however many are accepted.
        self.history = torch.full(
            (rows, context_len + self._block_size + 1), -1, dtype=torch.int32, device=device
        )
        self._start = torch.tensor([RULE.copies_start, RULE.drafts_start]).to(device)
        self._records = self._start.repeat(rows, 1)
        # By these, a copy is never worse than the draft.
        self._no_records = torch.zeros_like(self._records)
        self.knows_matches_on_host = device.type == "cpu"
        logger.info(
            "DFLASH copy-ahead: texts of %d requests take %.1f MB.", rows, self.history.numel() * 4 / 1e6
        )

    def begin_prefill(self, prompts: Prompts) -> None:
        """See `Drafter`. Writes the texts of new requests."""
        self.stats.on_admission()
        self._has_texts = True
        new = len(prompts.extend_lens) - prompts.num_running
        # The tokens of the prefill lack what the prefix cache had of a new request.
        cached = [
            0 if is_continued else length
            for is_continued, length in zip(prompts.is_continued, prompts.prefix_lens, strict=True)
        ]
        texts = [
            req.get_fill_ids()[:n] if n else ()
            for req, n in zip(prompts.reqs[:new], cached[:new], strict=True)
        ]
        self._write(prompts.req_pool_indices[:new], texts)
        self._records[prompts.req_pool_indices[:new]] = self._start
        rows = _repeated(prompts.req_pool_indices, prompts.extend_lens, prompts.tokens.numel())
        self.history[rows, prompts.positions] = self._valid(prompts.tokens)
        self.inner.begin_prefill(prompts)

    def prefill(
        self, prompts: Prompts, aux_hidden: torch.Tensor, cache_loc: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        ends = [prefix + new for prefix, new in zip(prompts.prefix_lens, prompts.extend_lens, strict=True)]
        at = on_device(ends, torch.int64, next_tokens.device)
        self.history[prompts.req_pool_indices, at] = next_tokens.int()
        self.inner.prefill(prompts, aux_hidden, cache_loc, next_tokens)

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """See `Drafter`. Writes the texts of new requests."""
        self.stats.on_admission()
        self._has_texts = True
        outputs = zip(requests.reqs, requests.output_ids, strict=True)
        self._write(requests.req_pool_indices, [[*req.origin_input_ids, *output] for req, output in outputs])
        self._records[requests.req_pool_indices] = self._start
        self.inner.admit_prefilled(requests)

    def look_up(self, batch: Any) -> np.ndarray | None:
        """Find the matches of the next cycle, before its width is chosen.

        Returns their lengths [bs], 0 without a match, if the host can read them. Else None.
        """
        if not self._has_texts:  # cycles that measure at start-up
            return None
        known = batch.seq_lens_cpu
        longest = int((batch.spec_info.reserved_lens_cpu if known is None else known).max()) + 1
        self._keys = find_match(self.history, batch.req_pool_indices, batch.seq_lens, longest, RULE)
        return (self._keys.amax(dim=1) >> 32).numpy() if self.knows_matches_on_host else None

    def propose(self, cycle: Cycle, sampling_info: Any = None) -> DraftBlock:
        """See `Drafter`. Copies what `look_up` found, if the request's record prefers copies."""
        self._choose_copies(cycle)
        if self._copied is None:
            return self.inner.propose(cycle, sampling_info)
        self._was_drafted = not self._needs_no_draft()
        if self._was_drafted:
            return overlay_copies(self.inner.propose(cycle, sampling_info), self._copied)
        return self._without_draft(cycle, sampling_info)

    def overlay(self, cycle: Cycle, block: DraftBlock, copies: np.ndarray, was_drafted: bool) -> DraftBlock:
        """Put the copies of some requests into a block.

        All that `look_up` found is compared with the output later.

        Args:
            cycle: the blocks before drafting.
            block: [bs, W], filled by the inner drafter for the others.
            copies: [bs] bool, which requests copy, whatever their records.
            was_drafted: whether the inner drafter's forward ran for any.
        """
        self._copied = self._lengths = None
        self._was_drafted = was_drafted
        if self._keys is None:
            return block
        requests, width = cycle.req_pool_indices, block.tokens.shape[1]
        self._copied, lengths = choose_copies(
            self.history, self._no_records, requests, cycle.committed, self._keys, self._block_size, RULE
        )
        self._keys = None
        is_copy = on_device(copies, torch.bool, block.tokens.device)
        self._lengths = torch.where(is_copy, lengths, -lengths)
        return overlay_copies(block, torch.where(is_copy[:, None], self._copied, -1)[:, :width])

    def _choose_copies(self, cycle: Cycle) -> None:
        self._copied = self._lengths = None
        self._was_drafted = True
        if self._keys is None:
            return
        requests, width = cycle.req_pool_indices, cycle.verify_len
        self._copied, self._lengths = choose_copies(
            self.history, self._records, requests, cycle.committed, self._keys, width, RULE
        )
        self._keys = None

    def _without_draft(self, cycle: Cycle, sampling_info: Any) -> DraftBlock:
        """Fill the slots of requests that copy nothing with the anchor."""
        tokens = cycle.tokens[:, :1].repeat(1, cycle.verify_len)
        if self._copied is not None:
            tokens = torch.where(self._copied >= 0, self._copied, tokens)
        return DraftBlock(tokens, None if sampling_info is None else DraftProbs.one_hot(tokens[:, 1:]))

    def _needs_no_draft(self) -> bool:
        if not self.writes_context_apart or self._lengths is None:
            return False
        return bool((self._lengths > 0).all()) if self.knows_matches_on_host else self.stats.all_copy

    def commit(self, cycle: Cycle, aux_hidden: torch.Tensor | None, accepted: AcceptedBlocks) -> None:
        """See `Drafter`. Appends the output to the texts, and notes the sources in `proposals`."""
        lengths, right, is_own = self._lengths, None, cycle.drafted is not None
        if self._has_texts:
            append_tokens(
                self.history,
                self._records,
                cycle.req_pool_indices,
                cycle.committed,
                accepted.tokens,
                accepted.accept_len,
                # With verify lengths of its own, a request's estimates replace its record.
                torch.zeros_like(accepted.accept_len) if lengths is None or is_own else lengths,
                self._was_drafted and not is_own,
                RULE,
            )
        if is_own and lengths is not None and self._copied is not None:
            right = _num_right(self._copied, accepted)
        self.proposals = self.stats.proposals(lengths, self._was_drafted, right)
        self.inner.commit(cycle, aux_hidden, accepted)

    def _valid(self, tokens: torch.Tensor) -> torch.Tensor:
        """Replace ids that stand for an image by -1. int32."""
        return torch.where((tokens >= 0) & (tokens < self._vocab_size), tokens, -1).int()

    def _write(self, rows: torch.Tensor, texts: Sequence[Sequence[int]]) -> None:
        """Write texts from the host into rows, from position 0 on."""
        counts = [len(text) for text in texts]
        if not any(counts):
            return
        tokens = on_device(
            np.concatenate([np.asarray(t, dtype=np.int64) for t in texts]), torch.int64, rows.device
        )
        positions = packed_ranges([0] * len(counts), counts, rows.device)
        self.history[_repeated(rows, counts, tokens.numel()), positions] = self._valid(tokens)


def overlay_copies(block: DraftBlock, copied: torch.Tensor) -> DraftBlock:
    """Put copied tokens [bs, B] int64 into a drafted block; skip negative ids."""
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


def _num_right(copied: torch.Tensor, accepted: AcceptedBlocks) -> torch.Tensor:
    """Count the copied tokens [bs, B] up to the first that is not the output's. [bs] int64"""
    width = min(copied.shape[1] - 1, accepted.tokens.shape[1])
    is_right = copied[:, 1 : width + 1] == accepted.tokens[:, :width]
    is_right &= torch.arange(width, device=copied.device) <= accepted.accept_len[:, None]
    return is_right.cumprod(dim=1).sum(dim=1)


def _repeated(rows: torch.Tensor, counts: Sequence[int], total: int) -> torch.Tensor:
    """Repeat each row once per token: [total] int64."""
    return rows.repeat_interleave(on_device(counts, torch.int64, rows.device), output_size=total)
