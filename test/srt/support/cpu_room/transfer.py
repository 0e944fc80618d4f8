"""Disaggregation and the hierarchical cache on a CPU: all memory is the host's."""

from collections.abc import Callable
from typing import Any

import torch


def empty_flat_page(self: Any) -> torch.Tensor:
    """Make room for one page of keys and values of all layers, which a storage backend fills."""
    shape = 2, self.layer_num, self.page_size, self.head_num, self.head_dim
    return torch.zeros(shape, dtype=self.dtype).flatten()


def normalize_kv_mem_kinds(kinds: list[str] | None, expected_len: int) -> list[str]:
    """Give all KV buffers the kind of host memory."""
    return ["DRAM"] * expected_len


class HostMemoryAgent:
    """A nixl agent to which GPU memory is host memory.

    SGLang names the kind of KV buffers, but calls state buffers GPU memory in every call.
    """

    def __init__(self, agent: Any):
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        if name == "_agent":  # a lookup before __init__ would recurse
            raise AttributeError(name)
        return getattr(self._agent, name)

    def register_memory(self, regions: Any, kind: str) -> Any:
        """Register regions [(address, length, device, name)]."""
        return self._agent.register_memory(regions, "DRAM")

    def get_xfer_descs(self, regions: Any, kind: str) -> Any:
        """Describe regions [(address, length, device)] of a transfer."""
        return self._agent.get_xfer_descs(regions, "DRAM")

    def prep_xfer_dlist(self, agent_name: str, regions: Any, kind: str) -> Any:
        """Prepare a list of regions that transfers choose from."""
        return self._agent.prep_xfer_dlist(agent_name, regions, "DRAM")


def register_host_memory(original: Callable[[Any], None], self: Any) -> None:
    """Wrap the first method of `NixlKVManager` that names a kind of memory."""
    self.agent = HostMemoryAgent(self.agent)
    original(self)


def prepare_targets_layers(original: Callable[[Any, Any], None], self: Any, peer_info: Any) -> None:
    """Wrap `NixlKVManager._prepare_payload_xfer` for a prefill server without a draft.

    If only the decode server has a draft, SGLang sends the target's layers alone, but refuses host memory,
    for a reason that concerns GPUs. So the peer is changed to look like a server without a draft.
    """
    ours, theirs = len(self.kv_args.kv_item_lens), len(peer_info.dst_kv_item_lens)
    if 0 < ours < theirs:
        kept = self._build_transfer_dst_indices(peer_info=peer_info, n_src=ours, n_dst=theirs)
        for name in ("dst_kv_ptrs", "dst_kv_mem_kinds", "dst_kv_item_lens", "dst_kv_layer_ids"):
            entries = getattr(peer_info, name)
            setattr(peer_info, name, [entries[i] for i in kept] if entries else entries)
    original(self, peer_info)


def host_register(buffer: torch.Tensor, registration_granularity_bytes: int | None = None) -> None:
    """Replace SGLang's, which page-locks `buffer` for copies by a GPU: do nothing."""


def back_up_all_layers(self, device_pool, host_indices, device_indices, io_backend) -> None:
    """Save KV: rows device_indices [n] to host_indices [n], int64."""
    sides = ((self.k_data_refs, self.device_k_buffers), (self.v_data_refs, self.device_v_buffers))
    for host_layers, layers in sides:
        for host_rows, rows in zip(host_layers, layers, strict=True):
            host_rows[host_indices] = rows[device_indices]


def restore_layer(
    self, device_pool, host_indices, device_indices, layer_id: int, io_backend, *, is_draft: bool = False
) -> None:
    """Restore one layer at other rows; like SGLang's, do nothing for layers it lacks."""
    if is_draft or 0 <= layer_id < self.target_layer_num:
        self.device_k_buffers[layer_id][device_indices] = self.k_data_refs[layer_id][host_indices]
        self.device_v_buffers[layer_id][device_indices] = self.v_data_refs[layer_id][host_indices]
