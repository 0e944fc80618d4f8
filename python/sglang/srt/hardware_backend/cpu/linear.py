"""float32 matrix products of a CPU server."""

import functools
import inspect

import torch

# From so many rows on, oneDNN is the faster of the two libraries that PyTorch brings (benchmark/results/float32-linear.md).
_ROWS = 16


def linear_on_onednn():
    """`UnquantizedLinearMethod.apply` on oneDNN where PyTorch's own choice is MKL, which runs on AMD's processors at half the
    speed: float32, many rows."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    original = inspect.unwrap(UnquantizedLinearMethod.apply)

    @functools.wraps(original)
    def apply(self, layer, x, bias=None):
        weight = layer.weight
        if x.dtype == weight.dtype == torch.float32 and x.dim() == 2 and x.shape[0] >= _ROWS:
            return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return original(self, layer, x, bias)

    return apply
