"""Walk of a DFlash2 selector in one launch; the rule is in `layers/candidate_selector.py`."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Candidates(NamedTuple):
    """Candidates of bs blocks of S slots."""

    ids: torch.Tensor  # [bs, S, K] int64, distinct in a slot
    unary: torch.Tensor  # [bs, S, K] float32, their base logits
    gate: torch.Tensor  # [bs, S, r]


class DrawInputs(NamedTuple):
    """Parameters of a sampled walk.

    The filters are joint and look at the distribution over the K candidates at the request's temperature.
    """

    temperature: torch.Tensor  # [bs] float
    top_k: torch.Tensor  # [bs] int; 1 takes the best, as for SGLang's greedy requests
    top_p: torch.Tensor  # [bs] float
    min_p: torch.Tensor  # [bs] float
    uniforms: torch.Tensor  # [bs, S] in [0, 1)


def walk_triton(
    candidates: Candidates,
    anchors: torch.Tensor,
    predecessor_codebook: torch.Tensor,
    successor_codebook: torch.Tensor,
    draw: DrawInputs | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return tokens [bs, S] int64 and, if sampled, their distributions [bs, S, K] float32.

    Arguments as for `candidate_selector.walk_torch`. One program per request: a slot's scores stay in
    registers, so the next one waits for no launch. No host synchronisation. Reads K + 1 rows of the
    codebooks per slot.
    """
    (bs, slots, count), rank = candidates.ids.shape, candidates.gate.shape[2]
    tokens = candidates.ids.new_empty((bs, slots))
    probs: torch.Tensor | None = None
    sampling: dict[str, Any] = dict.fromkeys(DrawInputs._fields)
    if draw is not None:
        sampling = {name: tensor.contiguous() for name, tensor in draw._asdict().items()}
        probs = candidates.unary.new_empty((bs, slots, count), dtype=torch.float32)
    tile, width = triton.next_power_of_2(count), triton.next_power_of_2(rank)
    if bs:
        walk_kernel[(bs,)](
            ids=candidates.ids.contiguous(),
            unary=candidates.unary.contiguous(),
            gate=candidates.gate.contiguous(),
            anchors=anchors.contiguous(),
            predecessors=predecessor_codebook.contiguous(),
            successors=successor_codebook.contiguous(),
            **sampling,
            probs_out=probs,
            tokens=tokens,
            slots=slots,
            candidates=count,
            rank=rank,
            K=tile,
            R=width,
            num_warps=max(1, min(8, tile * width // 1024)),
            # The compiler may keep the scores in two layouts, each computed for itself. A multiply-add fused
            # in one of them only makes a candidate more likely than itself (seen on an H100 with rank 1).
            enable_fp_fusion=False,
        )
    return tokens, probs


@triton.jit
def walk_kernel(
    ids,
    unary,
    gate,
    anchors,
    predecessors,
    successors,
    temperature,
    top_k,
    top_p,
    min_p,
    uniforms,
    probs_out,
    tokens,
    slots,
    candidates,
    rank,
    K: tl.constexpr,
    R: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, K)
    inside = column < candidates
    dim = tl.arange(0, R)
    in_rank = dim < rank
    previous = tl.load(anchors + request)
    for slot in range(slots):
        row = request * slots + slot
        token_ids = tl.load(ids + row * candidates + column, mask=inside, other=0)
        scores = tl.load(unary + row * candidates + column, mask=inside, other=0).to(tl.float32)
        query = tl.load(predecessors + previous * rank + dim, mask=in_rank, other=0).to(tl.float32)
        query *= tl.load(gate + row * rank + dim, mask=in_rank, other=0).to(tl.float32)
        keys = tl.load(
            successors + token_ids[:, None] * rank + dim[None, :],
            mask=inside[:, None] & in_rank[None, :],
            other=0,
        )
        scores += tl.sum(keys.to(tl.float32) * query[None, :], axis=1)
        # Finite at any temperature, as in the twin.
        scores = tl.where(scores == scores, tl.minimum(tl.maximum(scores, -1e30), 1e30), -1e30)
        scores = tl.where(inside, scores, -float("inf"))
        max_score = tl.max(scores, axis=0)
        chosen = tl.min(tl.where(scores == max_score, column, K), axis=0)
        if probs_out is not None:
            probs = tl.exp((scores - max_score) / tl.load(temperature + request))
            probs /= tl.sum(probs, axis=0)
            # [i, j]: candidate j goes before candidate i.
            ahead = probs[None, :] > probs[:, None]
            ahead = ahead | ((probs[None, :] == probs[:, None]) & (column[None, :] < column[:, None]))
            position = tl.sum(ahead.to(tl.int32), axis=1)
            more_likely = tl.sum(tl.where(ahead, probs[None, :], 0), axis=1)
            kept = inside & (position < tl.load(top_k + request)) & (more_likely <= tl.load(top_p + request))
            kept = kept & ((probs >= tl.max(probs, axis=0) * tl.load(min_p + request)) | (position == 0))
            probs = tl.where(kept, probs, 0)
            probs /= tl.sum(probs, axis=0)
            tl.store(probs_out + row * candidates + column, probs, mask=inside)
            wide = probs.to(tl.float64)
            upto = tl.sum(tl.where(column[None, :] <= column[:, None], wide[None, :], 0), axis=1)
            # A float32 draw may have been rounded up to 1.
            uniform = tl.minimum(tl.load(uniforms + row).to(tl.float64), 1 - 1 / 16777216)
            level = uniform * tl.sum(wide, axis=0)
            chosen = tl.min(tl.where((upto > level) & (probs > 0), column, K), axis=0)
        previous = tl.sum(tl.where(column == chosen, token_ids, 0), axis=0)
        tl.store(tokens + row, previous)
