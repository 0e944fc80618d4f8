"""Custom logit processors in a verified block.

A processor is called once per emitted token, as in plain SGLang, so its requests accept no drafted token.
SGLang's own classes are the exception. They read a request's tokens and parameters and keep no state. So
they are called for every slot of a block, with the tokens before it, and their requests speculate.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
    ThinkingBudgetLogitProcessor,
)

_REQUEST = "__req__"  # the parameter in which SGLang passes the request
# A subclass that only sets token ids runs one of these.
_STATELESS_CALLS = tuple(
    processor.__call__
    for processor in (
        DeepseekOCRNoRepeatNGramLogitProcessor,
        DisallowedTokensLogitsProcessor,
        ThinkingBudgetLogitProcessor,
    )
)


@functools.lru_cache(maxsize=1024)
def runs_per_slot(serialized: str) -> bool:
    """Tell whether a serialized processor may be called for every slot of a block."""
    return type(CustomLogitProcessor.from_str(serialized)).__call__ in _STATELESS_CALLS


def need_tokens(reqs: Sequence[Any]) -> bool:
    """Tell whether a batch has a processor that reads the drafted tokens, on the host."""
    return any(_runs_per_slot(req) for req in reqs)


def _runs_per_slot(req: Any) -> bool:
    return req.custom_logit_processor is not None and runs_per_slot(req.custom_logit_processor)


class RequestAtSlot:
    """A request as it would be if the drafted tokens before a slot were its output."""

    def __init__(self, req: Any, drafted: Sequence[int]):
        self._req = req
        self.output_ids = req.output_ids[:]
        self.output_ids.extend(drafted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


def apply_processors(batch: Any, logits: torch.Tensor, blocks: torch.Tensor | None) -> None:
    """Apply a batch's processors to the logits of blocks, in place.

    The requests' outputs on the host must be complete (`without_overlap`).

    Args:
        batch: the scheduler's.
        logits: [bs, B, vocab].
        blocks: [bs, B] int64 on the host. Not read unless `need_tokens`.
    """
    apply_custom_logit_processor(logits[:, 0], batch.sampling_info)
    num_slots = logits.shape[1]
    if num_slots == 1:
        return
    for row, req in enumerate(batch.reqs):
        if not _runs_per_slot(req):
            continue
        assert blocks is not None, "the drafted tokens are on the host if a processor reads them"
        drafted = blocks[row, 1:].tolist()
        params = [
            {**(req.sampling_params.custom_params or {}), _REQUEST: RequestAtSlot(req, drafted[:slot])}
            for slot in range(1, num_slots)
        ]
        processor = CustomLogitProcessor.from_str(req.custom_logit_processor)
        later = logits[row, 1:]
        later.copy_(processor(later.clone(), params))


def without_overlap() -> Callable[..., bool]:
    """Wrap `Scheduler.is_disable_overlap_for_batch`: processors need complete outputs.

    With overlap scheduling the host would learn of a cycle's tokens after the next one began.
    """
    from sglang.srt.managers.scheduler import Scheduler

    original = inspect.unwrap(Scheduler.is_disable_overlap_for_batch)

    @functools.wraps(original)
    def is_disable_overlap_for_batch(self, batch, last_batch):
        if original(self, batch, last_batch):
            return True
        info = batch.sampling_info if batch is not None else None
        return bool(info is not None and info.has_custom_logit_processor and self.result_queue)

    return is_disable_overlap_for_batch
