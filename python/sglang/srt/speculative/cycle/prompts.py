"""Requests of a prefill, and requests that another server has prefilled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sglang_dflash.srt.speculative.cycle.host import ragged_ranges, table_rows


@dataclass(frozen=True, slots=True)
class Prompts:
    """Tokens of one prefill, request after request. Fixed before the target's forward.

    Attributes:
        req_pool_indices: [bs] int64, rows of the request table.
        tokens: [n] int64, n = sum(extend_lens). In place of a picture's tokens SGLang has hashes of it.
        positions: [n] int64.
        prefix_lens: position of each request's first token, on the host.
        extend_lens: number of each request's tokens, on the host.
        num_running: requests at the end of the batch that are not new. In a mixed batch a running request
            takes part with its bonus token.
        is_continued: per request, whether its tokens continue an earlier step's instead of a cached prefix.
        table_rows: [bs] int64, `req_pool_indices` on the host.
        reqs: SGLang's requests, in this order.
    """

    req_pool_indices: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    prefix_lens: list[int]
    extend_lens: list[int]
    num_running: int
    is_continued: list[bool]
    table_rows: np.ndarray
    reqs: Sequence[Any] = ()

    @property
    def new_reqs(self) -> Sequence[Any]:
        """SGLang's requests without the running ones."""
        return self.reqs[: len(self.reqs) - self.num_running]

    @property
    def ends(self) -> list[int]:
        """Tokens of each request with KV after this prefill."""
        return [prefix + new for prefix, new in zip(self.prefix_lens, self.extend_lens, strict=True)]

    def tokens_to_embed(self) -> torch.Tensor:
        """Return `tokens` with the vocabulary's tokens for pictures, videos and sounds."""
        tokens = self.tokens
        for req in self.new_reqs:
            inputs = req.multimodal_inputs
            for item in getattr(inputs, "mm_items", ()):
                if item.is_video():
                    token = inputs.video_token_id
                else:
                    token = inputs.audio_token_id if item.is_audio() else inputs.im_token_id
                for value in getattr(item, "pad_values", None) or (item.pad_value,):  # 0.5.22 has one
                    # A processor that names no token: the draft sees another one, and drafts a little worse.
                    tokens = torch.where(tokens == value, token or 0, tokens)
        return tokens

    @classmethod
    def from_batch(cls, batch: Any) -> "Prompts":
        """Read the prompts of the scheduler's prefill or mixed batch."""
        num_running = len(batch.decoding_reqs) if batch.forward_mode.is_mixed() else 0
        new = batch.reqs[: len(batch.reqs) - num_running]
        return cls(
            req_pool_indices=batch.req_pool_indices,
            tokens=batch.input_ids,
            positions=ragged_ranges(batch.prefix_lens, batch.extend_lens, batch.device),
            prefix_lens=list(batch.prefix_lens),
            extend_lens=list(batch.extend_lens),
            num_running=num_running,
            is_continued=[req.extend_batch_idx > 1 for req in new] + [True] * num_running,
            table_rows=table_rows(batch),
            reqs=batch.reqs,
        )


@dataclass(frozen=True, slots=True)
class PrefilledRequests:
    """Requests prefilled by another server: newly arrived, or resumed after retraction.

    Attributes:
        reqs: SGLang's requests. One that was retracted since its admission has no row any more.
        req_pool_indices: [bs] int64, rows of the request table at the admission.
        table_rows: [bs] int64, the same on the host.
        lengths: tokens of each request with KV, n.
        bonus_tokens: [bs] int64, the token at position n.
        output_ids: output of each request at its admission, the bonus token included.
    """

    reqs: Sequence[Any]
    req_pool_indices: torch.Tensor
    table_rows: np.ndarray
    lengths: list[int]
    bonus_tokens: torch.Tensor
    output_ids: list[list[int]]
