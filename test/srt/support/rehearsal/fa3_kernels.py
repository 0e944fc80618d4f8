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

    page_table: [bs, pages of the longest].
    """
    assert not return_softmax_lse and scheduler_metadata is None
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
