"""The drafts in plain PyTorch, for `doctor --measure`.

No cache and no engine: many blocks of one text at once. Simple rather than fast: a second implementation of
the formats beside `models/dflash.py`, `models/dflash2.py` and `models/peagle.py`, without SGLang's layers,
kernels or attention. Attention runs over all rows of a forward with a mask. Tests compare it with the
`speculators` library's own logits, and DFlash2 with the tests' reference.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from sglang_dflash.srt.configs.draft_config import SLIDING_ATTENTION, DFlashDraftConfig
from sglang_dflash.srt.configs.draft_kinds import DFlash2DraftConfig, PEagleDraftConfig


@dataclass(frozen=True)
class AttentionRows:
    """Rows of one forward."""

    positions: torch.Tensor  # [R] int64, for RoPE
    blocks: torch.Tensor  # [R] int64, the block of each row, -1 for none
    anchors: torch.Tensor  # [R] int64, the position before which a row of a block sees everything


@dataclass(frozen=True)
class DraftedBlocks:
    """Blocks of N anchors, K tokens each; entry [i, k] is for the position anchors[i] + 1 + k."""

    tokens: torch.Tensor  # [N, K] int64, target ids of the drafted tokens
    logits: torch.Tensor  # [N, K, draft vocab] float32, given the text's own tokens before


class PlainDraft(ABC):
    """A draft in plain PyTorch.

    `mask_token_id`, `embedding_scale`, `rotary_share` and `weights` may be changed, to draft by another
    interpretation of the checkpoint.
    """

    def __init__(
        self,
        draft: DFlashDraftConfig,
        hf_config,
        weights: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        head: torch.Tensor,
        target_scale: float = 1.0,
        rotary_shares: Sequence[float] = (1.0,),
    ):
        """Set up a draft.

        `weights` are the checkpoint's tensors by name, without the prefix `model.`, and `mask_embedding`
        [hidden] if the checkpoint has one. Without an own one, embedding [vocab, hidden] and head
        [draft vocab, hidden] are the target's. The target's module multiplies embeddings by `target_scale`.
        The first of `rotary_shares` is the share of a head that is rotated.
        """
        self.draft = draft
        assert draft.mask_token_id is not None, "a pair looks it up"
        self.mask_token_id = draft.mask_token_id
        self._config = hf_config
        self.weights = weights
        self._embedding = weights.get("embed_tokens.weight", embedding)
        self.target_scale = 1.0 if "embed_tokens.weight" in weights else target_scale
        configured = draft.input_embedding_scale
        self.embedding_scale = self.target_scale if configured is None else configured
        self._head = weights.get("lm_head.weight", head)
        self.rotary_share = rotary_shares[0]
        self.ropes = {share: _rope(hf_config, share).to(self._embedding.device) for share in rotary_shares}
        self._offsets = weights["d2t"].long() if draft.has_own_vocabulary else None

    @property
    def target_ids(self) -> torch.Tensor:
        """Target ids of the draft's vocabulary, [draft vocab] int64."""
        ids = torch.arange(self._head.shape[0], device=self._head.device)
        return ids if self._offsets is None else ids + self._offsets

    def draft_blocks(
        self, tokens: torch.Tensor, aux_hidden: torch.Tensor, anchors: torch.Tensor
    ) -> DraftedBlocks:
        """Draft the blocks after some tokens of a text.

        Args:
            tokens: [T] int64, target ids.
            aux_hidden: [T, num_aux * hidden], captured states; those from an anchor on are not read.
            anchors: [N] int64, positions of the newest tokens.
        """
        logits = self._base_logits(self.hidden_states(tokens, aux_hidden, anchors))
        return DraftedBlocks(self.target_ids[logits.argmax(dim=-1)], logits)

    @abstractmethod
    def hidden_states(self, tokens, aux_hidden, anchors) -> torch.Tensor:
        """Return the states [N, K, hidden] of the drafting rows, after the final norm."""

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        embedded = self._embedding[ids]
        if (mask := self.weights.get("mask_embedding")) is not None:
            embedded = torch.where((ids == self.mask_token_id)[:, None], mask, embedded)
        return embedded * self.embedding_scale

    def _base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [..., draft vocab], scaled and capped as the config says."""
        logits = F.linear(hidden, self._head).float() * self.draft.output_multiplier
        cap = self.draft.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _block_rows(self, anchors: torch.Tensor, offsets: torch.Tensor) -> AttentionRows:
        positions = (anchors[:, None] + offsets).flatten()
        blocks = torch.arange(len(anchors), device=anchors.device).repeat_interleave(len(offsets))
        return AttentionRows(positions, blocks, anchors.repeat_interleave(len(offsets)))

    def _run_layer(
        self, layer: int, hidden, attention_input, rows: AttentionRows, keys: AttentionRows, context
    ) -> torch.Tensor:
        """Run one layer over rows.

        hidden [R, H] is the residual stream. attention_input [R, *] is the input of the q, k and v
        projections. context [C, *] is more input for keys and values, in front of the rows' own, or None.
        """
        name = f"layers.{layer}"

        def attention(x: torch.Tensor) -> torch.Tensor:
            return self._attend(layer, x=x, rows=rows, keys=keys, context=context)

        def mlp(x: torch.Tensor) -> torch.Tensor:
            gated = F.silu(self._linear(f"{name}.mlp.gate_proj", x))
            return self._linear(f"{name}.mlp.down_proj", gated * self._linear(f"{name}.mlp.up_proj", x))

        hidden = hidden + self._run_sublayer(f"{name}.attention_conv", attention, attention_input)
        normed = self._norm(f"{name}.post_attention_layernorm", hidden)
        return hidden + self._run_sublayer(f"{name}.mlp_conv", mlp, normed)

    def _run_sublayer(
        self, conv: str, sublayer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        """Run a sublayer on x [R, *]; `conv` names the tensors of a DFlash2 draft around it."""
        return sublayer(x)

    def _attend(
        self, layer: int, x: torch.Tensor, rows: AttentionRows, keys: AttentionRows, context
    ) -> torch.Tensor:
        name = f"layers.{layer}"
        heads, kv_heads = self._config.num_attention_heads, self._config.num_key_value_heads
        sources = x if context is None else torch.cat((context, x))
        query = self._rotate(f"{name}.self_attn.q", x, heads, rows.positions)
        key = self._rotate(f"{name}.self_attn.k", sources, kv_heads, keys.positions)
        value = self._heads(f"{name}.self_attn.v_proj", sources, kv_heads)
        groups = heads // kv_heads
        attended = F.scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, dim=0),
            value.repeat_interleave(groups, dim=0),
            attn_mask=self._visible(layer, rows, keys),
        )
        return self._linear(f"{name}.self_attn.o_proj", attended.transpose(0, 1).flatten(1))

    def _visible(self, layer: int, rows: AttentionRows, keys: AttentionRows) -> torch.Tensor:
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

    def _rotate(self, name: str, x: torch.Tensor, count: int, positions: torch.Tensor) -> torch.Tensor:
        heads = self._heads(f"{name}_proj", x, count)
        if f"{name}_norm.weight" in self.weights:
            heads = self._norm(f"{name}_norm", heads)
        return self.rotate(heads, positions)

    def rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate the first channels of heads [count, R, head_dim], `rotary_share` of them."""
        rope = self.ropes[self.rotary_share]
        turned, rest = heads.split((rope.config.head_dim, heads.shape[-1] - rope.config.head_dim), dim=-1)
        cos, sin = rope(turned, positions[None])
        return torch.cat((apply_rotary_pos_emb(turned[None], turned[None], cos, sin)[0][0], rest), dim=-1)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


class PlainDFlash(PlainDraft):
    """DFlash: only blocks have rows, and every layer's context is the target's fused states."""

    def hidden_states(self, tokens, aux_hidden, anchors):
        draft, device = self.draft, tokens.device
        context = self._norm("hidden_norm", self._linear("fc", aux_hidden))
        rows = self._block_rows(anchors, torch.arange(draft.block_size, device=device))
        ids = torch.full((len(anchors), draft.block_size), self.mask_token_id, device=device)
        ids[:, 0] = tokens[anchors]
        places = torch.arange(len(context), device=device)
        keys = _after(AttentionRows(places, torch.full_like(places, -1), places), rows)
        hidden = self._embed(ids.flatten())
        for layer in range(draft.num_hidden_layers):
            normed = self._norm(f"layers.{layer}.input_layernorm", hidden)
            hidden = self._run_layer(
                layer, hidden=hidden, attention_input=normed, rows=rows, keys=keys, context=context
            )
        hidden = self._norm("norm", hidden).view(*ids.shape, -1)
        return hidden[:, draft.num_idle_rows :][:, : draft.speculative_tokens]


class PlainDFlash2(PlainDFlash):
    """DFlash2: DFlash with convolutions along the block and a selector.

    The selector chains the block's tokens: it scores candidates by the token before them. `has_selector` may
    be changed as `mask_token_id` may.
    """

    draft: DFlash2DraftConfig
    has_selector = True

    def draft_blocks(self, tokens, aux_hidden, anchors):
        hidden = self.hidden_states(tokens, aux_hidden, anchors)
        logits = self._base_logits(hidden)
        if not self.has_selector:
            return DraftedBlocks(logits.argmax(dim=-1), logits)
        unary, ids = logits[..., : self.draft.selector_vocab_size].topk(self.draft.selector_top_k, dim=-1)
        gate = self._linear("candidate_selector.hidden_projection", hidden).float()
        path, previous = [], tokens[anchors]
        for slot in range(hidden.shape[1]):
            scores = self._scores(gate[:, slot], previous, ids[:, slot], unary[:, slot])
            previous = ids[:, slot].gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
            path.append(previous)
        before = anchors[:, None] + torch.arange(hidden.shape[1], device=anchors.device)
        scores = self._scores(gate, tokens[before.clamp(max=len(tokens) - 1)], ids, unary)
        # Scores are trained among the candidates alone. So the candidates share the probability that the base
        # logits give to all candidates. Other tokens keep theirs: none has probability zero.
        scores = scores + unary.logsumexp(-1, keepdim=True) - scores.logsumexp(-1, keepdim=True)
        return DraftedBlocks(torch.stack(path, dim=1), logits.scatter(-1, ids, scores))

    def _scores(self, gate, previous, ids, unary) -> torch.Tensor:
        """Return the scores [..., K] of candidates after the tokens `previous` [...].

        `gate` [..., rank] are the projected hidden states; `ids` and `unary` [..., K] the candidates and
        their logits.
        """
        codebooks = (f"candidate_selector.{side}_codebook" for side in ("predecessor", "successor"))
        before, after = (self.weights[name] for name in codebooks)
        query = before[previous].float() * gate
        return unary + (after[ids].float() @ query[..., None])[..., 0]

    def _run_sublayer(self, conv, sublayer, x):
        taps = self.draft.conv_kernel_size
        if not taps:
            return sublayer(x)
        # [R, 2, taps, hidden]: what each row adds to the kernels, the same for the channels of a group.
        added = self._linear(f"{conv}.kernel_projection", x).view(len(x), 2, taps, -1)
        kernels = self.weights[f"{conv}.base_kernel"] + added.repeat_interleave(
            self.draft.conv_group_size, dim=-1
        )
        return self._convolve(sublayer(self._convolve(x, kernels[:, 0])), kernels[:, 1])

    def _convolve(self, x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """Convolve rows x [R, hidden] along their blocks by kernels [R, taps, hidden]."""
        blocks = x.view(-1, self.draft.block_size, x.shape[-1])
        shifted = [
            F.pad(blocks, (0, 0, tap, 0))[:, : blocks.shape[1]].reshape(x.shape)
            for tap in range(kernels.shape[1])
        ]
        return (kernels * torch.stack(shifted, dim=1)).sum(dim=1)


class PlainPEagle(PlainDraft):
    """P-EAGLE: the text's rows are shared by all blocks, whose own rows are masks."""

    draft: PEagleDraftConfig

    def hidden_states(self, tokens, aux_hidden, anchors):
        drafted, device, last = self.draft.speculative_tokens, tokens.device, int(anchors.max())
        # Row p holds the token at p + 1 and the state at p, so row anchor - 1 holds the newest token.
        places = torch.arange(last, device=device)
        text = AttentionRows(places, torch.full_like(places, -1), places + 1)
        masks = self._block_rows(anchors, torch.arange(drafted - 1, device=device))
        rows = _after(text, masks)
        ids = torch.cat((tokens[1 : last + 1], torch.full_like(masks.positions, self.mask_token_id)))
        states = torch.cat(
            (aux_hidden[:last], self.weights["mask_hidden"][0].expand(len(masks.positions), -1))
        )
        fused = self._fuse(states)
        hidden = fused
        for layer in range(self.draft.num_hidden_layers):
            name = f"layers.{layer}"
            if layer == 0:
                normed = self._norm("layers.0.hidden_norm", fused)
                hidden = normed if self.draft.norm_before_residual else fused
                embedded = self._norm(f"{name}.input_layernorm", self._embed(ids))
                attention_input = torch.cat((embedded, normed), dim=-1)
            else:
                attention_input = self._norm(f"{name}.input_layernorm", hidden)
            hidden = self._run_layer(
                layer, hidden=hidden, attention_input=attention_input, rows=rows, keys=rows, context=None
            )
        first = hidden[anchors - 1][:, None]
        hidden = torch.cat((first, hidden[last:].view(len(anchors), drafted - 1, hidden.shape[-1])), dim=1)
        return self._norm("norm", hidden)

    def _fuse(self, states: torch.Tensor) -> torch.Tensor:
        if self.draft.norm_before_fc:
            states = self._norm("input_norm", states)
        if self.draft.fc_norm:
            parts = states.chunk(len(self.draft.target_layer_ids), dim=-1)
            states = torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=-1)
        return self._linear("fc", states)


def _rope(hf_config, share: float) -> Qwen3RotaryEmbedding:
    """Return the rotary embedding of the first channels of a head, this share of them."""
    config = copy.copy(hf_config)
    head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    config.head_dim = 2 * int(share * head_dim / 2)
    return Qwen3RotaryEmbedding(config)


def plain_draft(draft: DFlashDraftConfig, *args, **kwargs) -> PlainDraft:
    """Build the plain model of a draft, with the arguments of PlainDraft."""
    if isinstance(draft, PEagleDraftConfig):
        return PlainPEagle(draft, *args, **kwargs)
    return (PlainDFlash2 if isinstance(draft, DFlash2DraftConfig) else PlainDFlash)(draft, *args, **kwargs)


def _after(first: AttentionRows, second: AttentionRows) -> AttentionRows:
    return AttentionRows(
        *(torch.cat((getattr(first, n), getattr(second, n))) for n in ("positions", "blocks", "anchors"))
    )
