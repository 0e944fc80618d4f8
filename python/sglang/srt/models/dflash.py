"""The DFlash draft model (arXiv 2602.06036, section 3) on SGLang's layers.

A few Qwen3-style layers fill a block of mask tokens in one forward. It differs from a language model in two
ways. Its context is hidden states captured from the target, not its own tokens: `write_context_kv` writes
their keys and values straight into the KV pool of every layer. And the block's tokens attend to each other in
both directions. Embedding and LM head are the target's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.models.qwen2 import Qwen2MLP
from sglang.srt.models.utils import apply_qk_norm
from sglang.srt.utils import add_prefix
from sglang.srt.utils.hf_transformers.common import get_rope_config
from torch import nn

from sglang_dflash.kernels.ops.speculative.context_kv import (
    KVPoolPointers,
    rms_norm,
    rotate,
    write_context_kv,
)
from sglang_dflash.srt.compat import table_qk_norm_rope_
from sglang_dflash.srt.configs.draft_config import SLIDING_ATTENTION, DFlashDraftConfig
from sglang_dflash.srt.layers.plain_weight import plain_weight
from sglang_dflash.srt.models.block_draft import BlockDraftModel, DraftOutput

_TARGET_ROPE_FIELDS = ("rope_dim", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


class DFlashAttention(nn.Module):
    """Attention of one draft layer over committed context (in the KV pool) and the block."""

    def __init__(self, hf_config, draft: DFlashDraftConfig, layer_id: int, prefix: str):
        super().__init__()
        total_heads = hf_config.num_attention_heads
        total_kv_heads = hf_config.num_key_value_heads
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // total_heads
        self.head_dim = head_dim
        bias = bool(getattr(hf_config, "attention_bias", False))
        self.qkv_proj = QKVParallelLinear(
            draft.attention_inputs(layer_id),
            head_size=head_dim,
            total_num_heads=total_heads,
            total_num_kv_heads=total_kv_heads,
            bias=bias,
            prefix=add_prefix("qkv_proj", prefix),
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_size, self.kv_size = self.qkv_proj.q_proj_shard_size, self.qkv_proj.kv_proj_shard_size
        self.o_proj = RowParallelLinear(
            total_heads * head_dim, hf_config.hidden_size, bias=bias, prefix=add_prefix("o_proj", prefix)
        )
        # Any: a P-EAGLE draft without these norms has no code path that reads them.
        self.q_norm: Any = RMSNorm(head_dim, eps=hf_config.rms_norm_eps) if draft.has_qk_norm else None
        self.k_norm: Any = RMSNorm(head_dim, eps=hf_config.rms_norm_eps) if draft.has_qk_norm else None
        # [q heads + kv heads, head_dim], gathered on first use on a CPU.
        self.qk_weight: torch.Tensor | None = None
        rope_theta, rope_scaling = get_rope_config(hf_config)
        # The draft of a target with M-RoPE may have its sections in the config; its positions are the text's.
        rope_scaling = {k: v for k, v in (rope_scaling or {}).items() if k not in _TARGET_ROPE_FIELDS} or None
        # The draft runs at the target's positions, whatever length it was trained for.
        positions = max(hf_config.max_position_embeddings, getattr(hf_config, "context_len", 0))
        self.rotary_emb = get_rope(
            head_dim, rotary_dim=head_dim, max_position=positions, base=rope_theta, rope_scaling=rope_scaling
        )
        if not (hasattr(self.rotary_emb, "cos_sin_cache") and self.rotary_emb.rotary_dim == head_dim):
            raise ValueError(f"DFLASH draft: RoPE of kind {rope_scaling} is not supported")
        sliding = draft.layer_types[layer_id] == SLIDING_ATTENTION
        self.attn = RadixAttention(
            self.num_heads,
            head_dim=head_dim,
            scaling=head_dim**-0.5,
            num_kv_heads=self.num_kv_heads,
            layer_id=layer_id,
            sliding_window_size=draft.tokens_before_window_start if sliding else -1,
            # To SGLang's backends, non-causal attention over the pool is the "encoder only" kind.
            attn_type=AttentionType.DECODER if draft.is_causal(layer_id) else AttentionType.ENCODER_ONLY,
            prefix=add_prefix("attn", prefix),
        )
        self.attn.window_from_anchor = draft.window_from_anchor  # for our CPU attention

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch) -> torch.Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        if qkv.is_cpu:
            q, k, v = self._norm_and_rotate(qkv, positions)
        else:
            is_ready = self.norm_and_rotate_in_place(qkv, positions)
            q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
            if not is_ready:
                if self.q_norm is not None:
                    q, k = apply_qk_norm(
                        q, k=k, q_norm=self.q_norm, k_norm=self.k_norm, head_dim=self.head_dim
                    )
                q, k = self.rotary_emb(positions, q, k)
        attended = self.attn(q, k, v, forward_batch)
        output, _ = self.o_proj(attended.flatten(1))
        return output

    def norm_and_rotate_in_place(self, qkv: torch.Tensor, positions: torch.Tensor) -> bool:
        """Run SGLang's kernel for bfloat16 and heads of a power of two. Return whether it ran.

        0.5.22 has no such kernel."""
        if table_qk_norm_rope_ is None:
            return False
        if self.q_norm is None or self.head_dim & (self.head_dim - 1) or not self.rotary_emb.is_neox_style:
            return False
        q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        if any(tensor.dtype != torch.bfloat16 for tensor in (qkv, q_weight, k_weight)):
            return False
        table_qk_norm_rope_(
            qkv,
            positions=positions,
            q_weight=q_weight,
            k_weight=k_weight,
            cos_sin_cache=self.rotary_emb.cos_sin_cache,
            num_q_heads=self.num_heads,
            num_k_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            eps=self.q_norm.variance_epsilon,
        )
        return True

    def _norm_and_rotate(self, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Norm and rotate all heads together on a CPU: a third of SGLang's operations."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        normed = self.num_heads + self.num_kv_heads
        qk = heads[:, :normed]
        if self.q_norm is not None:
            if self.qk_weight is None:
                heads_and_norms = (self.num_heads, self.q_norm), (self.num_kv_heads, self.k_norm)
                self.qk_weight = torch.cat([norm.weight.expand(n, -1) for n, norm in heads_and_norms])
            qk = rms_norm(qk, self.qk_weight, self.q_norm.variance_epsilon)
        qk = rotate(qk, positions, self.rotary_emb.cos_sin_cache)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], heads[:, normed:]

    def context_kv_weight(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return K and V rows of `qkv_proj`: weight [2 * kv_size, hidden], bias or None."""
        bias = self.qkv_proj.bias
        return plain_weight(self.qkv_proj)[self.q_size :], None if bias is None else bias[self.q_size :]


class DFlashDecoderLayer(nn.Module):
    """A draft layer."""

    def __init__(self, hf_config, draft: DFlashDraftConfig, layer_id: int, prefix: str):
        super().__init__()
        self.self_attn = DFlashAttention(hf_config, draft, layer_id, add_prefix("self_attn", prefix))
        hidden_size, eps = hf_config.hidden_size, hf_config.rms_norm_eps
        self.mlp = Qwen2MLP(
            hidden_size,
            hf_config.intermediate_size,
            hf_config.hidden_act,
            prefix=add_prefix("mlp", prefix),
        )
        self.input_layernorm = RMSNorm(hidden_size, eps=eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=eps)

    def norm_input(self, hidden_states, residual):
        """Return normalised input and residual, [n, hidden]; the first layer has no residual."""
        if residual is None:
            return self.input_layernorm(hidden_states), hidden_states
        return self.input_layernorm(hidden_states, residual)

    def forward(self, positions, hidden_states, residual, forward_batch):
        hidden_states, residual = self.norm_input(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states, forward_batch)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class DFlashDraftModel(BlockDraftModel):
    """A DFlash checkpoint: `layers.*`, `fc`, `hidden_norm`, `norm`, maybe a vocabulary.

    The vocabulary is `embed_tokens`, `lm_head` and `d2t`. z-lab's drafts bring none of them and borrow the
    target's embedding and head. The speculators library's drafts bring a head over a reduced vocabulary, with
    `d2t` from its rows to target tokens; earlier releases of the library saved all three.
    """

    layer_class: type[Any] = DFlashDecoderLayer
    output_class = DraftOutput
    draft_config_class: type[DFlashDraftConfig] = DFlashDraftConfig

    def __init__(self, config, quant_config=None, prefix: str = ""):
        super().__init__(config, quant_config, prefix)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        # Stacked over layers: [layers * 2 * kv_size, hidden], [layers * 2 * kv_size], [layers, head_dim].
        self.kv_weight: torch.Tensor | None = None
        self._kv_bias: torch.Tensor | None = None
        self._k_norm_weight: torch.Tensor | None = None
        self._kv_pool: Any = None
        self._kv_pointers: KVPoolPointers | None = None
        self._blocks: torch.Tensor | None = None

    def allocate_blocks(self, requests: int, width: int) -> None:
        """Allocate the output of `requests` drafted blocks of `width` slots.

        Not in a CUDA graph's memory, which other graphs overwrite (`speculative/cycle/replays.py`).
        """
        self._blocks = torch.zeros(requests, width, dtype=torch.int64, device=self.norm.weight.device)

    @torch.no_grad()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch) -> DraftOutput:
        """Run blocks of D = `forward_batch.spec_info.draft_token_num` rows through the draft.

        `input_ids` and `positions` are [num_blocks * D] int64. The CUDA graph captures head and argmax as
        well, unless the forward ends before the head.
        """
        hidden_states, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual, forward_batch)
        hidden_states = self.norm(hidden_states, residual)[0]
        output = self.output_class(None, hidden_states=hidden_states)
        if not self.ends_before_head:
            blocks = hidden_states.view(-1, forward_batch.spec_info.draft_token_num, hidden_states.shape[-1])
            anchors = input_ids.view(blocks.shape[:2])[:, :1]
            drafted = self.choose_greedily(output, blocks[:, self.draft.num_idle_rows :], anchors)
            out = None if self._blocks is None else self._blocks[: anchors.shape[0]]
            output.draft_tokens = drafted.flatten()
            output.blocks = torch.cat((anchors, drafted), dim=1, out=out)
        return output

    def choose_greedily(self, output: DraftOutput, rows: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Choose the tokens of drafting rows [num_blocks, S, hidden]: [num_blocks, S] int64.

        `anchors` are [num_blocks, 1] int64.
        """
        return self.draft_tokens(rows.flatten(0, 1)).view(rows.shape[:2])

    @torch.no_grad()
    def write_context_kv(
        self,
        aux_hidden: torch.Tensor,
        positions: torch.Tensor,
        cache_loc: torch.Tensor,
        kv_pool,
        accept_len: torch.Tensor | None = None,
    ) -> None:
        """Write every layer's K and V of captured target states into the pool, as context.

        All layers read the same context, so one GEMM over their stacked K/V weights serves them all. Norm,
        rotation and the writes of all layers are one kernel.

        Args:
            aux_hidden: [n, num_aux * hidden], outputs of the target layers in ascending order, concatenated.
            positions: [n] int64.
            cache_loc: [n] int64.
            kv_pool: SGLang's pool of the draft.
            accept_len: [bs] int32 if the rows are blocks of n / bs: rows beyond it in a block are skipped.

        Raises:
            ValueError: the pool's layout cannot be written to.
        """
        if self.kv_weight is None:
            self.stack_kv_weights()
        if self._kv_pool is not kv_pool:
            self.use_pool(kv_pool)
        assert self.kv_weight is not None and self._k_norm_weight is not None
        assert self._kv_pointers is not None
        # SGLang may grow a pool after graphs with these addresses were captured. It does so in place.
        is_in_place = kv_pool.k_buffer[0].data_ptr() == self._kv_pointers.k_buffers[0].data_ptr()
        assert is_in_place, "the draft's KV pool has moved since its addresses were taken"
        attention = self.layers[0].self_attn
        context = self.hidden_norm(self.fc(aux_hidden)[0])
        kv = F.linear(context, self.kv_weight, self._kv_bias)
        kv = kv.view(-1, len(self.layers), 2, attention.num_kv_heads, attention.head_dim)
        write_context_kv(
            kv,
            k_norm_weight=self._k_norm_weight,
            eps=attention.k_norm.variance_epsilon,
            cos_sin_cache=attention.rotary_emb.cos_sin_cache,
            positions=positions,
            cache_loc=cache_loc,
            pool=self._kv_pointers,
            accept_len=accept_len,
            block_size=1 if accept_len is None else positions.numel() // accept_len.numel(),
        )

    def use_pool(self, kv_pool) -> None:
        """Read the addresses of SGLang's draft pool; raise ValueError for another layout."""
        if not isinstance(getattr(kv_pool, "k_buffer", None), list):
            kind = type(kv_pool).__name__
            raise ValueError(f"DFLASH cannot write its draft's context into a KV pool of type {kind}")
        self._kv_pool = kv_pool
        self._kv_pointers = KVPoolPointers.from_pools(kv_pool.k_buffer, kv_pool.v_buffer, kv_pool.dtype)

    @torch.no_grad()
    def stack_kv_weights(self) -> None:
        """Stack K/V weights where CUDA graphs read them."""
        weights, biases = zip(*(layer.self_attn.context_kv_weight() for layer in self.layers), strict=True)
        self.kv_weight = torch.cat(weights, out=self.kv_weight)
        self._kv_bias = None if biases[0] is None else torch.cat(biases, out=self._kv_bias)
        norms = [layer.self_attn.k_norm.weight for layer in self.layers]
        self._k_norm_weight = torch.stack(norms, out=self._k_norm_weight)

    def renew_cast_weights(self) -> None:
        super().renew_cast_weights()
        if self.kv_weight is not None:
            self.stack_kv_weights()


EntryClass = DFlashDraftModel
