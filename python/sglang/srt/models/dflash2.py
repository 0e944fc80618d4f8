"""The DFlash2 draft model: a DFlash draft with convolutions and a candidate selector.

Format: z-lab/dflash, `DFlash2DraftModel`. Convolutions along the block wrap both halves of a layer. The
context's keys and values are a plain draft's. Weights of convolutions and selector are whole on every rank:
their rows are channels of the hidden state, and tokens of the target's vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.utils import add_prefix
from torch import nn

from sglang_dflash.kernels.ops.speculative.block_conv import block_conv
from sglang_dflash.kernels.ops.speculative.selector_walk import Candidates, DrawInputs, walk_triton
from sglang_dflash.srt.configs.draft_kinds import DFLASH2_ARCHITECTURES, DFlash2DraftConfig
from sglang_dflash.srt.layers.candidate_selector import walk_torch
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.layers.vocab_argmax import largest_logits
from sglang_dflash.srt.models.block_draft import DraftOutput
from sglang_dflash.srt.models.dflash import DFlashDecoderLayer, DFlashDraftModel


@dataclass
class DFlash2Output(DraftOutput):
    """Draft output and `Candidates` [num_blocks, B - 1, ...]; a CUDA graph pads them."""

    candidate_ids: torch.Tensor | None = None
    unary: torch.Tensor | None = None
    gate: torch.Tensor | None = None

    def candidates(self, bs: int) -> Candidates:
        """Return the candidates of the first bs blocks."""
        ids, unary, gate = self.candidate_ids, self.unary, self.gate
        assert ids is not None and unary is not None and gate is not None
        return Candidates(ids[:bs], unary[:bs], gate[:bs])


class BlockConv(nn.Module):
    """Convolutions of one sublayer's input and output.

    Every channel has its own kernel. Each row adds to it a term per group of channels, from a projection of
    the sublayer's input. One projection serves both convolutions.
    """

    def __init__(self, hidden_size: int, taps: int, group_size: int, prefix: str):
        super().__init__()
        self.taps = taps
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden_size), requires_grad=False)
        # Never quantized: it is small, and quantized drafts leave it out.
        self.kernel_projection = ReplicatedLinear(
            hidden_size,
            2 * taps * (hidden_size // group_size),
            bias=False,
            prefix=add_prefix("kernel_projection", prefix),
        )

    def forward(
        self, x: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor], width: int
    ) -> torch.Tensor:
        """Run `sublayer` on x [num_blocks * width, hidden] between the two convolutions."""
        before, after = self.kernel_projection(x)[0].view(x.shape[0], 2, self.taps, -1).unbind(dim=1)
        output = sublayer(block_conv(x, self.base_kernel[0], before, width))
        return block_conv(output, self.base_kernel[1], after, width)


class DFlash2DecoderLayer(DFlashDecoderLayer):
    """A draft layer with convolutions around attention and MLP, if the config has any."""

    def __init__(self, hf_config, draft: DFlash2DraftConfig, layer_id: int, prefix: str):
        super().__init__(hf_config, draft, layer_id, prefix)
        self.has_convolutions = draft.conv_kernel_size > 0
        if not self.has_convolutions:
            return
        hidden_size, taps, group_size = hf_config.hidden_size, draft.conv_kernel_size, draft.conv_group_size
        self.attention_conv = BlockConv(hidden_size, taps, group_size, add_prefix("attention_conv", prefix))
        self.mlp_conv = BlockConv(hidden_size, taps, group_size, add_prefix("mlp_conv", prefix))

    def forward(self, positions, hidden_states, residual, forward_batch):
        if not self.has_convolutions:
            return super().forward(positions, hidden_states, residual, forward_batch)
        width = forward_batch.spec_info.draft_token_num
        hidden_states, residual = self.norm_input(hidden_states, residual)
        hidden_states = self.attention_conv(
            hidden_states, lambda x: self.self_attn(positions, x, forward_batch), width
        )
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp_conv(hidden_states, self.mlp, width), residual


class CandidateSelector(nn.Module):
    """Weights of the candidate selector, which `srt/layers/candidate_selector.py` describes."""

    def __init__(self, config, draft: DFlash2DraftConfig, prefix: str):
        super().__init__()
        rank = draft.selector_rank
        self.predecessor_codebook = nn.Parameter(torch.zeros(draft.vocab_size, rank), requires_grad=False)
        self.successor_codebook = nn.Parameter(torch.zeros(draft.vocab_size, rank), requires_grad=False)
        self.hidden_projection = ReplicatedLinear(
            config.hidden_size, rank, bias=False, prefix=add_prefix("hidden_projection", prefix)
        )

    def walk(
        self, candidates: Candidates, anchors: torch.Tensor, draw: DrawInputs | None = None
    ) -> tuple[torch.Tensor, DraftProbs | None]:
        """Return tokens [bs, S] int64 and, if they are sampled, their distributions.

        NaN counts as the lowest score, infinity as the highest finite one. Verification uses the
        probabilities of the draw. `anchors` are [bs] int64. Without `draw`: each slot's best token.
        """
        run = walk_triton if candidates.ids.is_cuda else walk_torch
        tokens, probs = run(
            candidates,
            anchors=anchors,
            predecessor_codebook=self.predecessor_codebook,
            successor_codebook=self.successor_codebook,
            draw=draw,
        )
        return tokens, None if probs is None else DraftProbs(candidates.ids, probs)


class DFlash2DraftModel(DFlashDraftModel):
    """A DFlash2 checkpoint: DFlash's, `layers.*.{attention,mlp}_conv`, `candidate_selector`."""

    draft: DFlash2DraftConfig
    layer_class = DFlash2DecoderLayer
    output_class = DFlash2Output
    draft_config_class = DFlash2DraftConfig

    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__(config, quant_config, prefix)
        prefix = add_prefix("candidate_selector", prefix)
        self.candidate_selector = CandidateSelector(config, self.draft, prefix)

    def choose_greedily(
        self, output: DFlash2Output, rows: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Choose the selector's best path. The output keeps the candidates."""
        found = self.candidates(rows)
        output.candidate_ids, output.unary, output.gate = found
        return self.candidate_selector.walk(found, anchors[:, 0])[0]

    def candidates(self, rows: torch.Tensor) -> Candidates:
        """Find candidates of drafting rows [..., hidden], after the final norm."""
        hidden = rows.flatten(0, -2)
        logits, ids = largest_logits(
            hidden, self.head, self.draft.selector_top_k, self.draft.selector_vocab_size
        )
        found = self.cap_logits(logits).float(), ids, self.candidate_selector.hidden_projection(hidden)[0]
        unary, ids, gate = (tensor.view(*rows.shape[:-1], -1) for tensor in found)
        return Candidates(ids, unary, gate)


# One model under all names that SGLang has for it.
EntryClass = [
    DFlash2DraftModel,
    *(type(name, (DFlash2DraftModel,), {}) for name in DFLASH2_ARCHITECTURES[1:]),
]
