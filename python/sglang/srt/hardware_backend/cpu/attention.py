"""CPU attention: SGLang's `torch_native` modes and TARGET_VERIFY, batched.

A forward is cut into segments of requests with equally many queries and about as much KV. The decode steps,
verify chains or draft blocks of a batch make one or a few segments; each prompt is a segment. A segment is
one attention call. Values that depend on lengths alone are computed once per forward and shared by all
layers.

A layer's attributes give its options: causal or not, sliding window, logit soft cap, latent keys that are
values as well (MLA). Attention sinks come with the call. Layers that keep only a window of KV have their own
slots, and reads are translated to them as writes are.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel
from torch.nn.functional import scaled_dot_product_attention

from sglang_dflash.srt.environ import DFlashOptions

# Up to this many queries per request, repeating a mask is cheaper than repeating KV.
_BLOCK = 64
# Fixed cost of a segment, as a number of keys (of one request, 8 queries) that take as long.
SEGMENT_COST = 256


@dataclass(frozen=True, slots=True)
class _Visibility:
    """Keys of its request that a query of a layer attends to.

    Attributes:
        causal: whether no key after the query is seen.
        window: tokens before the query that are seen; -1 for all.
        from_anchor: whether the window counts from the segment's first query instead.
    """

    causal: bool
    window: int
    from_anchor: bool

    @classmethod
    def from_layer(cls, layer) -> "_Visibility":
        causal = layer.attn_type != AttentionType.ENCODER_ONLY
        window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        return cls(causal, window, getattr(layer, "window_from_anchor", False))


@dataclass(slots=True)
class _Segment:
    """The last tokens of each of bs requests, as queries.

    Attributes:
        rows: the queries among the forward's tokens, `width` of each request, as `_as_slice` returns them.
        slots: pool slots by position, `longest` of each request, as `_as_slice` returns them. 0 past a
            request's end (SGLang's padding slot).
        window_slots: [bs * longest] int64, the slots in the pool of window layers.
        lengths: [bs] int64, committed tokens and queries.
        counts: [bs] int64, queries of each request. A request with fewer than `width` repeats its last one.
    """

    rows: slice | torch.Tensor
    slots: slice | torch.Tensor
    window_slots: Any
    lengths: torch.Tensor
    counts: torch.Tensor
    width: int
    longest: int
    _masks: dict[tuple[_Visibility, int], torch.Tensor | None] = field(default_factory=dict)

    @property
    def bs(self) -> int:
        return self.lengths.numel()

    def mask(self, visibility: _Visibility, group: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the term to add to scores, [bs, 1, group * width, longest]; None for zero.

        It is 0 if a query sees a key and -inf otherwise. PyTorch would build it from a boolean mask again in
        every layer.
        """
        key = (visibility, group)
        if key not in self._masks:
            seen, mask = self._seen(visibility), None
            if seen is not None:
                mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
                mask = mask.repeat(1, group, 1)[:, None]
            self._masks[key] = mask
        return self._masks[key]

    def _seen(self, visibility: _Visibility) -> torch.Tensor | None:
        """Return which keys each query sees, [bs, width, longest] bool; None for all keys."""
        keys = torch.arange(self.longest)[None, None, :]
        lengths = self.lengths[:, None, None]
        to_come = self.counts[:, None, None] - torch.arange(self.width)[None, :, None]
        queries = lengths - to_come.clamp(min=1)
        sees_no_less = self.width == 1 or not visibility.causal
        if sees_no_less and visibility.window < 0 and bool((self.lengths == self.longest).all()):
            return None
        seen = (keys < lengths).expand(-1, self.width, -1)
        if visibility.causal:
            seen = seen & (keys <= queries)
        if visibility.window >= 0:
            counted_from = queries[:, :1] if visibility.from_anchor else queries
            seen = seen & (keys >= counted_from - visibility.window)
            if not visibility.causal and not visibility.from_anchor:
                # As far ahead as back, as in SGLang's FA3. Counted from the anchor, the block itself is
                # always visible.
                seen = seen & (keys <= queries + visibility.window)
        return seen


def cuts_by_length(lengths: list[int], cost: int) -> list[int]:
    """Cut ascending lengths into parts that are padded to their longest.

    The cut that saves most padding comes first. A cut is made if it saves more than `cost` keys.
    """

    def cut(start: int, end: int) -> list[int]:
        longest = lengths[end - 1]
        saved, middle = max(((i - start) * (longest - lengths[i - 1]), i) for i in range(start + 1, end + 1))
        return cut(start, middle) + [middle] + cut(middle, end) if saved > cost else []

    return cut(0, len(lengths))


def _groups(lengths: torch.Tensor, counts: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the requests of each segment, whose lengths and numbers of queries are alike.

    Numbers of queries with the same next power of two share a segment.
    """
    exponents = counts.double().log2().ceil()
    for exponent in exponents.unique():
        members = (exponents == exponent).nonzero().squeeze(1)
        by_length, order = lengths[members].sort()
        cost = SEGMENT_COST * 8 // max(int(counts[members].max()), 2)
        cuts = cuts_by_length(by_length.tolist(), cost)
        # In the order of the batch if nothing is cut: its queries lie side by side then.
        yield from members[order].tensor_split(cuts) if cuts else [members]


def _as_slice(indices: torch.Tensor) -> slice | torch.Tensor:
    """Return indices that lie side by side as a slice, so that reading them copies nothing."""
    first = int(indices[0])
    is_run = bool((indices.diff() == 1).all())
    return slice(first, first + indices.numel()) if is_run else indices


class TorchNativeSpecAttnBackend(TorchNativeAttnBackend):
    """`torch_native` with verify chains, draft blocks and every layer option named above."""

    takes_any_rows = True  # of each request, as it has no graphs

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the length of padding requests (row 0); DP attention reads it without a graph."""
        return 1

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        self._segments = self._plan(forward_batch)

    def _plan(self, forward_batch) -> list[_Segment]:
        mode, bs = forward_batch.forward_mode, forward_batch.batch_size
        requests, lengths = forward_batch.req_pool_indices.long(), forward_batch.seq_lens.long()
        if bs == 0 or mode.is_idle():
            return []
        if mode.is_target_verify():
            ragged = getattr(forward_batch.spec_info, "ragged", None)
            if ragged is None:
                counts = torch.full_like(lengths, forward_batch.spec_info.num_tokens_per_req)
            else:
                counts = torch.from_numpy(ragged.num_draft_tokens + 1)
            lengths = lengths + counts
        elif mode.is_decode():
            counts = torch.ones_like(lengths)
        elif forward_batch.extend_seq_lens is None:
            raise NotImplementedError(f"sglang-dflash's CPU attention does not run {mode}.")
        else:
            counts = forward_batch.extend_seq_lens.long()
        groups = counts.nonzero() if mode.is_extend_without_speculative() else _groups(lengths, counts)
        starts = counts.cumsum(0) - counts
        return [self._segment(requests[own], lengths[own], counts[own], starts[own]) for own in groups]

    def _segment(
        self, requests: torch.Tensor, lengths: torch.Tensor, counts: torch.Tensor, starts: torch.Tensor
    ) -> _Segment:
        """Make a segment of requests, whose queries begin at the tokens `starts`, all [bs] int64."""
        width, longest = int(counts.max()), int(lengths.max())
        rows = starts[:, None] + torch.arange(width).minimum(counts[:, None] - 1)
        slots = self.req_to_token_pool.req_to_token[requests, :longest].long()
        slots = slots.masked_fill(torch.arange(longest) >= lengths[:, None], 0).flatten()
        has_windows = self.use_sliding_window_kv_pool
        return _Segment(
            rows=_as_slice(rows.flatten()),
            slots=_as_slice(slots),
            window_slots=self.token_to_kv_pool.translate_loc_from_full_to_swa(slots) if has_windows else None,
            lengths=lengths,
            counts=counts,
            width=width,
            longest=longest,
        )

    def attend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None) -> torch.Tensor:
        """Attend in any mode, and write k and v into the pool if `save_kv_cache`.

        `q` and the result are [tokens, q_heads * head_dim] and [tokens, q_heads * v_head_dim]. `k` and `v`
        are [tokens, kv_heads, head_dim or v_head_dim], or None if the layer reads another layer's. `sinks` is
        [q_heads], a logit per head that takes part in the softmax and has no value.
        """
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None:
            self._write(k, v, layer, forward_batch)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        keeps_window = self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]
        outputs = []
        for segment in self._segments:
            slots = segment.window_slots if keeps_window else segment.slots
            attended = self._attend(
                segment,
                q=_select(q, segment.rows).view(segment.bs, segment.width, *q.shape[1:]),
                keys=_gather(keys, slots, segment, q.dtype),
                values=_gather(values, slots, segment, q.dtype),
                layer=layer,
                sinks=sinks,
            )
            outputs.append((segment.rows, attended))
        if len(outputs) == 1 and isinstance(outputs[0][0], slice) and outputs[0][1].shape[0] == q.shape[0]:
            return outputs[0][1].flatten(1)
        # A forward may end in padding rows.
        output = q.new_zeros(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for rows, attended in outputs:
            if isinstance(rows, slice):
                output[rows] = attended
            else:
                output.index_copy_(0, rows, attended)
        return output.flatten(1)

    forward_extend = forward_decode = attend

    def _write(self, k, v, layer, forward_batch) -> None:
        """Write K and V into the pool: in two operators if its rows are slots of the same dtype."""
        pool, slots = self.token_to_kv_pool, forward_batch.out_cache_loc
        if type(pool) is MHATokenToKVPool and k.dtype == pool.store_dtype and not pool.use_hnd:
            index = layer.layer_id - pool.start_layer
            pool.k_buffer[index].index_copy_(0, slots, k)
            pool.v_buffer[index].index_copy_(0, slots, v)
        else:
            pool.set_kv_buffer(layer, KVWriteLoc(slots, self.swa_out_cache_loc), k, v)

    @staticmethod
    def _attend(segment: _Segment, q, keys, values, layer, sinks) -> torch.Tensor:
        """Attend with q [bs, width, heads, dim], k, v [bs, kv_heads, longest, dim], by request."""
        visibility = _Visibility.from_layer(layer)
        bs, width, heads, _ = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        if bs == 1 and width > _BLOCK and sinks is None and not layer.logit_cap:
            # A prompt: its mask is large, and one mask serves all heads.
            from_start = visibility.causal and visibility.window < 0 and width == segment.longest
            attended = scaled_dot_product_attention(
                q.transpose(1, 2),
                key=keys,
                value=values,
                attn_mask=None if from_start else segment.mask(visibility, 1, q.dtype),
                is_causal=from_start,
                scale=layer.scaling,
                enable_gqa=group > 1,
            )
            return attended.transpose(1, 2).flatten(0, 1)
        # Query heads that share a KV head become more queries of that head, so KV is never repeated.
        queries = q.view(bs, width, kv_heads, group, -1).permute(0, 2, 3, 1, 4)
        queries = queries.reshape(bs, kv_heads, group * width, -1)
        if sinks is None and not layer.logit_cap:
            mask = segment.mask(visibility, group, q.dtype)
            attended = scaled_dot_product_attention(
                queries, key=keys, value=values, attn_mask=mask, scale=layer.scaling
            )
        else:
            mask = segment.mask(visibility, 1, q.dtype)
            mask = None if mask is None else mask[:, :, None]
            scores = (queries @ keys.transpose(2, 3) * layer.scaling).view(bs, kv_heads, group, width, -1)
            weights = _softmax(scores, mask, layer.logit_cap, sinks)
            attended = weights.view(bs, kv_heads, group * width, -1) @ values
        attended = attended.view(bs, kv_heads, group, width, -1).permute(0, 3, 1, 2, 4)
        return attended.reshape(bs * width, heads, -1)


def is_needed(runner) -> bool:
    """Return whether a model runner needs our backend instead of SGLang's.

    This backend serves with DFLASH, on request (`CPU_LAYERS`), and for what SGLang's cannot do or gets wrong:
    MLA, capped logits, sinks, window layers with their own slots, and padded batches, as DP attention has
    them.
    """
    if DFlashOptions.CPU_LAYERS.get() or runner.spec_algorithm.is_dflash() or runner.use_mla_backend:
        return True
    if isinstance(runner.token_to_kv_pool, SWAKVPool) or get_parallel().attn_dp_enabled:
        return True
    sinks = ("sinks", "attention_sink_bias")
    return any(
        getattr(module, "logit_cap", 0) or any(getattr(module, name, None) is not None for name in sinks)
        for module in runner.model.modules()
    )


def _softmax(
    scores: torch.Tensor, mask: torch.Tensor | None, logit_cap: float, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Turn scores [bs, kv_heads, group, width, longest] into weights, by way of float32."""
    dtype, scores = scores.dtype, scores.float()
    if logit_cap:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1).to(dtype)
    sinks = sinks.float().view(1, *scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1].to(dtype)


def _gather(
    buffer: torch.Tensor, slots: slice | torch.Tensor, segment: _Segment, dtype: torch.dtype
) -> torch.Tensor:
    """Gather pool rows [slots, heads, dim] of each request, as [bs, heads, longest, dim]."""
    return _select(buffer, slots).to(dtype).view(segment.bs, -1, *buffer.shape[1:]).transpose(1, 2)


def _select(table: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Return rows of a table, without a copy if they lie side by side."""
    # index_select copies whole rows; indexing with a tensor is several times slower on a CPU.
    return table[rows] if isinstance(rows, slice) else table.index_select(0, rows)
