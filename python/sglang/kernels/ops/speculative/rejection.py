"""Accepted lengths in one launch, equal to those of REJECTION_RULES in PyTorch."""

import torch
import triton
import triton.language as tl


def accept_drafts_triton(
    block: torch.Tensor,
    target_probs: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    rule: str,
    starts: torch.Tensor | None = None,
    max_accept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return accept_len [bs] int32 and weight [bs] float64, as `draw_final_tokens` takes them.

    One program per request, no host synchronisation. Reads 12 bytes per drafted slot and candidate. Block
    verification reads these twice, and the target's probability of each candidate once. Arguments are
    contiguous, and as for `accept_drawn` except for two. `starts` [bs] int64 is the row of `target_probs` of
    each request's anchor, `max_accept` [bs] int32 the verified drafted tokens. If both are None, every
    request verifies its block. `draft_ids` and `draft_probs` are the fields of `DraftProbs`.
    """
    tensors = block, target_probs, draft_ids, draft_probs, accept_uniforms
    assert all(tensor.is_contiguous() for tensor in tensors)
    (bs, verify_len), candidates = block.shape, draft_ids.shape[2]
    accept_len = block.new_empty((bs,), dtype=torch.int32)
    weight = block.new_empty((bs,), dtype=torch.float64)
    tile = min(triton.next_power_of_2(candidates), 1024)
    if bs:
        accept_drafts_kernel[(bs,)](
            block=block,
            target_probs=target_probs,
            draft_ids=draft_ids,
            draft_probs=draft_probs,
            accept_uniforms=accept_uniforms,
            starts=starts,
            max_accept=max_accept,
            accept_len=accept_len,
            weight=weight,
            verify_len=verify_len,
            candidates=candidates,
            vocabulary=target_probs.shape[-1],
            RULE=rule,
            TILE=tile,
            num_warps=max(1, min(8, tile // 128)),
        )
    return accept_len, weight


# The uniforms are a part of one draw: their alignment depends on the number of requests.
@triton.jit(do_not_specialize=["verify_len"], do_not_specialize_on_alignment=["accept_uniforms"])
def accept_drafts_kernel(
    block,
    target_probs,
    draft_ids,
    draft_probs,
    accept_uniforms,
    starts,
    max_accept,
    accept_len,
    weight,
    verify_len,
    candidates,
    vocabulary,
    RULE: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program per request, one step per drafted slot."""
    request = tl.program_id(0).to(tl.int64)
    block += request * verify_len
    if starts is not None:
        target_probs += tl.load(starts + request) * vocabulary
        end = tl.load(max_accept + request) + 1
    else:
        target_probs += request * verify_len * vocabulary
        end = verify_len
    draft_ids += request * (verify_len - 1) * candidates
    draft_probs += request * (verify_len - 1) * candidates
    accept_uniforms += request * (verify_len - 1)
    column = tl.arange(0, TILE)
    kept = tl.full((), 0, tl.int32)
    going_on = tl.full((), 1, tl.int32)
    prefix_weight = tl.full((), 1, tl.float64)
    kept_weight = tl.full((), 1, tl.float64)
    for length in range(1, end):
        token = tl.load(block + length)
        target = tl.load(target_probs + token).to(tl.float64)
        draft = tl.full((), 0, tl.float64)
        for start in range(0, candidates, TILE):
            inside = start + column < candidates
            ids = tl.load(draft_ids + start + column, mask=inside, other=-1)
            probs = tl.load(draft_probs + start + column, mask=inside, other=0)
            draft += tl.sum(tl.where(ids == token, probs, 0), axis=0)
        target_probs += vocabulary
        draft_ids += candidates
        draft_probs += candidates
        uniform = tl.load(accept_uniforms + length - 1).to(tl.float64)
        if RULE == "block":
            prefix_weight = tl.minimum(prefix_weight * (target / draft), 1)
            shared = tl.full((), 0, tl.float64)
            if length < end - 1:
                for start in range(0, candidates, TILE):
                    inside = start + column < candidates
                    ids = tl.load(draft_ids + start + column, mask=inside, other=0)
                    probs = tl.load(draft_probs + start + column, mask=inside, other=0).to(tl.float64)
                    targets = tl.load(target_probs + ids, mask=inside, other=0).to(tl.float64)
                    shared += tl.sum(tl.minimum(prefix_weight * targets, probs), axis=0)
            accepted = uniform * (1 - shared) < prefix_weight - shared
            kept = tl.where(accepted, length, kept)
            kept_weight = tl.where(accepted, prefix_weight, kept_weight)
        else:
            tl.static_assert(RULE == "standard")
            going_on &= (uniform * draft < target).to(tl.int32)
            kept += going_on
    request = tl.program_id(0)
    tl.store(accept_len + request, kept)
    tl.store(weight + request, kept_weight)
