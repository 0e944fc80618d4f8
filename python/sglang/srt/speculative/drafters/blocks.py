"""Blocks of a cycle, filled by the draft for the requests that its plan drafts for."""

import dataclasses
from typing import Any

import numpy as np
import torch

from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.acceptance.target_sampling import PER_REQUEST
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.host import on_device, table_rows
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout
from sglang_dflash.srt.speculative.cycle.plan import CyclePlan
from sglang_dflash.srt.speculative.drafters.base import Drafter


def draft_blocks(
    drafter: Drafter, batch: Any, plan: CyclePlan, block_size: int, needs_draft: bool, target_runner: Any
) -> tuple[Cycle, DraftBlock, bool]:
    """Begin a cycle, and draft its blocks.

    Args:
        drafter: fills blocks.
        batch: the scheduler's decode batch.
        plan: of the cycle.
        block_size: B.
        needs_draft: whether a request drafts, if the plan leaves copies to the matches.
        target_runner: plans KV slots.

    Returns:
        The cycle, with the slots of its blocks; the blocks; whether the draft's forward ran.
    """
    num_slots, verify_len = block_size, plan.verify_len
    if plan.copies_each_match:
        on_host = np.arange(plan.layout.bs if needs_draft or not drafter.writes_context_apart else 0)
    else:
        rows, verified = table_rows(batch), plan.layout.num_draft_tokens
        on_host = np.flatnonzero(drafter.rows_to_draft(rows, verified, (verified > 0) & ~plan.copies))
        num_slots = block_size if len(on_host) or verify_len > 1 else 1
    cycle = Cycle.begin(batch, target_runner, drafter.mask_token_id, num_slots)
    block = draft_subset(
        drafter,
        cycle=cycle,
        on_host=on_host,
        layout=plan.layout,
        sampling_info=batch.sampling_info if plan.draws else None,
        target_runner=target_runner,
    )
    return cycle, block, bool(len(on_host))


def draft_subset(
    drafter: Drafter,
    cycle: Cycle,
    on_host: np.ndarray,
    layout: VerifyLayout,
    sampling_info: Any,
    target_runner: Any,
) -> DraftBlock:
    """Fill the verified slots of some blocks; the others repeat their anchor.

    The draft's forward takes whole blocks of the chosen requests and nothing of the others.

    Args:
        drafter: fills blocks.
        cycle: all requests of the batch, blocks with all slots to draft.
        on_host: [m] int64, requests to draft for.
        layout: verified slots. The result has the slots of the longest request.
        sampling_info: SGLang's, for all requests. If given, tokens are drawn.
        target_runner: plans the slots of the chosen requests.
    """
    lengths, verify_len = layout.num_draft_tokens, layout.verify_len
    draws = sampling_info is not None and verify_len > 1
    if len(on_host) == cycle.bs and cycle.verify_len > 1:
        return drafter.propose(cycle, sampling_info if draws else None, lengths).narrow(verify_len)
    if cycle.verify_len == 1:
        return DraftBlock(cycle.tokens)
    tokens = cycle.tokens[:, :1].repeat(1, verify_len)
    if not len(on_host):
        return DraftBlock(tokens)
    drafted = on_device(on_host, torch.int64, tokens.device)
    own_sampling = None
    if draws:
        per_request = {name: getattr(sampling_info, name)[drafted] for name in PER_REQUEST}
        own_sampling = dataclasses.replace(sampling_info, **per_request)
    own_cycle = cycle.of_requests(on_host, drafted, target_runner)
    block = drafter.propose(own_cycle, own_sampling, lengths[on_host]).narrow(verify_len)
    num_slots = block.tokens.shape[1]  # a copy may be longer
    tokens[drafted, :num_slots] = block.tokens
    if block.probs is None:
        return DraftBlock(tokens)
    # A token that was not drawn has probability 1.
    ids = tokens[:, 1:, None].repeat(1, 1, block.probs.ids.shape[2])
    probs = torch.zeros_like(ids, dtype=block.probs.probs.dtype)
    probs[..., 0] = 1.0
    filled = drafted, slice(0, num_slots - 1)
    ids[filled], probs[filled] = block.probs.ids, block.probs.probs
    return DraftBlock(tokens, DraftProbs(ids, probs))
