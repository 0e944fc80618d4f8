"""Apply penalties, logit bias, grammars and custom logit processors to verify logits.

SGLang sums a request's penalties once per step, which without speculation is once per token. In a block
each position must include the drafted tokens before it, and in the end only output tokens count. So the
counts are kept here, on the device, and replace SGLang's own.
"""

import functools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from sglang_dflash.kernels.ops.speculative.penalties import (
    PenaltyTerms,
    count_tokens,
    penalize_block,
)
from sglang_dflash.srt.speculative.acceptance.processors import apply_processors
from sglang_dflash.srt.speculative.cycle.host import on_device
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout
from sglang_dflash.srt.speculative.cycle.prompts import PrefilledRequests, Prompts

_NO_GRAMMAR = SimpleNamespace(grammar=None)


def _terms_of(reqs: Sequence[Any], vocab_size: int, device: torch.device) -> PenaltyTerms:
    """Copy the penalties of SGLang's requests to the device."""
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
    frequency, presence, repetition = on_device(penalties, torch.float32, device)[..., None]
    minimum, prompt_lens = on_device(lengths, torch.int64, device)[..., None]
    return PenaltyTerms(
        frequency=frequency,
        presence=presence,
        repetition=repetition,
        min_new_tokens=minimum,
        prompt_lens=prompt_lens,
        stop_logits=stop_logits,
    )


def _stop_ids(req: Any) -> set[int]:
    """Collect the tokens that end a request, as SGLang's own minimum length does."""
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        ids |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return ids - {None}


def _is_penalized(req: Any) -> bool:
    params = req.sampling_params
    if params.frequency_penalty or params.presence_penalty or params.min_new_tokens:
        return True
    return params.repetition_penalty != 1.0


def _indices(tokens: Sequence[Iterable[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Index every token of every row: (rows, token ids), int64."""
    pairs = [(row, token) for row, ids in enumerate(tokens) for token in ids]
    rows, ids = ([pair[i] for pair in pairs] for i in (0, 1))
    return on_device(rows, torch.int64, device), on_device(ids, torch.int64, device)


class Penalties:
    """Counts of the tokens that each running request has emitted.

    The counts are [pool_size, vocab] int32 on the device, a row per slot of SGLang's request pool. They are
    allocated when the first request has a penalty (30 MB for 48 requests and 152k tokens). Batches are the
    scheduler's forward-only copies."""

    def __init__(self, pool_size: int, vocab_size: int, device: torch.device):
        self._shape = pool_size, vocab_size
        self._device = device

    @staticmethod
    def are_requested(sampling_info: Any) -> bool:
        """Return whether a request of the batch has a penalty. SGLang has then summed its own."""
        return sampling_info.acc_additive_penalties is not None

    @functools.cached_property
    def _counts(self) -> torch.Tensor:
        return torch.zeros(self._shape, dtype=torch.int32, device=self._device)

    def begin_prefill(self, prompts: Prompts) -> None:
        """Count the tokens that new requests emitted before they were retracted."""
        reqs = prompts.new_reqs
        self._recount(reqs, prompts.req_pool_indices[: len(reqs)], [req.output_ids for req in reqs])

    def admit_prefilled(self, requests: PrefilledRequests) -> None:
        """Count the tokens that requests emitted on another server."""
        self._recount(requests.reqs, requests.req_pool_indices, requests.output_ids)

    def _recount(self, reqs: Sequence[Any], rows: torch.Tensor, output_ids: Sequence[Sequence[int]]) -> None:
        if not any(map(_is_penalized, reqs)):
            return
        counts = torch.zeros(len(reqs), self._shape[1], dtype=torch.int32, device=self._device)
        counts.index_put_(_indices(output_ids, self._device), counts.new_ones(()), accumulate=True)
        self._counts[rows] = counts

    def penalize_prefill(self, batch: Any) -> None:
        """Replace SGLang's penalties for each request's next token, before the target's forward."""
        terms = _terms_of(batch.reqs, self._shape[1], self._device)
        counts = self._counts[batch.req_pool_indices]
        batch.sampling_info.acc_additive_penalties = terms.additive(counts, batch.seq_lens)
        batch.sampling_info.acc_scaling_penalties = terms.scaling(counts)

    def penalize_block(
        self, batch: Any, block: torch.Tensor, logits: torch.Tensor, layout: VerifyLayout
    ) -> None:
        """Penalize the logits of a block, in place.

        Args:
            batch: the scheduler's.
            block: [bs, B] int64, drafted after its first column.
            logits: [T, vocab] of the verified rows.
            layout: verified slots.
        """
        terms = _terms_of(batch.reqs, self._shape[1], self._device)
        starts, max_accept = layout.bounds
        penalize_block(
            logits,
            block=block,
            counts=self._counts,
            requests=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            terms=terms,
            starts=starts,
            max_accept=max_accept,
        )

    def count(self, batch: Any, tokens: torch.Tensor, accept_len: torch.Tensor) -> None:
        """Count the output of a step: tokens [bs, W] int64, up to `accept_len` [bs] int32."""
        count_tokens(self._counts, batch.req_pool_indices, tokens, accept_len)


def constrain(
    batch: Any,
    block: torch.Tensor,
    logits: torch.Tensor,
    penalties: Penalties,
    chains: GrammarTree | None,
    grammar_barrier: Any,
    layout: VerifyLayout,
) -> None:
    """Apply all that shapes a request's logits to the verify logits, in place.

    Custom logit processors come last, as in plain SGLang.

    Args:
        batch: the scheduler's.
        block: [bs, B] int64, the drafted chains.
        logits: [T, vocab] of the verified rows.
        penalties: counts of emitted tokens.
        chains: the blocks on their way to the host. None: nothing reads them there.
        grammar_barrier: SGLang's, waits until the grammars are up to date.
        layout: verified slots. With custom logit processors, all requests verify one number of slots.
    """
    info = batch.sampling_info
    if Penalties.are_requested(info):
        penalties.penalize_block(batch, block, logits, layout)
    if info.logit_bias is not None:
        if layout.is_rectangle:
            logits.view(*block.shape, -1).add_(info.logit_bias[:, None])
        else:
            logits.add_(layout.repeat(info.logit_bias))
    if batch.has_grammar:
        grammar_barrier()
        # A request that ends meanwhile, as one with broken logits, may have a grammar in a state of error.
        reqs: Any = [_NO_GRAMMAR if req.finished() or req.to_finish else req for req in batch.reqs]
        mask = build_grammar_vocab_mask(
            reqs=reqs, tree=chains, sampling_info=info, device=logits.device, barrier=None
        )
        if mask is not None:
            if not layout.is_rectangle:
                mask = mask._replace(vocab_mask=mask.vocab_mask[layout.index])
            mask.apply(logits)
    if info.has_custom_logit_processor:
        apply_processors(batch, logits.view(*block.shape, -1), chains)
