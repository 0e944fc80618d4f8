"""The P-EAGLE draft model (arXiv 2602.01469) on SGLang's layers.

An EAGLE-3 draft that drafts all its tokens in one causal forward. A row is a token and the target's fused
hidden state of the position before it, and predicts the token after its own. Rows whose token and hidden
state are not known yet carry the mask token and a learned state, `mask_hidden`. Positions count rows: the
token at position p of the text is row p - 1. The first token of a text has no row, as no hidden state
precedes it.
"""

from dataclasses import dataclass

import torch
from sglang.srt.layers.layernorm import RMSNorm
from torch import nn

from sglang_dflash.srt.configs.draft_kinds import PEagleDraftConfig
from sglang_dflash.srt.models.block_draft import BlockDraftModel, DraftOutput
from sglang_dflash.srt.models.dflash import DFlashDecoderLayer


@dataclass(frozen=True, slots=True)
class PEagleRows:
    """Inputs of a forward's rows beside their tokens.

    Attributes:
        fused: [n, hidden], the fused hidden state of each row.
        first_drafting: [bs] int64, the first row of each block that drafts. None: a prefill, which drafts
            nothing.
        num_drafting: rows of each block that draft, from `first_drafting` on.
    """

    fused: torch.Tensor
    first_drafting: torch.Tensor | None = None
    num_drafting: int = 0

    def drafting_rows(self) -> torch.Tensor:
        """Return the indices of the drafting rows among all rows, [bs * num_drafting]."""
        assert self.first_drafting is not None
        num_rows, bs, device = self.fused.shape[0], self.first_drafting.numel(), self.fused.device
        first = self.first_drafting + torch.arange(0, num_rows, num_rows // bs, device=device)
        return (first[:, None] + torch.arange(self.num_drafting, device=device)).flatten()


class PEagleFirstLayer(DFlashDecoderLayer):
    """First layer: reads embedding and fused state; only the latter is in the residual."""

    def __init__(self, hf_config, draft: PEagleDraftConfig, layer_id: int, prefix: str):
        super().__init__(hf_config, draft, layer_id, prefix)
        self.hidden_norm = RMSNorm(hf_config.hidden_size, eps=hf_config.rms_norm_eps)
        self.norm_before_residual = draft.norm_before_residual

    def forward(self, positions, embeddings, fused, forward_batch):
        normed = self.hidden_norm(fused)
        residual = normed if self.norm_before_residual else fused
        hidden_states = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        hidden_states = self.self_attn(positions, hidden_states, forward_batch)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class PEagleDraftModel(BlockDraftModel):
    """A P-EAGLE checkpoint of the speculators library.

    Tensors: `embed_tokens`, `fc`, `mask_hidden`, `layers.*`, `norm`, `lm_head`, `d2t`, and `input_norm` or
    `fc_norm.*` if its config enables them.
    """

    layer_class, first_layer_class = DFlashDecoderLayer, PEagleFirstLayer
    draft_config_class = PEagleDraftConfig
    draft: PEagleDraftConfig

    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__(config, quant_config, prefix)
        draft = self.draft
        num_aux, hidden, eps = len(draft.target_layer_ids), config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(num_aux * hidden, eps=eps) if draft.norm_before_fc else None
        fc_norms = nn.ModuleList(RMSNorm(hidden, eps=eps) for _ in range(num_aux))
        self.fc_norm = fc_norms if draft.fc_norm else None
        # Replaces target states that do not exist yet, and goes through norms and fc like them.
        self.mask_hidden = nn.Parameter(torch.empty(1, 1, num_aux * hidden), requires_grad=False)
        self._fused_mask: torch.Tensor | None = None
        self._blocks: PEagleRows | None = None

    def allocate_blocks(self, requests: int, width: int, num_drafting: int) -> None:
        """Allocate inputs of `requests` blocks of `width` rows at addresses that stay."""
        weight = self.norm.weight
        self._block_rows = width
        self._blocks = PEagleRows(
            fused=weight.new_zeros(requests * width, weight.numel()),
            first_drafting=torch.zeros(requests, dtype=torch.int64, device=weight.device),
            num_drafting=num_drafting,
        )

    def blocks(self, requests: int) -> PEagleRows:
        """Return the allocated inputs of the first `requests` blocks."""
        rows = self._blocks
        assert rows is not None and rows.first_drafting is not None, "allocate_blocks comes first"
        fused = rows.fused[: requests * self._block_rows]
        return PEagleRows(fused, rows.first_drafting[:requests], rows.num_drafting)

    @torch.no_grad()
    def fuse(self, aux_hidden: torch.Tensor) -> torch.Tensor:
        """Fuse target states [n, num_aux * hidden], layers in ascending order -> [n, hidden]."""
        if self.input_norm is not None:
            aux_hidden = self.input_norm(aux_hidden)
        if self.fc_norm is not None:
            states = aux_hidden.chunk(len(self.fc_norm), dim=-1)
            aux_hidden = torch.cat(
                [norm(state.contiguous()) for norm, state in zip(self.fc_norm, states, strict=True)], dim=-1
            )
        return self.fc(aux_hidden)[0]

    @property
    def fused_mask(self) -> torch.Tensor:
        """Fused hidden state of a row that has none, [hidden]."""
        if self._fused_mask is None:
            self._fused_mask = self.fuse(self.mask_hidden[0])[0]
        return self._fused_mask

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch) -> DraftOutput:
        """Run rows through the draft, writing their KV.

        Head and argmax follow for the rows that draft, unless the forward ends before the head.

        `input_ids` and `positions` are [n] int64. `forward_batch.spec_info.draft_rows` holds the PEagleRows.
        When SGLang captures a CUDA graph, its own spec_info has none, and the allocated blocks are read.

        Returns:
            The hidden states of the drafting rows, [bs * num_drafting, hidden], after the final norm.
        """
        rows = getattr(forward_batch.spec_info, "draft_rows", None)
        if rows is None:
            rows = self.blocks(input_ids.numel() // self._block_rows)
        hidden_states, residual = self.layers[0](positions, self.embed(input_ids), rows.fused, forward_batch)
        for layer in self.layers[1:]:
            hidden_states, residual = layer(positions, hidden_states, residual, forward_batch)
        if rows.first_drafting is None:
            return DraftOutput(next_token_logits=None, hidden_states=hidden_states)
        drafting = rows.drafting_rows()
        hidden_states, _ = self.norm(hidden_states[drafting], residual[drafting])
        drafted = None if self.ends_before_head else self.draft_tokens(hidden_states)
        return DraftOutput(None, hidden_states=hidden_states, draft_tokens=drafted)

    def renew_cast_weights(self) -> None:
        super().renew_cast_weights()
        self._fused_mask = None


EntryClass = PEagleDraftModel
