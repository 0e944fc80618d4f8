"""FlashAttention 3's tile schedule, once per captured forward instead of once per layer.

Before each layer's kernel, FA3 computes a schedule of the batch's tiles from the lengths. For plain decoding
SGLang computes one for all layers. Here this is done for blocks: in a CUDA graph the first layer computes the
schedule with the library's function and the arguments of its own call, and later layers with equal arguments
read it. Layers with a window keep their own.

Off unless SGLANG_DFLASH_FA3_SCHEDULE_ONCE=1, because no GPU has run it.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

# Of `flash_attn_with_kvcache`: arguments that a schedule is computed for, or that do not change it.
_KNOWN = {
    *("q", "k_cache", "v_cache", "page_table", "cache_seqlens", "cu_seqlens_q", "cu_seqlens_k_new"),
    *("max_seqlen_q", "softmax_scale", "causal", "window_size", "softcap", "k_descale", "v_descale"),
    *("return_softmax_lse", "num_splits", "ver", "out", "sinks"),
}


def is_capturing() -> bool:
    """Tell whether a CUDA graph is being captured."""
    return torch.cuda.is_current_stream_capturing()


def schedule_function() -> Callable[..., torch.Tensor]:
    """Return the library's function that computes a schedule."""
    from sgl_kernel.flash_attn import get_scheduler_metadata

    return get_scheduler_metadata


class CapturedForward:
    """The forward that is being captured, and its schedules by their arguments.

    A graph is captured once per forward batch, and what a schedule reads belongs to that graph.
    """

    def __init__(self) -> None:
        self._batch: Any = None
        self._schedules: dict[tuple, torch.Tensor] | None = None

    def enter(self, forward_batch: Any) -> None:
        """Begin a layer of a forward. None: of one that needs no schedules."""
        if forward_batch is None:
            self._batch = self._schedules = None
        elif forward_batch is not self._batch:
            self._batch, self._schedules = forward_batch, {}

    def schedule(self, call: dict[str, Any]) -> torch.Tensor | None:
        """Return the schedule for an attention call. None: the kernel computes its own.

        call: the arguments of `flash_attn_with_kvcache`, by name.
        """
        given = {name for name, value in call.items() if value is not None}
        if self._schedules is None or not given <= _KNOWN or call.get("sinks") is not None:
            return None
        if tuple(call["window_size"]) != (-1, -1) or call["ver"] != 3:
            return None
        query, keys, table = call["q"], call["k_cache"], call["page_table"]
        tensors = {name: call[name] for name in ("cache_seqlens", "cu_seqlens_q")}
        arguments = {
            "batch_size": table.shape[0],
            "max_seqlen_q": call["max_seqlen_q"],
            "max_seqlen_k": table.shape[1] * keys.shape[1],
            "num_heads": query.shape[-2],
            "num_heads_k": keys.shape[-2],
            "headdim": query.shape[-1],
            "headdim_v": call["v_cache"].shape[-1],
            "qkv_dtype": query.dtype,
            "page_size": keys.shape[1],
            "causal": call["causal"],
            "has_softcap": call["softcap"] > 0,
            "num_splits": call["num_splits"],
        }
        key = (*arguments.values(), *(tensor.data_ptr() for tensor in tensors.values()))
        if key not in self._schedules:
            self._schedules[key] = schedule_function()(**arguments, **tensors)
        return self._schedules[key]


_forward = CapturedForward()


def noting_the_forward():
    """Wrap `FlashAttentionBackend.forward_extend` to tell which forward a layer belongs to."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

    original = inspect.unwrap(FlashAttentionBackend.forward_extend)

    @functools.wraps(original)
    def forward_extend(self, q, k, v, layer, forward_batch, *more, **named):
        schedules = (
            forward_batch.forward_mode.is_target_verify()
            and not self.use_mla
            and not self._disable_scheduler_metadata_precompute
            and is_capturing()
        )
        _forward.enter(forward_batch if schedules else None)
        return original(self, q, k, v, layer, forward_batch, *more, **named)

    return forward_extend


def attending_with_schedules():
    """Wrap the backend's `flash_attn_with_kvcache` to pass the forward's schedule."""
    from sglang.srt.layers.attention import flashattention_backend

    original = flashattention_backend.flash_attn_with_kvcache

    @functools.wraps(original)
    def flash_attn_with_kvcache(*args, **call):
        if not args and call.get("scheduler_metadata") is None:
            schedule = _forward.schedule(call)
            if schedule is not None:
                call["scheduler_metadata"] = schedule
        return original(*args, **call)

    return flash_attn_with_kvcache
