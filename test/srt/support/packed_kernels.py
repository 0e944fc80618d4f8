"""Stand-ins for SGLang's packed linear layers, on a CPU.

Parameters and their loading are SGLang's own. Only what needs a GPU is replaced: the repacking after loading,
and the product. Here both go through the compressed-tensors library, which unpacks the loaded parameters.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from sglang.srt.layers.quantization.compressed_tensors import schemes

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.fp8_head import quantize_rows
from sglang_dflash.srt.models import quantized_linear

Parts = dict[str, torch.Tensor]
# A change of a layer's parameters before they are multiplied, as a wrong kernel or loader would make it.
Fault = Callable[[Parts], Parts]


def _unpack(form: str, args: QuantizationArgs, parts: Parts) -> torch.Tensor:
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    return BaseCompressor.get_value_from_registry(form).decompress(parts, scheme)["weight"].float()


class _StandIn:
    """Mixed into one of SGLang's schemes.

    faults: of layers, by the number of their outputs and inputs.
    """

    faults: dict[tuple[int, int], Fault] = {}

    def process_weights_after_loading(self, layer) -> None:
        names = [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]
        parts = {name: getattr(layer, name).data.clone() for name in names}
        weight = self.unpacked(parts)
        if (fault := self.faults.get(tuple(weight.shape))) is not None:
            weight = self.unpacked(fault(parts))
        for name in names:
            delattr(layer, name)
        layer.unpacked_weight = weight

    def unpacked(self, parts: Parts) -> torch.Tensor:
        raise NotImplementedError

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.float()

    def apply_weights(self, layer, x, bias=None):
        product = F.linear(self.rows(x), layer.unpacked_weight).to(x.dtype)
        return product if bias is None else product + bias


class Integers(_StandIn, schemes.CompressedTensorsWNA16):
    def unpacked(self, parts):
        rows, words = parts["weight_packed"].shape
        shape = torch.tensor((rows, words * self.pack_factor))
        args = QuantizationArgs(
            num_bits=32 // self.pack_factor,
            type="int",
            strategy=self.strategy,
            group_size=None if self.group_size < 0 else self.group_size,
            symmetric=self.symmetric,
        )
        return _unpack("pack-quantized", args, parts | {"weight_shape": shape})


class Nvfp4(_StandIn, schemes.CompressedTensorsW4A16Fp4):
    def unpacked(self, parts):
        assert len(set(parts["weight_global_scale"].tolist())) == 1
        args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
        return _unpack(
            "nvfp4-pack-quantized", args, parts | {"weight_global_scale": parts["weight_global_scale"][:1]}
        )


class _Fp8(_StandIn):
    block: list[int] | None = None

    def unpacked(self, parts):
        strategy = "block" if self.block else "channel"
        args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, block_structure=self.block)
        return _unpack("float-quantized", args, parts)


class Fp8(_Fp8, schemes.CompressedTensorsW8A8Fp8):
    def __init__(self, weight_quant, is_static_input_scheme):
        self.block = weight_quant.block_structure
        self.weight_quant, self.strategy = weight_quant, weight_quant.strategy
        self.weight_block_size, self.is_static_input_scheme = self.block, is_static_input_scheme

    def rows(self, x):
        quantized, scale = quantize_rows(x)
        return quantized.float() * scale


class MarlinFp8(_Fp8, schemes.CompressedTensorsW8A16Fp8):
    pass


STAND_INS = {
    "CompressedTensorsWNA16": Integers,
    "CompressedTensorsW4A16Fp4": Nvfp4,
    "CompressedTensorsW8A8Fp8": Fp8,
    "CompressedTensorsW8A16Fp8": MarlinFp8,
}


def use_stand_ins(monkeypatch, capability: tuple[int, int] | None, faults: dict | None = None) -> None:
    """Have drafts ask for kernels as on a GPU of this capability, and multiply with the stand-ins."""
    for name, stand_in in STAND_INS.items():
        monkeypatch.setattr(schemes, name, stand_in)
    monkeypatch.setattr(_StandIn, "faults", faults or {})
    monkeypatch.setattr(quantized_linear, "device_capability", lambda: capability)
    monkeypatch.setenv(DFlashOptions.DRAFT_PACKED.variable, "1")
