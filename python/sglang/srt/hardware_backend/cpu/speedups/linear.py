"""Matrix products of a CPU server for which PyTorch's own choice is slow."""

import functools
import inspect

import torch

# From this many rows on, oneDNN is faster than MKL (benchmark/results/float32-linear.md).
_ONEDNN_ROWS = 16
# From this many rows on, converting a bfloat16 weight pays on a CPU that cannot multiply bfloat16.
_CONVERTED_ROWS = 2


def linear_for_this_cpu():
    """Build an `UnquantizedLinearMethod.apply` that replaces PyTorch's choice in two cases.

    Many float32 rows with AVX-512 use oneDNN. PyTorch takes MKL, which does not use AVX-512 on AMD's
    processors. bfloat16 on a CPU that cannot multiply it is computed in float32 and rounded once, as on a CPU
    that can. PyTorch loops over the rows there, so that a block of 8 would cost 8 decode steps.
    """
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    original = inspect.unwrap(UnquantizedLinearMethod.apply)
    onednn_pays, has_bfloat16 = has_avx512(), multiplies_bfloat16()

    @functools.wraps(original)
    def apply(self, layer, x, bias=None):
        weight = layer.weight
        if x.dim() == 2 and x.dtype == weight.dtype:
            rows = x.shape[0]
            if x.dtype == torch.float32 and onednn_pays and rows >= _ONEDNN_ROWS:
                return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
            if x.dtype == torch.bfloat16 and not has_bfloat16 and rows >= _CONVERTED_ROWS:
                bias = None if bias is None else bias.float()
                return torch.nn.functional.linear(x.float(), weight.float(), bias).to(x.dtype)
        return original(self, layer, x, bias)

    return apply


def has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def multiplies_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
