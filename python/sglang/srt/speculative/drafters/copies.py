"""`--speculative-copy-ahead`: propose copies of a request's own text.

A copy is what followed the request's last tokens earlier in its prompt or output.

Per request and cycle the proposal is such a copy, or the draft's block. In whole blocks each match is copied;
with adaptive lengths the plan says which. The choice depends on texts, never on the draft's tokens. So it is
lossless for sampled requests: a copied token has probability 1, whatever the draft method.

The feature is not called n-gram: SGLang has an algorithm and flags of that name, which draft from a store
that all requests share."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks
from sglang_dflash.kernels.ops.speculative.copy_ahead import append_tokens, copy_matches, find_match
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.host import on_device, ragged_ranges
from sglang_dflash.srt.speculative.cycle.plan import CyclePlan, Proposals
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests, Prompts

logger = logging.getLogger(__name__)

DRAFT, COPY = "draft", "copy"
UNKNOWN = -1  # a match's length that the host cannot read


class CopyStats:
    """Counts blocks, proposed and accepted tokens by source, here and in the metrics."""

    def __init__(self, metrics: DFlashMetrics):
        self._metrics = metrics
        self._cycles = self._without_draft = 0
        self._outcomes = {name: Counter[str]() for name in ("blocks", "proposed_tokens", "accepted_tokens")}

    def on_accept_lens(
        self, cycle: Proposals | None, accept_lens: Sequence[int], max_accept: Sequence[int]
    ) -> None:
        """Count the accepted ones of `max_accept` proposed tokens of each request."""
        self._cycles += 1
        if cycle is None or not any(max_accept):
            return
        self._without_draft += not cycle.was_drafted
        is_copied = [length > 0 for length in cycle.lengths.tolist()]
        for source in (COPY, DRAFT):
            # If nothing was drafted, the tokens beside copies have no source.
            blocks = [
                (kept, drafted)
                for kept, drafted, copied in zip(accept_lens, max_accept, is_copied, strict=True)
                if drafted and copied == (source == COPY) and (copied or cycle.was_drafted)
            ]
            accepted, proposed = (sum(block[i] for block in blocks) for i in (0, 1))
            for counter, number in zip(
                self._outcomes.values(), (len(blocks), proposed, accepted), strict=True
            ):
                counter[source] += number
            self._metrics.count_source(source, blocks=len(blocks), proposed=proposed, accepted=accepted)
        self._metrics.count_undrafted(not cycle.was_drafted)

    def report(self) -> dict[str, Any]:
        """Return plain numbers for /server_info."""
        outcomes = {name: dict(counter) for name, counter in self._outcomes.items()}
        return {"cycles": self._cycles, "cycles_without_draft": self._without_draft} | outcomes


class Matches(NamedTuple):
    """Matches of a batch's texts, as `CopySource.look_up` finds them."""

    lengths: np.ndarray  # 0: no match. `UNKNOWN`: the host cannot read it. [bs]
    keys: torch.Tensor | None  # of `find_match`, on the device. None: no text was searched. [bs, parts] int64


class Copies(NamedTuple):
    """Use of the matches in a cycle, as `CopySource.choose` decides."""

    # Of the matches. Negative: passed over for the draft. None: no text was searched. [bs] int32
    lengths: torch.Tensor | None = None
    tokens: torch.Tensor | None = None  # to propose. -1: the draft's. None: nothing is copied. [bs, B] int64

    def overlay(self, block: DraftBlock) -> DraftBlock:
        """Put the copies into a block [bs, W]."""
        if self.tokens is None:
            return block
        return overlay_copies(block, self.tokens[:, : block.tokens.shape[1]])


class CopySource:
    """Texts of running requests, and copies of their own text as drafted tokens.

    Texts are on the device: under overlap scheduling the host learns tokens a step late. They take 4 bytes
    per row and position. A row is rewritten when a request takes it. A source without texts finds nothing:
    that is a server without copies, and any server until start-up has measured its cycles.

    The draft's forward is skipped if all running requests copy. On a CPU the host reads that from the device;
    elsewhere it knows from a plan with adaptive lengths alone. P-EAGLE's forward also writes context, and
    runs every time.

    Matches are looked up in anchor-only cycles too: their lengths say what a copy is worth.

    Args:
        block_size: B.
        stats: counts outcomes by source.

    Attributes:
        history: [rows, positions] int32, texts. -1: no token.
        knows_matches_on_host: whether the host reads from the device who copies. `allocate` sets it on a CPU.
    """

    def __init__(self, block_size: int, stats: CopyStats):
        self._block_size = block_size
        self.stats = stats
        self.knows_matches_on_host = False
        self._has_texts = False

    def allocate(self, rows: int, context_len: int, vocab_size: int, device: torch.device) -> None:
        """Allocate texts for the rows of the request table, in a vocabulary of this size.

        Called when all graphs have their memory.
        """
        self._vocab_size, self._has_texts = vocab_size, True
        # A block's tokens are written behind its anchor, however many are accepted.
        self.history = torch.full(
            (rows, context_len + self._block_size + 1), -1, dtype=torch.int32, device=device
        )
        self.knows_matches_on_host = device.type == "cpu"
        logger.info(
            "DFLASH copy-ahead: texts of %d requests take %.1f MB.", rows, self.history.numel() * 4 / 1e6
        )

    def begin_prefill(self, prompts: Prompts) -> None:
        """Write the texts of a prefill's requests."""
        if not self._has_texts:
            return
        # The tokens of the prefill lack what the prefix cache had of a new request.
        prefixes = zip(prompts.new_reqs, prompts.prefix_lens, prompts.is_continued, strict=False)
        texts = [
            req.get_fill_ids()[:length] if length and not is_continued else ()
            for req, length, is_continued in prefixes
        ]
        new_rows = prompts.req_pool_indices[: len(texts)]
        self._write(new_rows, texts)
        rows = _repeated(prompts.req_pool_indices, prompts.extend_lens, prompts.tokens.numel())
        self.history[rows, prompts.positions] = self._valid(prompts.tokens)

    def end_prefill(self, prompts: Prompts, next_tokens: torch.Tensor) -> None:
        """Append the target's token after each request's last one, [bs] int64."""
        if not self._has_texts:
            return
        at = on_device(prompts.ends, torch.int64, next_tokens.device)
        self.history[prompts.req_pool_indices, at] = next_tokens.int()

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """Write the texts of requests that another server has prefilled."""
        if not self._has_texts:
            return
        outputs = zip(requests.reqs, requests.output_ids, strict=True)
        self._write(requests.req_pool_indices, [[*req.origin_input_ids, *output] for req, output in outputs])

    def look_up(self, batch: Any) -> Matches:
        """Find the matches of the next cycle, before it is planned."""
        bs = len(batch.req_pool_indices)
        if not self._has_texts:
            return Matches(np.zeros(bs, dtype=np.int64), None)
        known = batch.seq_lens_cpu
        longest = int((batch.spec_info.reserved_lens_cpu if known is None else known).max()) + 1
        keys = find_match(self.history, batch.req_pool_indices, batch.seq_lens, longest)
        reads = self.knows_matches_on_host
        return Matches((keys.amax(dim=1) >> 32).numpy() if reads else np.full(bs, UNKNOWN), keys)

    def choose(self, batch: Any, plan: CyclePlan, matches: Matches) -> Copies:
        """Copy the matches of the requests that the plan names, or each match."""
        if matches.keys is None:
            return Copies()
        if self.knows_matches_on_host and not plan.copies_each_match and not plan.copies.any():
            return Copies(torch.zeros(plan.layout.bs, dtype=torch.int32))
        found, lengths = copy_matches(
            self.history,
            requests=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            keys=matches.keys,
            block_size=self._block_size,
        )
        if plan.copies_each_match:
            return Copies(lengths, found)
        is_copy = on_device(plan.copies, torch.bool, found.device)
        lengths = torch.where(is_copy, lengths, -lengths)
        return Copies(lengths, torch.where(is_copy[:, None], found, -1))

    def needs_draft(self, copies: Copies) -> bool:
        """Return whether a request of the cycle may copy nothing, as far as the host knows."""
        lengths = copies.lengths
        return lengths is None or not self.knows_matches_on_host or not (lengths > 0).all()

    def record(
        self, cycle: Cycle, copies: Copies, accepted: AcceptedBlocks, was_drafted: bool
    ) -> Proposals | None:
        """Append a cycle's output to the texts.

        Args:
            cycle: the verified blocks.
            copies: what it copied.
            accepted: the step's output.
            was_drafted: whether the draft's forward ran for any request.

        Returns:
            Sources of its blocks, or None if no text was searched.
        """
        if copies.lengths is None:
            return None
        # SGLang waits for later work before it reports accept lengths, so these numbers have arrived by then.
        lengths = copies.lengths.to("cpu", non_blocking=True)
        append_tokens(self.history, cycle.req_pool_indices, cycle.committed, accepted.tokens)
        return Proposals(lengths, was_drafted)

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
        positions = ragged_ranges([0] * len(counts), counts, rows.device)
        self.history[_repeated(rows, counts, tokens.numel()), positions] = self._valid(tokens)


def overlay_copies(block: DraftBlock, copied: torch.Tensor) -> DraftBlock:
    """Put copied tokens [bs, W] int64 into a block; skip negative ids."""
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
    """Repeat each row once per token: [total] int64."""
    return rows.repeat_interleave(on_device(counts, torch.int64, rows.device), output_size=total)
