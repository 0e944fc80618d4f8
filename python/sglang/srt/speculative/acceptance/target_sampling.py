"""Sample the target after every position of a verified block."""

import dataclasses
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput, SamplingMaskOutput
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout


class SamplingMasks:
    """Masks of one cycle, for the requests that return them.

    If SGLang's sampler draws the target's tokens, the masks are the sampler's own. If drafts are drawn, they
    are made from the distributions of the rejection rule. If all requests are greedy, each token is its mask.

    Attributes:
        are_requested: whether a request of the batch returns masks.
    """

    def __init__(self, sampling_info: Any, block_size: int):
        self._info, self._block_size = sampling_info, block_size
        self.are_requested = getattr(sampling_info, "sampling_mask_batch_indices", None) is not None

    def sampler_fields(self) -> dict[str, Any]:
        """Return fields of SamplingBatchInfo by which the sampler captures every slot of a block."""
        if not self.are_requested:
            return {}
        support = self._info.sampling_support_logprobs_capture_indices
        return {
            "sampling_mask_batch_indices": self._slots(self._info.sampling_mask_batch_indices),
            "sampling_support_logprobs_capture_indices": None if support is None else self._slots(support),
        }

    def _slots(self, rows: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(self._block_size, device=rows.device)
        return (rows[:, None] * self._block_size + slots).flatten()

    def output(
        self,
        accepted: AcceptedBlocks,
        drawn: SamplingMaskOutput | None = None,
        probs: torch.Tensor | None = None,
    ) -> SamplingMaskOutput:
        """Return the masks of accepted blocks as SGLang's scheduler reads them.

        Args:
            accepted: the blocks.
            drawn: the sampler's masks of every slot. None: it has drawn no token.
            probs: [bs, B, vocab] float32, the distributions of rejection. None unless drafts are drawn.
        """
        rows = self._info.sampling_mask_batch_indices
        if drawn is None:
            capture = SpeculativeSamplingMaskCapture(
                target_probs=probs,
                batch_indices=rows,
                max_top_k=max(self._info.sampling_mask_top_ks),
                support_capture_indices=self._info.sampling_support_logprobs_capture_indices,
            )
            return capture.build_output(out_tokens=accepted.tokens, commit_lens=accepted.commit_lens)
        return SamplingMaskOutput(
            token_ids=self._blocks(drawn.token_ids),
            lengths=self._blocks(drawn.lengths),
            selected_logprobs=self._blocks(drawn.selected_logprobs),
            support_logprobs=None if drawn.support_logprobs is None else self._blocks(drawn.support_logprobs),
            statuses=self._blocks(drawn.statuses),
            num_accept_tokens=accepted.commit_lens.index_select(0, rows),
        )

    def _blocks(self, per_slot: torch.Tensor) -> torch.Tensor:
        return per_slot.unflatten(0, (-1, self._block_size))


# Fields of SamplingBatchInfo with one row per request that shape a distribution.
PER_REQUEST = ("temperatures", "top_ps", "top_ks", "min_ps")


def filters_of_sampled(batch: Any) -> Any:
    """Return a batch's `sampling_info` with only those filters that its sampled requests need.

    SGLang writes a greedy request as top_k = 1. That alone has the sampler sort every row of a mixed batch.
    Greedy requests take the argmax here, so their filter is not needed. With seeds all rows stay sorted: a
    seeded draw is by rank.
    """
    sampling_info = batch.sampling_info
    if sampling_info.is_all_greedy or not sampling_info.is_any_greedy:
        return sampling_info
    if sampling_info.sampling_seed is not None:
        return sampling_info
    sampled = [req.sampling_params for req in batch.reqs if req.sampling_params.top_k > 1]
    largest = max((params.top_k for params in sampled), default=TOP_K_ALL)
    return dataclasses.replace(
        sampling_info,
        need_top_k_sampling=any(params.top_k != TOP_K_ALL for params in sampled),
        need_top_p_sampling=any(params.top_p != 1 for params in sampled),
        need_min_p_sampling=any(params.min_p > 0 for params in sampled),
        max_top_k=None if largest == TOP_K_ALL else largest,
    )


def draw_target_tokens(
    logits: torch.Tensor,
    sampling_info,
    positions: torch.Tensor,
    layout: VerifyLayout,
    sampler,
) -> tuple[torch.Tensor, torch.Tensor, SamplingMaskOutput | None]:
    """Draw the target's token after each block position.

    Greedy requests take the argmax. For others SGLang's sampler draws once per row, under the row's own
    request: the same joint top-k / top-p / min-p filter and seeds as without speculation.

    Args:
        logits: [T, vocab], biased and masked. Sampled requests overwrite them (SGLang's sampler works in
            place).
        sampling_info: SGLang's, one row per request. Its filters may be those of sampled requests only.
        positions: [bs, W] int64, position of each slot's token. SGLang seeds draws with it.
        layout: verified slots.
        sampler: SGLang's.

    Returns:
        Tokens [bs, W] int64, the largest logits [bs, W], and the sampler's masks if a request returns one.
        If a largest logit is not finite, the logits were broken and the token has no meaning
        (`replace_broken_rows`).
    """
    if sampling_info.is_all_greedy:
        sanitize_nan_logits(logits, "DFLASH verify")
        max_logits, tokens = logits.max(dim=-1)
        return layout.to_blocks(tokens), layout.to_blocks(max_logits), None
    max_logits, most_likely = replace_broken_rows(logits)
    per_row = {name: layout.repeat(getattr(sampling_info, name)) for name in (*PER_REQUEST, "sampling_seed")}
    masks = SamplingMasks(sampling_info, layout.verify_len)
    output = LogitsProcessorOutput(next_token_logits=logits)
    drawn = sampler(
        output,
        # Custom processors are applied already, and know nothing of blocks.
        sampling_info=dataclasses.replace(
            sampling_info, **per_row, **masks.sampler_fields(), has_custom_logit_processor=False
        ),
        return_logprob=False,
        top_logprobs_nums=[],
        token_ids_logprobs=[],
        positions=layout.to_rows(positions),
    )
    if not masks.are_requested:  # a mask tells what the sampler drew
        drawn = torch.where(per_row["top_ks"] > 1, drawn, most_likely)
    return layout.to_blocks(drawn.long()), layout.to_blocks(max_logits), output.sampling_mask_output


def target_probs(
    logits: torch.Tensor, sampling_info, layout: VerifyLayout
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the distributions that the sampler would draw from after each block position.

    One joint filter, as the sampler's: top-k and top-p both look at the unfiltered softmax, min-p at its
    largest probability. Greedy requests (top_k 1) are one-hot. Rows are not sorted if the host knows that
    every request's top_k is small. Beside the result, memory of a few times `ELEMENTS_AT_ONCE` is needed.

    Args:
        logits: [T, vocab], biased and masked. Contiguous float32 logits are overwritten with the result: a
            second tensor of this size is 0.5 GB at 48 blocks of 16 and a vocabulary of 152k.
        sampling_info: as of `draw_target_tokens`.
        layout: verified slots.

    Returns:
        Probabilities [T, vocab] float32, contiguous, and the largest logits [bs, W]. If such a logit is not
        finite, the probabilities have no meaning (`replace_broken_rows`).
    """
    max_logits, most_likely = replace_broken_rows(logits)
    per_row = {name: layout.repeat(getattr(sampling_info, name)) for name in PER_REQUEST}
    per_row["most_likely"] = most_likely
    # Of a padded head the logits are a part of wider rows, and kernels read whole ones.
    takes_place = logits.dtype == torch.float32 and logits.is_contiguous()
    probs = logits if takes_place else logits.new_empty(logits.shape, dtype=torch.float32)
    for some in slices_of_rows(*logits.shape):
        torch.softmax(logits[some].float() / per_row["temperatures"][some], dim=-1, out=probs[some])
        _filter(probs[some], {name: values[some] for name, values in per_row.items()}, sampling_info)
    return probs, layout.to_blocks(max_logits)


# Sorting this number of float32 values takes about 0.4 GB of temporary memory.
ELEMENTS_AT_ONCE = 1 << 23


def slices_of_rows(num_rows: int, width: int) -> list[slice]:
    """Split the rows of a matrix into slices that fit into the temporary memory."""
    step = max(1, ELEMENTS_AT_ONCE // width)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


# Beyond about this number, sorting a whole row is as fast as finding its largest entries.
_MOST_WITHOUT_SORT = 256


def _filter(probs: torch.Tensor, per_row: dict[str, torch.Tensor], sampling_info) -> None:
    """Apply each request's filters to its rows of probs [n, vocab] and normalise, in place."""
    filters = (
        sampling_info.need_top_k_sampling,
        sampling_info.need_top_p_sampling,
        sampling_info.need_min_p_sampling,
    )
    if any(filters):
        _keep_likely(probs, per_row, sampling_info)
    if sampling_info.is_any_greedy:  # a sort may begin with another of the largest
        is_greedy = per_row["top_ks"][:, None] <= 1
        one_hot_at = per_row["most_likely"][:, None]
        probs.masked_fill_(is_greedy, 0).scatter_add_(1, one_hot_at, is_greedy.to(probs.dtype))


def _keep_likely(probs: torch.Tensor, per_row: dict[str, torch.Tensor], sampling_info) -> None:
    """Apply top-k, top-p and min-p, as `_filter` does."""
    max_top_k = sampling_info.max_top_k  # None: some request has no such filter
    if max_top_k is not None and max_top_k <= min(_MOST_WITHOUT_SORT, probs.shape[-1]):
        ranked, ids = probs.topk(max_top_k, dim=-1)
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


def replace_broken_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero rows of logits [n, vocab] whose maximum is not finite.

    Returns the maxima and argmaxima of all rows, [n] each.

    Such a row holds NaN or infinity, or no token that the grammar allows. A sampler fails on these rows.
    SGLANG_SANITIZE_NAN_LOGITS has SGLang replace NaN and infinity first, and then no such row is broken.
    """
    sanitize_nan_logits(logits, "DFLASH verify")
    max_logits, most_likely = logits.max(dim=-1)
    logits.masked_fill_(~max_logits.isfinite()[:, None], 0)
    return max_logits, most_likely
