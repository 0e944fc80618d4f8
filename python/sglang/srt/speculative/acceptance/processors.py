"""Custom logit processors in a verified block.

A processor is called once per emitted token, as in plain SGLang, so its requests accept no drafted token.
SGLang's own classes keep no state. They are called for every slot of a block, with the tokens before it, and
their requests speculate. If a processor raises, its request ends, and no other.
"""

import copy
import functools
import json
import logging
import pickle
import weakref
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
    ThinkingBudgetLogitProcessor,
)

from sglang_dflash.srt.patching import WORKER, patches

logger = logging.getLogger(__name__)

_REQUEST = "__req__"  # the parameter in which SGLang passes the request
# A subclass that only sets token ids runs one of these.
_STATELESS_CALLS = (
    DeepseekOCRNoRepeatNGramLogitProcessor.__call__,
    DisallowedTokensLogitsProcessor.__call__,
    ThinkingBudgetLogitProcessor.__call__,
)
_warn_once = functools.lru_cache(maxsize=64)(logger.warning)


class GuardedProcessor(CustomLogitProcessor):
    """A sender's processor, called so that an error ends the request that caused it.

    SGLang makes one for all requests of a batch that sent the same processor.

    Args:
        serialized: the sender's processor.
        is_stateless: whether it may be called for every slot of a block.
    """

    def __init__(self, serialized: str, is_stateless: bool):
        self._serialized, self.is_stateless = serialized, is_stateless

    @functools.cached_property
    def _processor(self) -> CustomLogitProcessor:
        return CustomLogitProcessor.from_str(self._serialized)

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        """Shape the logits of each request's next token, [requests, vocab].

        If the processor raises, or leaves no largest logit, the request ends and this row stays as it was.
        After a prefill SGLang's sampler would raise.
        """
        if not custom_param_list:
            return logits
        shaped, reasons = self.shape(logits, custom_param_list)
        for row in (~shaped.amax(dim=-1).isfinite()).nonzero()[:, 0].tolist():
            req, reason = (
                custom_param_list[row][_REQUEST],
                reasons.get(row, "the largest logit it leaves is not finite"),
            )
            message = f"custom_logit_processor: {reason}"
            logger.warning("DFLASH ends request %s: %s", req.rid, message)
            req.to_finish = FINISH_ABORT(message, HTTPStatus.BAD_REQUEST, "BadRequestError")
            shaped[row] = logits[row]
        return shaped

    def shape(
        self, logits: torch.Tensor, params: list[dict[str, Any]]
    ) -> tuple[torch.Tensor, dict[int, str]]:
        """Call the processor for all rows or, if that raises, for each row alone.

        Returns:
            Shaped logits, NaN in rows at which the processor raises; the errors of these rows.
        """
        try:
            shaped = self._processor(logits.clone(), params)
            if shaped.shape != logits.shape:
                raise ValueError(f"logits {tuple(logits.shape)} came back as {tuple(shaped.shape)}")
            return shaped.to(logits), {}
        except Exception as error:  # the sender's code may raise anything
            reason = f"{type(error).__name__}: {error!s:.200}"
        if len(params) == 1:
            return torch.full_like(logits, torch.nan), {0: reason}
        if not self.is_stateless:  # SGLang's own assert that all rows have the same parameters
            _warn_once("A custom logit processor raised, and is called for each row: %s", reason)
        each = [self.shape(logits[i : i + 1], params[i : i + 1]) for i in range(len(params))]
        errors = {row: error[0] for row, (_, error) in enumerate(each) if error}
        return torch.cat([shaped for shaped, _ in each]), errors


def guard(req: Any) -> None:
    """Replace the processor of a scheduler's request by a `GuardedProcessor`.

    Raises whatever the sender's bytes raise, and ValueError for a token id outside the vocabulary. On a GPU
    an index outside ends the process.
    """
    processor = CustomLogitProcessor.from_str(req.custom_logit_processor)
    call, ids = type(processor).__call__, []
    if req.sampling_params.custom_params is None:  # SGLang gives the request to the others
        req.sampling_params = copy.copy(req.sampling_params)
        req.sampling_params.custom_params = {_REQUEST: weakref.proxy(req)}
    params = req.sampling_params.custom_params
    if call is DisallowedTokensLogitsProcessor.__call__:
        ids = params.get("token_ids")
        if not isinstance(ids, list):
            raise ValueError("custom_params: token_ids has to be a list of token ids.")
    elif call is ThinkingBudgetLogitProcessor.__call__ and params.get("thinking_budget") is not None:
        ids = [processor.THINKING_END_TOKEN_ID, processor.NEW_LINE_TOKEN_ID]
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < req.vocab_size:
            raise ValueError(f"{token!r:.40} is not a token id, 0 to {req.vocab_size - 1}.")
    made = functools.partial(GuardedProcessor, req.custom_logit_processor, call in _STATELESS_CALLS)
    req.custom_logit_processor = json.dumps({"callable": pickle.dumps(made).hex()})


@functools.lru_cache(maxsize=1024)
def runs_per_slot(serialized: str | None) -> bool:
    """Return whether a request's processor, if any, may be called for every slot of a block."""
    return bool(serialized) and getattr(CustomLogitProcessor.from_str(serialized), "is_stateless", False)


def need_tokens(reqs: Sequence[Any]) -> bool:
    """Return whether a batch has a processor that reads the drafted tokens, on the host."""
    return any(runs_per_slot(req.custom_logit_processor) for req in reqs)


class RequestAtSlot:
    """A request as it would be if the drafted tokens before a slot were its output."""

    def __init__(self, req: Any, drafted: Sequence[int]):
        self._req = req
        self.output_ids = req.output_ids[:]
        self.output_ids.extend(drafted)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


def apply_processors(batch: Any, logits: torch.Tensor, chains: Any) -> None:
    """Apply a batch's processors to the logits of blocks, in place.

    Args:
        batch: the scheduler's. Its outputs on the host must be complete (`disable_overlap_for`).
        logits: [bs, B, vocab].
        chains: SGLang's GrammarTree of the blocks. Not read unless `need_tokens`.
    """
    apply_custom_logit_processor(logits[:, 0], batch.sampling_info)
    for row, req in enumerate(batch.reqs if logits.shape[1] > 1 else ()):
        if runs_per_slot(req.custom_logit_processor):
            drafted, given = chains.resolve()[-1][row, 1:].tolist(), req.sampling_params.custom_params
            slots = range(1, logits.shape[1])
            params = [{**given, _REQUEST: RequestAtSlot(req, drafted[:slot])} for slot in slots]
            processor: Any = CustomLogitProcessor.from_str(req.custom_logit_processor)
            # NaN: the request ends if its output comes to a slot at which the processor raises.
            logits[row, 1:], _ = processor.shape(logits[row, 1:], params)


@patches(
    "sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch",
    at=WORKER,
    signature="(self, batch, last_batch)",
    upstream="docs/dev/upstream/plugin-doors.md",
)
def disable_overlap_for(original: Callable[..., bool], scheduler: Any, batch: Any, last_batch: Any) -> bool:
    """Disable overlap for logit processors too, which read all of their request's tokens."""
    has_processor = getattr(getattr(batch, "sampling_info", None), "has_custom_logit_processor", False)
    return original(scheduler, batch, last_batch) or bool(has_processor and scheduler.result_queue)
