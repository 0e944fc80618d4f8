"""Stand-in for `sgl_kernel` where its CUDA build cannot be loaded (see ../../runtime.py).

Pure-Python submodules come from the installed package; the few functions SGLang's CPU path calls are written
here in PyTorch. Any other name resolves to a function that raises an error when it is called: SGLang imports
many kernels it never launches on a CPU. Operators of `torch.ops.sgl_kernel` are in ../../operators.py.
"""

import os as _os
import sys as _sys

import torch as _torch

from sglang_dflash.srt.hardware_backend.cpu import operators as _operators

_here = _os.path.dirname(_os.path.abspath(__file__))
__path__ = [
    _here,
    *[
        _candidate
        for _candidate in (_os.path.join(_entry, "sgl_kernel") for _entry in _sys.path)
        if _os.path.isdir(_candidate) and _os.path.abspath(_candidate) != _here
    ][:1],
]

_operators.install()


def assign_req_to_token_pool_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """Write freshly allocated slots into the request table.

    `out_cache_loc` [sum(end - start)] holds request after request; row i fills columns start[i]..end[i]-1 of
    `req_to_token` [max_reqs, pool_len].
    """
    rows, columns = _rows_and_columns(req_pool_indices, start_offset, end_offset)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len
):
    """Read columns start[i]..end[i]-1 of every request into `out_cache_loc`, joined."""
    rows, columns = _rows_and_columns(req_pool_indices, start_offset, end_offset)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Refuse to move accepted KV, for token trees. SGLang calls it per pool with no rows."""
    if tgt_loc.numel() and not _torch.equal(tgt_loc, src_loc):
        raise NotImplementedError(
            "sgl_kernel.copy_all_layer_kv_cache_cpu: "
            "moving KV between slots is not available in the CPU stand-in"
        )


@_torch.library.custom_op("sgl_kernel::murmur_hash32_cpu", mutates_args=())
def _murmur_hash32_cpu(
    seed: _torch.Tensor, positions: _torch.Tensor, col_indices: _torch.Tensor
) -> _torch.Tensor:
    """Hash uint64 seeds [n], positions [n], columns [m] by MurmurHash3 to uint32 [n, m]."""
    low_half = 0xFFFFFFFF
    seed = seed.view(_torch.int64)[:, None]
    words = (
        seed & low_half,
        (seed >> 32) & low_half,
        positions.long()[:, None] & low_half,
        col_indices.long()[None],
    )
    state = _torch.zeros((), dtype=_torch.int64)
    for word in words:  # int64 products wrap, and their low 32 bits are right all the same
        word = _rotate_left_32((word * 0xCC9E2D51) & low_half, 15)
        state = _rotate_left_32(state ^ ((word * 0x1B873593) & low_half), 13)
        state = (state * 5 + 0xE6546B64) & low_half
    state = state ^ 4 * len(words)
    for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ (state >> shift)) * multiplier & low_half
    return state.to(_torch.uint32)


def _rotate_left_32(word, bits):
    return ((word << bits) | (word >> (32 - bits))) & 0xFFFFFFFF


def _rows_and_columns(req_pool_indices, start_offset, end_offset):
    lengths = (end_offset - start_offset).long()
    owner = _torch.repeat_interleave(_torch.arange(lengths.numel()), lengths)
    first = _torch.cumsum(lengths, 0) - lengths
    columns = _torch.arange(owner.numel()) - first[owner] + start_offset.long()[owner]
    return req_pool_indices.long()[owner], columns


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not available in the CPU stand-in of sglang-dflash")

    missing.__name__ = name
    return missing
