"""Matrix products of a CPU server, where PyTorch's own choice is the slow one."""

import functools
import inspect

import torch

# From so many rows on, oneDNN is the faster of the two libraries that PyTorch brings
# (benchmark/results/float32-linear.md).
_ONEDNN_ROWS = 16
# From so many rows on, a bfloat16 weight is worth converting on a CPU that cannot multiply bfloat16.
_CONVERTED_ROWS = 2


def linear_for_this_cpu():
    """`UnquantizedLinearMethod.apply`, another way round in two cases:

    float32, many rows, AVX-512: oneDNN. PyTorch takes MKL, which does not use AVX-512 on AMD's processors.
    bfloat16 on a CPU that cannot multiply it: in float32, the product rounded once, as on one that can.
    PyTorch's own loop takes every row for itself there, so that a block of 8 would cost 8 decode steps."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    original = inspect.unwrap(UnquantizedLinearMethod.apply)
    onednn_pays, multiplies_bfloat16 = _has_avx512(), _multiplies_bfloat16()

    @functools.wraps(original)
    def apply(self, layer, x, bias=None):
        weight = layer.weight
        if x.dim() == 2 and x.dtype == weight.dtype:
            rows = x.shape[0]
            if x.dtype == torch.float32 and onednn_pays and rows >= _ONEDNN_ROWS:
                return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
            if x.dtype == torch.bfloat16 and not multiplies_bfloat16 and rows >= _CONVERTED_ROWS:
                out = torch.nn.functional.linear(
                    x.float(), weight.float(), None if bias is None else bias.float()
                )
                return out.to(x.dtype)
        return original(self, layer, x, bias)

    return apply


def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _multiplies_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
