"""Assemble the drafter of a server."""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.runtime_context import get_spec

from sglang_dflash.srt.compat import run_as_draft
from sglang_dflash.srt.configs.checkpoint import read_mask_embedding
from sglang_dflash.srt.configs.draft_tensors import EMBEDDING, HEAD, vocabulary_problems
from sglang_dflash.srt.configs.fields import DraftConfigError
from sglang_dflash.srt.models.dflash import DFlashDraftModel
from sglang_dflash.srt.models.dflash2 import DFlash2DraftModel
from sglang_dflash.srt.models.peagle import PEagleDraftModel
from sglang_dflash.srt.speculative.dflash_utils import check_borrowed_layers
from sglang_dflash.srt.speculative.drafters.base import Drafter
from sglang_dflash.srt.speculative.drafters.dflash import DFlash2Drafter, DFlashDrafter
from sglang_dflash.srt.speculative.drafters.peagle import PEagleDrafter

logger = logging.getLogger(__name__)

_DRAFTERS = (  # a model comes before its base class
    (DFlash2DraftModel, DFlash2Drafter),
    (DFlashDraftModel, DFlashDrafter),
    (PEagleDraftModel, PEagleDrafter),
)


def load_draft(
    server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker, draft_ranks: Any
) -> TpModelWorker:
    """Load the draft model into a separate worker.

    Raises ValueError if the target cannot lend what the draft needs, or the mask token cannot be found.
    """
    spec, target_runner = get_spec(), target_worker.model_runner
    with run_as_draft(draft_ranks):
        worker = TpModelWorker(
            server_args=server_args,
            gpu_id=gpu_id,
            nccl_port=nccl_port,
            is_draft_worker=True,
            # The draft runs at the target's positions, whatever its own config says about its length.
            context_length=target_runner.model_config.context_len,
            draft_attention_backend=spec.speculative_draft_attention_backend,
        )
    model = worker.model_runner.model
    worker.draft_runner = worker.model_runner  # SGLang's device timers look for it here
    checkpoint = spec.speculative_draft_model_path, spec.speculative_draft_model_revision
    tokens = target_runner.model_config.vocab_size
    own = {name for name in (EMBEDDING, HEAD) if getattr(model, name.removesuffix(".weight")) is not None}
    if problems := vocabulary_problems(model.draft, tokens, own, model.d2t):  # of files from the hub
        raise DraftConfigError(checkpoint[0], problems)
    model.prepare_mask(target_worker.tokenizer, read_mask_embedding(*checkpoint), tokens)
    return worker


class _NoLogits(GraphSharedOutput):
    """Stand for SGLang's buffer of logits, in graphs that put none there."""

    def get_logits_buffer(self, vocab_size: int, *, rows: int) -> torch.Tensor:
        return torch.empty(0, vocab_size, device=self.device)


@contextlib.contextmanager
def without_logits_buffer(device: str) -> Iterator[None]:
    """Capture a draft's graphs without a buffer of logits.

    A draft keeps its logits to itself. P-EAGLE's 2 (B - 1) rows are more than a verify's B, and for them
    SGLang would allocate a second buffer: 0.9 GB at 48 requests, B = 16 and 152k tokens.
    """
    shared = GraphSharedOutput._process_shared
    GraphSharedOutput._process_shared = _NoLogits(device=torch.device(device), max_rows=sys.maxsize)
    try:
        yield
    finally:
        GraphSharedOutput._process_shared = shared


def drafter_class(draft_model: Any) -> type[Drafter]:
    """Return the class that drives a draft model."""
    return next(drafter for model, drafter in _DRAFTERS if isinstance(draft_model, model))


def build_drafter(draft_runner: Any, target_model: Any, block_size: int, draft_ranks: Any) -> Drafter:
    """Build the drafter for a draft model.

    Raises ValueError if the draft's ranks cannot borrow the target's layers."""
    check_borrowed_layers(draft_ranks, target_model)
    drafter = drafter_class(draft_runner.model)(draft_runner, target_model, block_size)
    model = draft_runner.model
    if draft_ranks.local_dp:
        run_on_own_ranks(drafter, draft_ranks)
    logger.info(
        "sglang-dflash DFlashWorker with %s: block size %d, %d draft layers reading target layers %s, draft "
        "attention %s.",
        type(drafter).__name__,
        block_size,
        model.draft.num_hidden_layers,
        list(model.draft.target_layer_ids),
        get_spec().speculative_draft_attention_backend,
    )
    return drafter


def run_on_own_ranks(drafter: Drafter, draft_ranks: Any) -> None:
    """Run a drafter on fewer ranks than the target, which to its layers are all ranks.

    The part inside the target's graphs (`write_context_in_graph`) exchanges nothing, and needs no context.
    """

    def on_draft_ranks(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with run_as_draft(draft_ranks):
                return method(*args, **kwargs)

        return run

    for name in ("begin_prefill", "prefill", "admit_prefilled", "propose", "commit"):
        setattr(drafter, name, on_draft_ranks(getattr(drafter, name)))
