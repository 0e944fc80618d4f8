"""Frequency, presence and repetition penalties, and min_new_tokens, at every position of a block.

SGLang adds a request's penalties up once per step, which without speculation is once per token. In a block
each position must see those of the drafted tokens before it, and what is counted in the end are the tokens
that were kept. So the counts are kept here, on the device, and SGLang's own are replaced."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from sglang_dflash.kernels.ops.speculative.penalties import count_tokens_triton, penalize_block_triton
from sglang_dflash.srt.speculative.acceptance.greedy import Verdict
from sglang_dflash.srt.speculative.dflash_info import on_device
from sglang_dflash.srt.speculative.scale_out.disaggregation import Arrival


@dataclass(frozen=True, slots=True)
class _Terms:
    """What bs requests ask for, in columns [bs, 1]: float32, and int64 for the lengths.

    stop_logits: [bs, vocab] float32, -inf at the tokens that end a request; None where none asks for a
    minimum length."""

    frequency: torch.Tensor
    presence: torch.Tensor
    repetition: torch.Tensor
    min_new_tokens: torch.Tensor
    prompt_lens: torch.Tensor
    stop_logits: torch.Tensor | None

    @classmethod
    def of(cls, reqs: Sequence[Any], vocab_size: int, device: torch.device) -> "_Terms":
        params = [req.sampling_params for req in reqs]
        min_new_tokens = [p.min_new_tokens for p in params]
        stop_logits = None
        if any(min_new_tokens):
            stop_logits = torch.zeros(len(reqs), vocab_size, device=device)
            at = _indices([_stop_ids(req) for req in reqs], device)
            stop_logits.index_put_(at, stop_logits.new_full((), -torch.inf))
        penalties = [
            [p.frequency_penalty for p in params],
            [p.presence_penalty for p in params],
            [p.repetition_penalty for p in params],
        ]
        lengths = [min_new_tokens, [len(req.origin_input_ids) for req in reqs]]
        columns = *on_device(penalties, torch.float32, device), *on_device(lengths, torch.int64, device)
        return cls(*(column[:, None] for column in columns), stop_logits)

    def additive(self, counts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """To be added to logits [bs, vocab], for requests of `lengths` [bs] tokens, the prompt's included,
        that have said each token `counts` [bs, vocab] times."""
        total = -self.frequency * counts - self.presence * (counts > 0)
        if self.stop_logits is not None:
            is_short = lengths[:, None] - self.prompt_lens < self.min_new_tokens
            total = total + torch.where(is_short, self.stop_logits, 0.0)
        return total

    def scaling(self, counts: torch.Tensor) -> torch.Tensor:
        """What positive logits [bs, vocab] are then divided by, and others multiplied."""
        return torch.where(counts > 0, self.repetition, 1.0)


def _stop_ids(req: Any) -> set[int]:
    """The tokens that end a request, as SGLang's own minimum length has them."""
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ids |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return ids - {None}


def _asks(params: Any) -> bool:
    penalties = (
        params.frequency_penalty,
        params.presence_penalty,
        params.repetition_penalty - 1.0,
        params.min_new_tokens,
    )
    return any(penalties)


def _indices(tokens: Sequence[Iterable[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, token ids), int64, of every token of every row."""
    pairs = [(row, token) for row, of_row in enumerate(tokens) for token in of_row]
    return tuple(on_device([pair[i] for pair in pairs], torch.int64, device) for i in (0, 1))


class Penalties:
    """How often each running request has said each token: [pool_size, vocab] int32 on the device, a row per
    slot of SGLang's request pool, allocated when the first request asks for a penalty (30 MB for 48 requests
    and 152k tokens).

    The batches given are the scheduler's forward-only copies, of which some request asks for a penalty.
    """

    def __init__(self, pool_size: int, vocab_size: int, device: torch.device):
        self._shape = pool_size, vocab_size
        self._device = device
        self._counts: torch.Tensor | None = None

    @staticmethod
    def are_asked_for(sampling_info: Any) -> bool:
        """SGLang has then added its own up, for a forward without a block."""
        return sampling_info.acc_additive_penalties is not None

    def begin_prefill(self, batch: Any, num_running: int) -> None:
        """Before the target's forward: what each request is penalised for at its next token. The last
        `num_running` ones are not new; the others may have said something before they were retracted."""
        new = batch.reqs[: len(batch.reqs) - num_running]
        counts = self._recount(batch.req_pool_indices, [req.output_ids for req in new])
        terms = _Terms.of(batch.reqs, self._shape[1], self._device)
        batch.sampling_info.acc_additive_penalties = terms.additive(counts, batch.seq_lens)
        batch.sampling_info.acc_scaling_penalties = terms.scaling(counts)

    def join(self, arrival: Arrival) -> None:
        """Requests that have said something elsewhere."""
        if any(_asks(req.sampling_params) for req in arrival.reqs):
            self._recount(arrival.req_pool_indices, arrival.said)

    def _recount(self, slots: torch.Tensor, said: Sequence[Sequence[int]]) -> torch.Tensor:
        """Start the first requests of `slots` [bs] afresh, with what each has said so far. Returns all
        counts, [bs, vocab]."""
        if self._counts is None:
            self._counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        counts = self._counts[slots]
        counts[: len(said)] = 0
        counts.index_put_(_indices(said, self._device), counts.new_ones(()), accumulate=True)
        self._counts[slots] = counts
        return counts

    def count_prefill(self, batch: Any, next_tokens: torch.Tensor) -> None:
        """next_tokens: [bs] int64, what each request has said now."""
        self._count(batch, next_tokens[:, None], torch.zeros_like(next_tokens, dtype=torch.int32))

    def penalize_block(self, batch: Any, block: torch.Tensor, logits: torch.Tensor) -> None:
        """block: [bs, B] int64, drafted after its first column. logits: [bs * B, vocab], overwritten.

        One launch on CUDA. Elsewhere position by position, as [bs, B, vocab] counts would not fit next to the
        logits of a large vocabulary."""
        terms = _Terms.of(batch.reqs, self._shape[1], self._device)
        run = penalize_block_triton if logits.is_cuda else penalize_block_torch
        columns = (getattr(terms, field.name) for field in fields(terms))
        run(logits, block, self._counts, batch.req_pool_indices, batch.seq_lens, *columns)

    def count_block(self, batch: Any, verdict: Verdict) -> None:
        """The kept tokens and the bonus token."""
        self._count(batch, verdict.out_tokens, verdict.accept_len)

    def _count(self, batch: Any, tokens: torch.Tensor, accept_len: torch.Tensor) -> None:
        run = count_tokens_triton if tokens.is_cuda else count_tokens_torch
        run(self._counts, batch.req_pool_indices, tokens, accept_len)


def penalize_block_torch(logits, block, counts, requests, seq_lens, *columns) -> None:
    """`penalize_block_triton` in PyTorch, on any device. columns: the fields of `_Terms`."""
    bs, width = block.shape
    terms, counts = _Terms(*columns), counts[requests]
    by_position = logits.view(bs, width, -1)
    one = counts.new_ones((bs, 1))
    for k in range(width):
        if k > 0:
            counts.scatter_add_(1, block[:, k : k + 1], one)
        row = by_position[:, k]
        # The block's first token, at position seq_lens, has been said as well.
        row.add_(terms.additive(counts, seq_lens + 1 + k))
        scaling = terms.scaling(counts)
        row.copy_(torch.where(row > 0, row / scaling, row * scaling))


def count_tokens_torch(counts, requests, tokens, accept_len) -> None:
    """`count_tokens_triton` in PyTorch, on any device."""
    is_output = torch.arange(tokens.shape[1], device=tokens.device) <= accept_len[:, None]
    counts[requests] = counts[requests].scatter_add_(1, tokens, is_output.int())
