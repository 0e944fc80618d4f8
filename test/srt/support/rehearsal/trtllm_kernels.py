"""TensorRT-LLM's attention kernels in FlashInfer (`trtllm_mha`), which read lengths from the device."""

import torch
from support.rehearsal import report
from support.rehearsal.attention import attend_pages


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
    if cum_seq_lens_q[-1] > len(query):
        report.problem(f"trtllm: queries end at {cum_seq_lens_q.tolist()}, there are {len(query)}")
    if (cum_seq_lens_q.diff() > seq_lens).any():
        report.problem(f"trtllm: queries end at {cum_seq_lens_q.tolist()}, of {seq_lens.tolist()} keys")
    pools = [cache.transpose(1, 2) for cache in kv_cache]
    options = {"causal": True, "scale": bmm1_scale, "back": window_left, "sinks": sinks}
    queries = block_tables, seq_lens, cum_seq_lens_q, max_q_len
    result = attend_pages("trtllm", query, pools, *queries, **options)
    return result if out is None else out.copy_(result)
