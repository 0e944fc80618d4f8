"""Sampling masks: the tokens that each emitted token was drawn from."""

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput, SamplingMaskOutput
from sglang.srt.speculative.spec_sampling_mask import SpeculativeSamplingMaskCapture

from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks


class SamplingMasks:
    """The masks of one cycle, for the requests that return them.

    If SGLang's sampler draws the target's tokens, the masks are the sampler's own. If drafts are drawn, they
    are made from the distributions of the rejection rule.

    Attributes:
        drawn: where the sampler leaves its masks.
        probs: [bs, B, vocab] float32, the distributions of rejection. None: there are none.
    """

    def __init__(self, sampling_info: Any, block_size: int):
        self._info, self._block_size = sampling_info, block_size
        self.drawn = LogitsProcessorOutput(next_token_logits=None)
        self.probs: torch.Tensor | None = None

    @classmethod
    def requested(cls, sampling_info: Any, block_size: int) -> "SamplingMasks | None":
        """Return the masks of a batch's blocks. None: no request returns any."""
        if getattr(sampling_info, "sampling_mask_batch_indices", None) is None:
            return None
        return cls(sampling_info, block_size)

    def sampler_fields(self) -> dict[str, Any]:
        """Return fields of SamplingBatchInfo by which the sampler captures every slot of a block."""
        support = self._info.sampling_support_logprobs_capture_indices
        return {
            "sampling_mask_batch_indices": self._slots(self._info.sampling_mask_batch_indices),
            "sampling_support_logprobs_capture_indices": None if support is None else self._slots(support),
        }

    def _slots(self, rows: torch.Tensor) -> torch.Tensor:
        slots = torch.arange(self._block_size, device=rows.device)
        return (rows[:, None] * self._block_size + slots).flatten()

    def output(self, accepted: AcceptedBlocks) -> SamplingMaskOutput:
        """Return the masks of accepted blocks as SGLang's scheduler reads them."""
        rows = self._info.sampling_mask_batch_indices
        drawn = self.drawn.sampling_mask_output
        if drawn is None:
            capture = SpeculativeSamplingMaskCapture(
                target_probs=self.probs,
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
        return per_slot.view(-1, self._block_size, *per_slot.shape[1:])
