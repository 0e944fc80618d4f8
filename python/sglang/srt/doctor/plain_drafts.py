"""The drafts in plain PyTorch, for `doctor --measure`.

No cache and no engine: many blocks of one text at once. Simple rather than fast: a second implementation of
both formats beside `models/dflash.py` and `models/peagle.py`, without SGLang's layers, kernels or attention.
Attention runs over all rows of a forward with a mask. Tests compare it with the `speculators` library's own
logits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from sglang_dflash.srt.configs.draft_config import SLIDING_ATTENTION, DFlashDraftConfig
from sglang_dflash.srt.configs.peagle_config import PEagleDraftConfig


@dataclass(frozen=True)
class Rows:
    """Rows of one forward."""

    positions: torch.Tensor  # [R] int64, for RoPE
    blocks: torch.Tensor  # [R] int64, the block of each row, -1 for none
    anchors: torch.Tensor  # [R] int64, the position before which a row of a block sees everything


class PlainDraft:
    """A draft in plain PyTorch.

    `mask_token_id` and `layer_order` may be changed, to draft by another reading of the checkpoint.
    """

    def __init__(
        self,
        draft: DFlashDraftConfig,
        hf_config,
        weights: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        head: torch.Tensor,
    ):
        """Set up a draft.

        `weights` are the checkpoint's tensors by name, without the prefix `model.`. If it lacks them,
        embedding [vocab, hidden] and head [draft vocab, hidden] are the target's.
        """
        self.draft = draft
        self.mask_token_id = draft.mask_token_id
        self.layer_order = tuple(range(draft.num_hidden_layers))
        self._config = hf_config
        self._weights = weights
        self._embedding = weights.get("embed_tokens.weight", embedding)
        self._head = weights.get("lm_head.weight", head)
        self._rope = Qwen3RotaryEmbedding(hf_config).to(self._embedding.device)
        self._offsets = weights["d2t"].long() if draft.has_own_vocabulary else None

    @property
    def target_ids(self) -> torch.Tensor:
        """Target ids of the draft's vocabulary, [draft vocab] int64."""
        ids = torch.arange(self._head.shape[0], device=self._head.device)
        return ids if self._offsets is None else ids + self._offsets

    def logits(self, tokens: torch.Tensor, aux_hidden: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Compute draft logits.

        Args:
            tokens: [T] int64.
            aux_hidden: [T, num_aux * hidden], captured states; those from an anchor on are not read.
            anchors: [N] int64, positions of the newest tokens.

        Returns:
            [N, K, draft vocab]; entry [i, k] predicts the token at position anchors[i] + 1 + k.
        """
        raise NotImplementedError

    def _block_rows(self, anchors: torch.Tensor, offsets: torch.Tensor) -> Rows:
        positions = (anchors[:, None] + offsets).flatten()
        blocks = torch.arange(len(anchors), device=anchors.device).repeat_interleave(len(offsets))
        return Rows(positions, blocks, anchors.repeat_interleave(len(offsets)))

    def _run_layer(
        self, layer: int, hidden, attention_input, rows: Rows, keys: Rows, context
    ) -> torch.Tensor:
        """Run one layer over rows.

        hidden [R, H] is the residual stream, attention_input [R, *] the input of the q, k and v projections,
        and context [C, *] more input for keys and values, in front of the rows' own, or None.
        """
        name = f"layers.{layer}"
        heads, kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        sources = attention_input if context is None else torch.cat((context, attention_input))
        query = self._rotated(f"{name}.self_attn.q", attention_input, heads, rows.positions)
        key = self._rotated(f"{name}.self_attn.k", sources, kv_heads, keys.positions)
        value = self._heads(f"{name}.self_attn.v_proj", sources, kv_heads)
        groups = heads // kv_heads
        attended = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, dim=0),
            value.repeat_interleave(groups, dim=0),
            attn_mask=self._visible(layer, rows, keys),
        )
        hidden = hidden + self._linear(f"{name}.self_attn.o_proj", attended.transpose(0, 1).flatten(1))
        normed = self._norm(f"{name}.post_attention_layernorm", hidden)
        gated = F.silu(self._linear(f"{name}.mlp.gate_proj", normed)) * self._linear(
            f"{name}.mlp.up_proj", normed
        )
        return hidden + self._linear(f"{name}.mlp.down_proj", gated)

    def _visible(self, layer: int, rows: Rows, keys: Rows) -> torch.Tensor:
        """Return [R, keys] bool, True if a row of this layer sees a key."""
        query, anchor, key = rows.positions[:, None], rows.anchors[:, None], keys.positions[None]
        outside = keys.blocks[None] < 0
        visible = torch.where(outside, key < anchor, rows.blocks[:, None] == keys.blocks[None])
        if self.draft.is_causal(layer):
            visible &= key <= query
        if self.draft.layer_types[layer] == SLIDING_ATTENTION:
            start = anchor if self.draft.window_from_anchor else query
            visible &= key >= start - self.draft.tokens_before_window_start
            if not self.draft.window_from_anchor:
                visible &= key <= query + self.draft.tokens_before_window_start
        return visible

    def _heads(self, name: str, x: torch.Tensor, count: int) -> torch.Tensor:
        return self._linear(name, x).unflatten(-1, (count, -1)).transpose(0, 1)  # [count, R, head_dim]

    def _rotated(self, name: str, x: torch.Tensor, count: int, positions: torch.Tensor) -> torch.Tensor:
        heads = self._heads(f"{name}_proj", x, count)
        if f"{name}_norm.weight" in self._weights:
            heads = self._norm(f"{name}_norm", heads)
        cos, sin = self._rope(heads, positions[None])
        return apply_rotary_pos_emb(heads[None], heads[None], cos, sin)[0][0]

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


class PlainDFlash(PlainDraft):
    """DFlash: only blocks have rows, and every layer's context is the target's fused states."""

    def logits(self, tokens, aux_hidden, anchors):
        draft, device = self.draft, tokens.device
        context = self._norm("hidden_norm", self._linear("fc", aux_hidden))
        rows = self._block_rows(anchors, torch.arange(draft.block_size, device=device))
        ids = torch.full((len(anchors), draft.block_size), self.mask_token_id, device=device)
        ids[:, 0] = tokens[anchors]
        places = torch.arange(len(context), device=device)
        keys = _after(Rows(places, torch.full_like(places, -1), places), rows)
        hidden = self._embedding[ids.flatten()]
        for layer in self.layer_order:
            normed = self._norm(f"layers.{layer}.input_layernorm", hidden)
            hidden = self._run_layer(layer, hidden, normed, rows, keys, context)
        hidden = self._norm("norm", hidden).view(*ids.shape, -1)[:, draft.num_idle_rows :][
            :, : draft.speculative_tokens
        ]
        return F.linear(hidden, self._head)


class PlainPEagle(PlainDraft):
    """P-EAGLE: the text's rows are shared by all blocks, whose own rows are masks."""

    draft: PEagleDraftConfig

    def logits(self, tokens, aux_hidden, anchors):
        drafted, device, last = self.draft.speculative_tokens, tokens.device, int(anchors.max())
        # Row p holds the token at p + 1 and the state at p, so row anchor - 1 holds the newest token.
        places = torch.arange(last, device=device)
        text = Rows(places, torch.full_like(places, -1), places + 1)
        masks = self._block_rows(anchors, torch.arange(drafted - 1, device=device))
        rows = _after(text, masks)
        ids = torch.cat((tokens[1 : last + 1], torch.full_like(masks.positions, self.mask_token_id)))
        states = torch.cat(
            (aux_hidden[:last], self._weights["mask_hidden"][0].expand(len(masks.positions), -1))
        )
        fused = self._fuse(states)
        hidden = fused
        for index, layer in enumerate(self.layer_order):
            name = f"layers.{layer}"
            if index == 0:
                normed = self._norm("layers.0.hidden_norm", fused)
                hidden = normed if self.draft.norm_before_residual else fused
                embedded = self._norm(f"{name}.input_layernorm", self._embedding[ids])
                attention_input = torch.cat((embedded, normed), dim=-1)
            else:
                attention_input = self._norm(f"{name}.input_layernorm", hidden)
            hidden = self._run_layer(layer, hidden, attention_input, rows, rows, None)
        first = hidden[anchors - 1][:, None]
        hidden = torch.cat((first, hidden[last:].view(len(anchors), drafted - 1, hidden.shape[-1])), dim=1)
        return F.linear(self._norm("norm", hidden), self._head)

    def _fuse(self, states: torch.Tensor) -> torch.Tensor:
        if self.draft.norm_before_fc:
            states = self._norm("input_norm", states)
        if self.draft.fc_norm:
            parts = states.chunk(len(self.draft.target_layer_ids), dim=-1)
            states = torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=-1)
        return self._linear("fc", states)


def plain_draft(draft: DFlashDraftConfig, *args) -> PlainDraft:
    """Build the plain model of a draft, with the arguments of PlainDraft."""
    return (PlainPEagle if isinstance(draft, PEagleDraftConfig) else PlainDFlash)(draft, *args)


def _after(first: Rows, second: Rows) -> Rows:
    return Rows(
        *(torch.cat((getattr(first, n), getattr(second, n))) for n in ("positions", "blocks", "anchors"))
    )
