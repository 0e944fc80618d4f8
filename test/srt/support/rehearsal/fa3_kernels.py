"""FlashAttention 3's kernels, which read everything from the device."""

from support.rehearsal.attention import attend_pages


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
    back, ahead = window_size
    options = {"causal": causal, "scale": softmax_scale, "back": back, "ahead": ahead}
    queries = page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q
    return attend_pages("FA3", q, (k_cache, v_cache), *queries, **options, softcap=softcap, sinks=sinks)
