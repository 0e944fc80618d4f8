"""FP8 copies of a draft's linear layers, for drafting.

A draft step reads every layer once. The copies halve the bytes, and take half as much memory again. The
context's keys and values, and everything of the target, come from the layers as they are. So the output stays
the target's, and only acceptance can change.

`--speculative-draft-model-quantization fp8`, for a draft that is not quantized, means these copies too.
"""

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import nn

from sglang_dflash.srt.layers.fp8_head import Fp8Copy, reason_against


class Fp8Linear(UnquantizedLinearMethod):
    """Product of a linear layer with an FP8 copy of its weight.

    The layer keeps its own weight. layer: without `reason_against`.
    """

    def __init__(self, layer: nn.Module):
        self.copy = Fp8Copy(layer)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product for x [.., k] with the layer's weight [n, k]: [.., n]."""
        if x.is_cuda:
            # It rounds each row of x in one kernel.
            from sglang.srt.layers.quantization.fp8_utils import apply_fp8_linear

            return apply_fp8_linear(x, self.copy.weight.t(), self.copy.scale, bias=bias)
        product = self.copy.emulated_product(x.view(-1, x.shape[-1])).view(*x.shape[:-1], -1)
        return product if bias is None else product + bias


def use_fp8_copies(layers: nn.Module) -> tuple[list[Fp8Copy], str | None]:
    """Have all linear layers in `layers` multiply by FP8 copies.

    Returns the copies. If one cannot be, returns none and why, and changes nothing.
    """
    found = {name: layer for name, layer in layers.named_modules() if isinstance(layer, LinearBase)}
    for name, layer in found.items():
        reason = reason_against(layer, f"layer {name}")
        if reason is not None:
            return [], reason
    for layer in found.values():
        layer.quant_method = Fp8Linear(layer)
    return [layer.quant_method.copy for layer in found.values()], None
