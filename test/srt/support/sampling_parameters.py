"""Sampling parameters of a batch, as SGLang's type or as the columns a drafter reads."""

from types import SimpleNamespace

import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

VOCABULARY = 10
TOP_K_ALL = 1 << 30  # what SGLang makes of top_k = -1


def sampling_info(*requests: dict, seeds: list[int] | None = None) -> SamplingBatchInfo:
    """Build SGLang's SamplingBatchInfo, one row per request.

    A greedy request is {"top_k": 1}: SGLang turns temperature 0 into that.
    """

    def column(name, default, dtype):
        return torch.tensor([request.get(name, default) for request in requests], dtype=dtype)

    top_ks = column("top_k", TOP_K_ALL, torch.int32)
    top_ps, min_ps = column("top_p", 1.0, torch.float32), column("min_p", 0.0, torch.float32)
    return SamplingBatchInfo(
        temperatures=column("temperature", 1.0, torch.float32)[:, None],
        top_ps=top_ps,
        top_ks=top_ks,
        min_ps=min_ps,
        is_all_greedy=bool((top_ks == 1).all()),
        is_any_greedy=bool((top_ks == 1).any()),
        need_top_p_sampling=bool((top_ps != 1).any()),
        need_top_k_sampling=bool((top_ks != TOP_K_ALL).any()),
        need_min_p_sampling=bool((min_ps > 0).any()),
        vocab_size=VOCABULARY,
        sampling_seed=None if seeds is None else torch.tensor(seeds),
        max_top_k=int(top_ks.max()) if bool((top_ks != TOP_K_ALL).all()) else None,
        device="cpu",
    )


def sampling_parameters(**columns) -> SimpleNamespace:
    """Build a drafter's columns: temperatures [bs, 1], top_ks [bs] int32, top_ps [bs]."""
    return SimpleNamespace(
        temperatures=torch.tensor(columns["temperature"])[:, None],
        top_ks=torch.tensor(columns["top_k"], dtype=torch.int32),
        top_ps=torch.tensor(columns["top_p"]),
    )
