"""A quantized module's tensors as a weight in float32."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch

from sglang_dflash.srt.configs.draft_tensors import ExaminedTensors
from sglang_dflash.srt.configs.quantization import Scheme

Parts = dict[str, torch.Tensor]

# Values of the 4-bit float E2M1 by its bits, the sign first.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class QuantizedModule:
    """A module's tensors, by the last part of their names, and the shape of its weight.

    `examine_tensors` has found no fault in them.
    """

    name: str
    scheme: Scheme
    rows: int
    columns: int
    parts: Parts

    def dequantize(self, device: torch.device) -> torch.Tensor:
        """Return the weight [rows, columns] in float32.

        Raises ValueError naming the tensor that holds values no writer means.
        """
        parts = {name: tensor.to(device) for name, tensor in self.parts.items()}
        scheme, shape = self.scheme, (self.rows, self.columns)
        scale = _scale(parts, scheme)
        order = parts.get("weight_g_idx") if scheme.has_order else None
        if order is not None and (order.min() < 0 or order.max() >= scale.shape[-1]):
            raise ValueError(f"{self.name}.weight_g_idx points outside its {scale.shape[-1]} groups")
        if scheme.packing == "pack-quantized":
            weight = _unpack_integers(parts["weight_packed"], scheme.bits, self.columns).float()
        elif scheme.packing in ("int8", "fp8", "modelopt-fp8"):
            weight = parts["weight"].float()
            if wrong := int((~weight.isfinite()).sum()):
                raise ValueError(f"{self.name}.weight holds {wrong} values that are not finite")
        else:
            halves = parts["weight"] if scheme.packing == "modelopt-nvfp4" else parts["weight_packed"]
            values = torch.tensor(_E2M1, dtype=torch.float32, device=halves.device)
            weight = values[torch.stack((halves & 15, halves >> 4), dim=-1).flatten(-2).long()]
        if not scheme.is_symmetric:
            zero = parts["weight_zero_point"]
            if scheme.packing == "pack-quantized":  # along rows, unlike the weight
                zero = _unpack_integers(zero.t().contiguous(), scheme.bits, self.rows).t()
            weight = weight - _spread(zero.float(), shape, scheme, order)
        return weight * _spread(scale, shape, scheme, order)


def take_quantized_modules(
    tensors: MutableMapping[str, torch.Tensor], found: ExaminedTensors
) -> list[QuantizedModule]:
    """Remove the tensors of quantized modules, their biases aside."""
    modules = []
    for name, scheme in found.schemes.items():
        own = [key for key in tensors if key.rpartition(".")[0] == name and not key.endswith(".bias")]
        parts = {key.rpartition(".")[2]: tensors.pop(key) for key in own}
        rows, columns = found.shapes[f"{name}.weight"]
        modules.append(QuantizedModule(name, scheme=scheme, rows=rows, columns=columns, parts=parts))
    return modules


def _scale(parts: Mapping[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    scale = parts[scheme.scale]
    if scheme.packing == "mxfp4":  # E8M0: an exponent alone
        exponents = scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)
        return torch.exp2(exponents.float() - 127).masked_fill(exponents == 255, torch.nan)
    scale = scale.float()
    if scheme.packing == "nvfp4":
        return scale / parts["weight_global_scale"].float()
    if scheme.packing == "modelopt-nvfp4":
        return scale * parts["weight_scale_2"].float()
    return scale[:, 0, :, 0] if scale.ndim == 4 else scale  # ModelOpt's blocks [rows, 1, columns, 1]


def _unpack_integers(words: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    """Unpack words [n, w] int32 to signed integers [n, width], from the lowest bits on."""
    shifts = torch.arange(0, end=32, step=bits, dtype=torch.int32, device=words.device)
    values = (words[..., None] >> shifts) & (2**bits - 1)
    return values.flatten(-2)[..., :width] - 2 ** (bits - 1)


def _spread(
    scale: torch.Tensor, shape: tuple[int, int], scheme: Scheme, order: torch.Tensor | None
) -> torch.Tensor:
    """Repeat each scale over rows and columns that share it, to broadcast to `shape`."""
    rows, columns = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.ndim == 1 or scale.shape[1] == 1 and scale.shape[0] == rows:
        return scale.reshape(rows, 1)
    if order is not None:
        return scale[:, order.long()]
    if scale.shape[0] != rows:
        height, width = scheme.block
        return scale.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    if scheme.strategy == "block" or scheme.packing == "modelopt-fp8":
        return scale.repeat_interleave(scheme.block[1], 1)[:, :columns]  # blocks of one row
    return scale.repeat_interleave(scheme.group, 1)
