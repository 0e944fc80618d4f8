"""CPU attention for speculative decoding: SGLang's `torch_native` backend plus the TARGET_VERIFY mode.

A batch of equally long blocks, each seeing its request's committed tokens in the KV pool and the block itself:
the target's verify chain (causal) and the draft's block (both directions). All requests of a batch go through one
attention call; what depends only on lengths is computed once per forward and shared by all layers.
"""

from dataclasses import dataclass, field

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention


@dataclass(slots=True)
class _BlockPlan:
    """Where the blocks of one forward read.

    slots: [bs * longest] int64, pool slots by position, 0 past a request's end (SGLang's padding slot).
    query_positions: [bs, width], key_positions: [longest], lengths: [bs], prefix + width.
    masks: by what a layer sees; built once per forward, for all layers that see the same.
    """

    slots: torch.Tensor
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    lengths: torch.Tensor
    masks: dict[tuple[bool, int, bool, int], torch.Tensor | None] = field(default_factory=dict)

    def mask(
        self, causal: bool, window: int, from_anchor: bool, group: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """To be added to scores, [bs, 1, group * width, longest]: 0 where a query sees a key and -inf where it does not;
        None if every query sees all. (PyTorch would turn a boolean mask into this one again in every layer.)

        window: tokens in sight before the query, or, `from_anchor`, before the block's first token; -1 for all.
        """
        key = (causal, window, from_anchor, group)
        if key not in self.masks:
            seen = self._build_mask(*key)
            self.masks[key] = None if seen is None else torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
        return self.masks[key]

    def _build_mask(self, causal: bool, window: int, from_anchor: bool, group: int) -> torch.Tensor | None:
        keys = self.key_positions[None, None, :]
        queries = self.query_positions[:, :, None]
        if not causal and window < 0 and bool((self.lengths == keys.shape[-1]).all()):
            return None
        seen = keys < self.lengths[:, None, None]
        if causal:
            seen = seen & (keys <= queries)
        if window >= 0:
            counted_from = queries[:, :1] if from_anchor else queries
            seen = seen & (keys >= counted_from - window)
            if not causal and not from_anchor:
                # As far ahead as back, as in SGLang's FA3. Counted from the anchor, the block itself is always in sight.
                seen = seen & (keys <= queries + window)
        seen = seen.expand(-1, self.query_positions.shape[1], -1)
        return seen.repeat(1, group, 1)[:, None]


class TorchNativeSpecAttnBackend(TorchNativeAttnBackend):
    """`torch_native`, able to run verify chains and draft blocks."""

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        if forward_batch.forward_mode.is_target_verify():
            self._block_plan = self._plan_blocks(forward_batch)

    def _plan_blocks(self, forward_batch) -> _BlockPlan:
        width = forward_batch.spec_info.num_tokens_per_req
        prefix = forward_batch.seq_lens.long()
        lengths = prefix + width
        longest = int(lengths.max())
        key_positions = torch.arange(longest)
        table = self.req_to_token_pool.req_to_token
        slots = table[forward_batch.req_pool_indices.long(), :longest].long()
        slots = slots.masked_fill(key_positions[None, :] >= lengths[:, None], 0)
        return _BlockPlan(slots.flatten(), prefix[:, None] + torch.arange(width), key_positions, lengths)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        """q, k, v: [tokens, heads * head_dim]; returns [tokens, q_heads * v_head_dim]."""
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        plan = self._block_plan
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v
            )
        bs, width = plan.query_positions.shape
        kv_heads = layer.tp_k_head_num
        group = layer.tp_q_head_num // kv_heads
        # Query heads that share a KV head become more queries of that head, so KV is never repeated.
        queries = q.view(bs, width, kv_heads, group, layer.qk_head_dim).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(bs, kv_heads, group * width, layer.qk_head_dim)
        keys = self._gather(self.token_to_kv_pool.get_key_buffer(layer.layer_id), plan.slots, bs, q.dtype)
        values = self._gather(self.token_to_kv_pool.get_value_buffer(layer.layer_id), plan.slots, bs, q.dtype)
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        from_anchor = getattr(layer, "window_from_anchor", False)
        attended = scaled_dot_product_attention(
            queries, keys, values, attn_mask=plan.mask(causal, window, from_anchor, group, q.dtype), scale=layer.scaling
        )
        attended = attended.view(bs, kv_heads, group, width, layer.v_head_dim).permute(0, 3, 1, 2, 4)
        return attended.reshape(bs * width, kv_heads * group * layer.v_head_dim)

    @staticmethod
    def _gather(buffer: torch.Tensor, slots: torch.Tensor, bs: int, dtype: torch.dtype) -> torch.Tensor:
        """Pool rows [slots, heads, dim] of each request, as [bs, heads, longest, dim]."""
        # index_select copies whole rows; indexing with a tensor is several times slower on a CPU.
        rows = buffer.index_select(0, slots).to(dtype)
        return rows.view(bs, -1, *buffer.shape[1:]).transpose(1, 2)
