"""Layers of a CPU server in less time.

The rotation has bitwise equal results in fewer operators. Matrix products replace PyTorch's own choice where
it is slow.
"""

import functools

import torch

from sglang_dflash.kernels.ops.speculative.context_kv import rotate
from sglang_dflash.srt.patching import CPU_ATTENTION, patches

SPEED = "faster operators on a CPU"

# From this many rows on, oneDNN is faster than MKL (benchmark/results/float32-linear.md).
_ONEDNN_ROWS = 16
# From this many rows on, converting a bfloat16 weight pays on a CPU that cannot multiply bfloat16.
_CONVERTED_ROWS = 2


@patches(
    "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
    at=CPU_ATTENTION,
    signature="(self, layer, x, bias)",
    feature=SPEED,
    upstream="docs/dev/upstream/cpu-operators.md",
)
def linear_for_this_cpu(original, self, layer, x, bias=None):
    """Multiply as fast as this CPU can, where PyTorch chooses otherwise.

    Many float32 rows with AVX-512 use oneDNN. PyTorch takes MKL, which does not use AVX-512 on AMD's
    processors. bfloat16 on a CPU that cannot multiply it is computed in float32 and rounded once, as on a CPU
    that can. PyTorch loops over the rows there, so that a block of 8 would cost 8 decode steps.
    """
    weight = layer.weight
    if x.dim() == 2 and x.dtype == weight.dtype:
        rows = x.shape[0]
        if x.dtype == torch.float32 and rows >= _ONEDNN_ROWS and has_avx512():
            return torch.ops.mkldnn._linear_pointwise(
                x, W=weight, B=bias, attr="none", scalars=[], algorithm=""
            )
        if x.dtype == torch.bfloat16 and rows >= _CONVERTED_ROWS and not multiplies_bfloat16():
            bias = None if bias is None else bias.float()
            return torch.nn.functional.linear(x.float(), weight.float(), bias).to(x.dtype)
    return original(self, layer, x, bias)


@functools.cache
def has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@functools.cache
def multiplies_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@patches(
    "sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native",
    at=CPU_ATTENTION,
    signature="(self, positions, query, key, offsets, fused_set_kv_buffer_arg)",
    feature=SPEED,
    upstream="docs/dev/upstream/cpu-operators.md",
)
def fused_rotation(original, self, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
    """Rotate queries and keys together, in half of SGLang's operators."""
    is_plain = self.is_neox_style and self.rotary_dim == self.head_size and not hasattr(self, "sin_cos_cache")
    if not is_plain or offsets is not None or fused_set_kv_buffer_arg is not None:
        return original(
            self,
            positions=positions,
            query=query,
            key=key,
            offsets=offsets,
            fused_set_kv_buffer_arg=fused_set_kv_buffer_arg,
        )
    positions = positions.flatten()
    n = positions.numel()
    queries, keys = query.view(n, -1, self.head_size), key.view(n, -1, self.head_size)
    rotated = rotate(torch.cat((queries, keys), dim=1), positions, self.cos_sin_cache)
    num_queries = queries.shape[1]
    return rotated[:, :num_queries].reshape(query.shape), rotated[:, num_queries:].reshape(key.shape)
