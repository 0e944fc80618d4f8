"""FlashAttention 3's kernels, which read everything from the device."""

import torch
from support.rehearsal import report
from support.rehearsal.attention import attend


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    page_table,
    cache_seqlens,
    cu_seqlens_q,
    max_seqlen_q,
    softmax_scale,
    causal,
    window_size,
    softcap=0.0,
    return_softmax_lse=False,
    out=None,
    cu_seqlens_k_new=None,
    num_splits=0,
    ver=3,
    scheduler_metadata=None,
    sinks=None,
):
    """Attend from q [tokens, heads, d] to caches [pages, page, kv_heads, d].

    page_table: [bs, pages of the longest]. scheduler_metadata: of `get_scheduler_metadata`, for this call.
    """
    assert not return_softmax_lse
    if scheduler_metadata is not None:
        wanted = get_scheduler_metadata(
            *(len(page_table), max_seqlen_q, page_table.shape[1] * k_cache.shape[1]),
            *(q.shape[1], k_cache.shape[2], q.shape[2], cache_seqlens, q.dtype),
            cu_seqlens_q=cu_seqlens_q,
            page_size=k_cache.shape[1],
            causal=causal,
            has_softcap=softcap > 0,
            num_splits=num_splits,
        )
        if scheduler_metadata.tolist() != wanted.tolist() or window_size != (-1, -1):
            report.problem("FA3: the schedule is another call's")
    page = k_cache.shape[1]
    pools = [cache.reshape(-1, *cache.shape[2:]) for cache in (k_cache, v_cache)]
    result = torch.zeros_like(q)
    ends = cu_seqlens_q.tolist()
    for lane, length in enumerate(cache_seqlens.tolist()):
        rows = slice(ends[lane], ends[lane + 1])
        if rows.stop - rows.start > max_seqlen_q:
            report.problem(
                f"FA3, lane {lane}: {rows.stop - rows.start} queries, at most {max_seqlen_q} were announced"
            )
        if -(-length // page) > page_table.shape[1]:
            report.problem(f"FA3, lane {lane}: {length} keys, the page table is {page_table.shape[1]} wide")
        pages = page_table[lane, : -(-length // page)].long()
        slots = (pages[:, None] * page + torch.arange(page)).flatten()[:length]
        keys, values = (pool[slots] for pool in pools)
        back, ahead = window_size
        attended, _ = attend(
            q[rows],
            keys,
            values,
            causal=causal,
            scale=softmax_scale,
            back=back,
            ahead=ahead,
            softcap=softcap,
            sinks=sinks,
        )
        result[rows] = attended.to(q.dtype)
    return result


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads,
    num_heads_k,
    headdim,
    cache_seqlens,
    qkv_dtype,
    headdim_v=None,
    cu_seqlens_q=None,
    page_size=None,
    causal=False,
    has_softcap=False,
    num_splits=0,
):
    """Return everything that a schedule is computed from, for comparison with an attention call's."""
    assert headdim_v in (None, headdim) and qkv_dtype.is_floating_point
    numbers = batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim
    flags = torch.tensor([*numbers, page_size, causal, has_softcap, num_splits], dtype=torch.int32)
    return torch.cat([flags, cache_seqlens.int(), cu_seqlens_q.int()])
