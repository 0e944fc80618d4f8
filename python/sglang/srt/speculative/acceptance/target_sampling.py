"""What the target would say after every position of a verified block."""

import dataclasses

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.utils.async_probe import sanitize_nan_logits

# Fields of SamplingBatchInfo that hold one row per request and shape the target's distribution.
_PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")


def draw_target_tokens(
    logits: torch.Tensor, sampling_info, positions: torch.Tensor, block_size: int, sampler
) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's token after each block position, [bs, B] int64, and the largest logit there, [bs, B]:
    where that is not finite, the logits were broken and the token means nothing (`replace_broken_rows`).

    logits: [bs * B, vocab], already biased and masked; sampled requests overwrite it (SGLang's sampler works
    in place). positions: [bs * B] int64, the position each row's input token has: SGLang seeds its draws with
    it. Greedy requests take the argmax. Otherwise SGLang's own sampler draws, once per row, under the row's
    own request: the same joint top-k / top-p / min-p filter and seeds as without speculation."""
    if sampling_info.is_all_greedy:
        sanitize_nan_logits(logits, "DFLASH verify")
        best, tokens = logits.max(dim=-1)
        return tokens.view(-1, block_size), best.view(-1, block_size)
    best = replace_broken_rows(logits)
    per_row = {name: repeat_rows(getattr(sampling_info, name), block_size) for name in _PER_REQUEST}
    drawn = sampler(
        LogitsProcessorOutput(next_token_logits=logits),
        dataclasses.replace(sampling_info, **per_row),
        return_logprob=False,
        top_logprobs_nums=[],
        token_ids_logprobs=[],
        positions=positions,
    )
    return drawn.long().view(-1, block_size), best.view(-1, block_size)


def target_probs(logits: torch.Tensor, sampling_info, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The distributions the sampler would draw from after each block position, [bs, B, vocab] float32, and
    the largest logit there, [bs, B]: where that is not finite, they mean nothing (`replace_broken_rows`).

    logits: [bs * B, vocab], already biased and masked. Overwritten: where they are float32, with the result,
    as a second tensor of this size is 0.5 GB at bs 48, B 16 and V = 152k. What is needed besides is a few
    times `_ELEMENTS_AT_ONCE`. Where the host knows that every request's top_k is small, rows are not sorted.

    One joint filter, as the sampler's: top-k and top-p both look at the unfiltered softmax, min-p at its
    largest probability. Greedy requests (top_k 1) are one-hot."""
    best = replace_broken_rows(logits)
    per_row = {name: repeat_rows(getattr(sampling_info, name), block_size) for name in _PER_REQUEST[:4]}
    probs = logits if logits.dtype == torch.float32 else torch.empty_like(logits, dtype=torch.float32)
    for rows in slices_of_rows(*logits.shape):
        torch.softmax(logits[rows].float() / per_row["temperatures"][rows], dim=-1, out=probs[rows])
        of_rows = {name: None if v is None else v[rows] for name, v in per_row.items()}
        _filter(probs[rows], of_rows, sampling_info)
    return probs.view(-1, block_size, probs.shape[-1]), best.view(-1, block_size)


# A sort of so many float32 and what comes of it take about 0.4 GB.
_ELEMENTS_AT_ONCE = 1 << 23


def slices_of_rows(num_rows: int, width: int) -> list[slice]:
    """All rows of a matrix, as many at once as may be worked on in temporary memory."""
    step = max(1, _ELEMENTS_AT_ONCE // width)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


# From about here on, sorting a whole row takes no longer than finding its largest entries.
_MOST_WITHOUT_SORT = 256


def _filter(probs: torch.Tensor, per_row: dict[str, torch.Tensor | None], sampling_info) -> None:
    """Leave of each row, [n, vocab], what its request's filters do, normalised, in place."""
    filters = (
        sampling_info.need_top_k_sampling,
        sampling_info.need_top_p_sampling,
        sampling_info.need_min_p_sampling,
    )
    if not any(filters):
        return
    most = sampling_info.max_top_k  # None where a request has no such filter
    if most is not None and most <= min(_MOST_WITHOUT_SORT, probs.shape[-1]):
        ranked, ids = probs.topk(most, dim=-1)
        probs.zero_()
    else:
        ranked, ids = probs.sort(dim=-1, descending=True)
    more_likely = ranked.cumsum(dim=-1).sub_(ranked)
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    drop = (rank >= per_row["top_ks"][:, None]).logical_or_(more_likely > per_row["top_ps"][:, None])
    if sampling_info.need_min_p_sampling:
        drop |= ranked < ranked[:, :1] * per_row["min_ps"][:, None]
    probs.scatter_(1, ids, ranked.masked_fill_(drop, 0))
    probs /= probs.sum(dim=-1, keepdim=True)


def replace_broken_rows(logits: torch.Tensor) -> torch.Tensor:
    """The largest of each row of logits [n, vocab], [n]. Rows where it is not finite, with NaN or infinity
    among them or nothing that a grammar allows, become zeros, as a sampler does not survive them; what is
    drawn there is not to be believed.

    SGLANG_SANITIZE_NAN_LOGITS has SGLang replace NaN and infinity by finite numbers, after which no such row
    is broken."""
    sanitize_nan_logits(logits, "DFLASH verify")
    best = logits.amax(dim=-1)
    logits.masked_fill_(~best.isfinite()[:, None], 0)
    return best


def repeat_rows(per_request: torch.Tensor | None, block_size: int) -> torch.Tensor | None:
    """[bs, ...] -> [bs * block_size, ...], one row per block position."""
    if per_request is None or block_size == 1:
        return per_request
    return per_request.repeat_interleave(block_size, dim=0)
