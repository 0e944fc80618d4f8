"""Prefill/decode disaggregation on the CPU: all memory is the host's."""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
# Those in which one layer's rows are a view of the host's pool.
HOST_LAYOUTS = ("page_first", "layer_first")


def prepare_transfer(args: Any) -> None:
    """In the environment that the scheduler inherits: what a prefix cache has is sent with the rest, as
    sending it before the forward waits for a CUDA event. What the user has set stays. Raises ValueError for a
    layout of the host's KV pool that the copies below do not know."""
    if args.disaggregation_mode == "prefill":
        os.environ.setdefault(EARLY_SEND, "0")
    elif args.disaggregation_mode == "decode" and args.hicache_mem_layout not in HOST_LAYOUTS:
        raise ValueError(
            f"--hicache-mem-layout {args.hicache_mem_layout}: on a CPU a decode server keeps the KV of retracted requests in "
            f"one of {', '.join(HOST_LAYOUTS)}."
        )


def normalize_kv_mem_kinds(kinds: list[str] | None, expected_len: int) -> list[str]:
    """In the place of SGLang's: where KV buffers lie, for nixl. kinds: as SGLang has it, one per buffer, or
    None."""
    if kinds is not None and len(kinds) != expected_len:
        raise ValueError(f"{len(kinds)} kinds of memory for {expected_len} KV buffers")
    return ["DRAM"] * expected_len


def preparing_targets_layers() -> Callable[[Any, Any], None]:
    """In the place of `NixlKVManager._prepare_payload_xfer`, on a prefill server. Where the decode server has
    a draft and this one has none, SGLang sends the target's layers alone, but not into host memory, for a
    reason that concerns GPUs: the peer is made to look like one without a draft."""
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    original = NixlKVManager._prepare_payload_xfer

    @functools.wraps(original)
    def _prepare_payload_xfer(self, peer_info):
        ours, theirs = len(self.kv_args.kv_item_lens), len(peer_info.dst_kv_item_lens)
        if 0 < ours < theirs:
            kept = self._build_transfer_dst_indices(peer_info=peer_info, n_src=ours, n_dst=theirs)
            for name in ("dst_kv_ptrs", "dst_kv_mem_kinds", "dst_kv_item_lens", "dst_kv_layer_ids"):
                entries = getattr(peer_info, name)
                setattr(peer_info, name, [entries[i] for i in kept] if entries else entries)
        original(self, peer_info)

    return _prepare_payload_xfer


def host_register(buffer: torch.Tensor, registration_granularity_bytes: int | None = None) -> None:
    """In the place of SGLang's, which page-locks `buffer` for a GPU's copies: there is none."""


def back_up_all_layers(
    self: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    """In the place of `MHATokenToKVPoolHost.backup_from_device_all_layer`: the KV of a retracted request, out
    of the pool that requests run in. host_indices, device_indices: [n] int64, rows of either pool."""
    sides = ((self.k_data_refs, self.device_k_buffers), (self.v_data_refs, self.device_v_buffers))
    for host_layers, layers in sides:
        for host_rows, rows in zip(host_layers, layers, strict=True):
            host_rows[host_indices] = rows[device_indices]


def restore_layer(
    self: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """In the place of `MHATokenToKVPoolHost.load_to_device_per_layer`: one layer of it back into the pool, at
    other rows. Like SGLang's it is asked for layers that this pool has not, and then does nothing."""
    if is_draft or 0 <= layer_id < self.target_layer_num:
        self.device_k_buffers[layer_id][device_indices] = self.k_data_refs[layer_id][host_indices]
        self.device_v_buffers[layer_id][device_indices] = self.v_data_refs[layer_id][host_indices]
