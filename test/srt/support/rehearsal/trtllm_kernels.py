"""TensorRT-LLM's attention kernels in FlashInfer (`trtllm_mha`), which read lengths from the device."""

import torch
from support.rehearsal import report
from support.rehearsal.attention import attend


def trtllm_batch_decode_with_kv_cache(
    *, seq_lens, q_len_per_req=1, max_q_len=None, cum_seq_lens_q=None, **arguments
) -> torch.Tensor:
    """Attend from equally many tokens of each request, or from as many as `cum_seq_lens_q` says."""
    if cum_seq_lens_q is None:
        cum_seq_lens_q, max_q_len = torch.arange(len(seq_lens) + 1) * q_len_per_req, q_len_per_req
    else:
        assert q_len_per_req is None
    return _attend(seq_lens=seq_lens, max_q_len=max_q_len, cum_seq_lens_q=cum_seq_lens_q, **arguments)


def trtllm_batch_context_with_kv_cache(*, batch_size, causal, **arguments) -> torch.Tensor:
    """Attend from the tokens of prompts."""
    assert causal and batch_size == len(arguments["seq_lens"])
    return _attend(**arguments)


def _attend(
    *,
    query,
    kv_cache,
    block_tables,
    seq_lens,
    cum_seq_lens_q,
    max_q_len,
    bmm1_scale,
    bmm2_scale,
    window_left,
    sinks=None,
    out=None,
    **_,
) -> torch.Tensor:
    """Attend from query [tokens, heads, d] to keys and values [pages, kv_heads, page, d], causally.

    block_tables: pages of each request. seq_lens: its keys, its queries included.
    """
    assert bmm2_scale == 1.0
    keys, values = (cache.transpose(1, 2) for cache in kv_cache)
    page = keys.shape[1]
    result = torch.zeros_like(query) if out is None else out.zero_()
    ends = cum_seq_lens_q.tolist()
    if ends[-1] > len(query):
        report.problem(f"trtllm: queries end at {ends[-1]}, there are {len(query)}")
    for lane, length in enumerate(seq_lens.tolist()):
        rows = slice(ends[lane], ends[lane + 1])
        num_queries = rows.stop - rows.start
        if num_queries > min(max_q_len, length):
            report.problem(
                f"trtllm, lane {lane}: {num_queries} queries, {max_q_len} announced, {length} keys"
            )
        pages = block_tables[lane, : -(-length // page)].long()
        own = (cache[pages].flatten(0, 1)[:length] for cache in (keys, values))
        attended, _ = attend(query[rows], *own, causal=True, scale=bmm1_scale, back=window_left, sinks=sinks)
        result[rows] = attended.to(query.dtype)
    return result
