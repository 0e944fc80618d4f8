"""Attention over a KV pool in dense PyTorch, for the kernels that need a GPU."""

import math
from collections.abc import Sequence

import torch
from support.rehearsal import report


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    back: int = -1,
    ahead: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from q [n, q_heads, d] to keys and values [m, kv_heads, d].

    The queries are at the last n of the m positions. back, ahead: how many positions before and after its
    own a query sees; -1: all. sinks: logits of a key without a value, [q_heads].

    Returns [n, q_heads, d_v] float32 and the base-2 log of the sums, [n, q_heads].
    """
    n, m = q.shape[0], keys.shape[0]
    group = q.shape[1] // keys.shape[1]
    keys, values = (t.float().repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    query, key = torch.arange(m - n, m)[:, None], torch.arange(m)[None]
    seen = torch.ones(n, m, dtype=torch.bool)
    if causal:
        seen &= key <= query
    if back >= 0:
        seen &= key >= query - back
    if ahead >= 0:
        seen &= key <= query + ahead
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, n, 1)], dim=-1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    attended = torch.einsum("hnm,mhd->nhd", torch.softmax(scores, dim=-1).nan_to_num(), values)
    return attended, (torch.logsumexp(scores, dim=-1) / math.log(2)).T


def attend_pages(
    name: str,
    q: torch.Tensor,
    pools: Sequence[torch.Tensor],
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    ends: torch.Tensor,
    max_queries: int,
    **options,
) -> torch.Tensor:
    """Attend from q [tokens, heads, d] to keys and values in `pools`, [pages, page, kv_heads, d] each.

    name: the kernel's, for problems. page_table: [bs, pages of the longest]. lengths: keys of each request.
    ends: [bs + 1], where the queries of each request end.
    """
    page, result, ends = pools[0].shape[1], torch.zeros_like(q), ends.tolist()
    for lane, length in enumerate(lengths.tolist()):
        rows = slice(ends[lane], ends[lane + 1])
        if rows.stop - rows.start > max_queries:
            report.problem(
                f"{name}, lane {lane}: {rows.stop - rows.start} queries, at most {max_queries} were announced"
            )
        num_pages = -(-length // page)
        if num_pages > page_table.shape[1]:
            report.problem(
                f"{name}, lane {lane}: {length} keys, the page table is {page_table.shape[1]} wide"
            )
        pages = page_table[lane, :num_pages].long()
        keys, values = (pool[pages].flatten(0, 1)[:length] for pool in pools)
        result[rows] = attend(q[rows], keys, values, **options)[0].to(q.dtype)
    return result


def merge(out_a, lse_a, out_b, lse_b) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attentions over parts of the keys into one, as FlashInfer's `merge_state`."""
    highest = torch.maximum(lse_a, lse_b)
    a, b = (torch.exp2(lse - highest).nan_to_num() for lse in (lse_a, lse_b))
    merged = (out_a * a[..., None] + out_b * b[..., None]) / (a + b)[..., None]
    return merged.to(out_a.dtype), highest + torch.log2(a + b)
