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
    """A module's tensors by the last part of their names, and the shape of its weight."""

    name: str
    scheme: Scheme
    rows: int
    columns: int
    parts: Parts

    def dequantize(self, device: torch.device) -> torch.Tensor:
        """Return the weight [rows, columns] in float32. Raises ValueError naming the tensor."""
        parts = {name: tensor.to(device) for name, tensor in self.parts.items()}
        try:
            return dequantize(parts, self.scheme, self.rows, self.columns)
        except ValueError as error:
            raise ValueError(f"{self.name}.{error}") from error


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


def dequantize(parts: Mapping[str, torch.Tensor], scheme: Scheme, rows: int, columns: int) -> torch.Tensor:
    """Return the weight [rows, columns] in float32, on the device of its tensors.

    `parts` holds the tensors of the module by the last part of their names, checked against `scheme.parts`.

    Raises:
        ValueError: values that no writer means.
    """
    shape, scale = (rows, columns), _scale(parts, scheme)
    _check_finite(scheme.scale, scale)
    order = parts.get("weight_g_idx") if scheme.has_order else None
    if order is not None and (order.min() < 0 or order.max() >= scale.shape[-1]):
        raise ValueError(f"weight_g_idx points outside its {scale.shape[-1]} groups")
    if scheme.layout == "pack-quantized":
        stored = tuple(parts["weight_shape"].tolist())
        if stored != shape:
            raise ValueError(f"weight_shape is {stored}, expected {shape}")
        weight = _unpack_integers(parts["weight_packed"], scheme.bits, columns).float()
    elif scheme.layout in ("int8", "fp8", "modelopt-fp8"):
        weight = parts["weight"].float()
        _check_finite("weight", weight)
    else:
        halves = parts["weight"] if scheme.layout == "modelopt-nvfp4" else parts["weight_packed"]
        values = torch.tensor(_E2M1, dtype=torch.float32, device=halves.device)
        weight = values[torch.stack((halves & 15, halves >> 4), dim=-1).flatten(-2).long()]
    if not scheme.is_symmetric:
        zero = parts["weight_zero_point"]
        if scheme.layout == "pack-quantized":  # along rows, unlike the weight
            zero = _unpack_integers(zero.t().contiguous(), scheme.bits, rows).t()
        weight = weight - _spread(zero.float(), shape, scheme, order)
    return weight * _spread(scale, shape, scheme, order)


def _check_finite(name: str, values: torch.Tensor) -> None:
    wrong = int((~torch.isfinite(values)).sum())
    if wrong:
        raise ValueError(f"{name} holds {wrong} values that are not finite")


def _scale(parts: Mapping[str, torch.Tensor], scheme: Scheme) -> torch.Tensor:
    scale = parts[scheme.scale]
    if scheme.layout == "mxfp4":  # E8M0: an exponent alone
        exponents = scale if scale.dtype == torch.uint8 else scale.view(torch.uint8)
        return torch.exp2(exponents.float() - 127).masked_fill(exponents == 255, torch.nan)
    scale = scale.float()
    if scheme.layout == "nvfp4":
        return scale / _global_scale(parts, "weight_global_scale")
    if scheme.layout == "modelopt-nvfp4":
        return scale * _global_scale(parts, "weight_scale_2")
    return scale[:, 0, :, 0] if scale.ndim == 4 else scale  # ModelOpt's blocks [rows, 1, columns, 1]


def _global_scale(parts: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    scale = parts[name].float()
    if not torch.isfinite(scale).all() or not (scale > 0).all():
        raise ValueError(f"{name} is {scale.item()}, which must be positive and finite")
    return scale


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
    if scheme.strategy == "block" or scheme.layout == "modelopt-fp8":
        return scale.repeat_interleave(scheme.block[1], 1)[:, :columns]  # blocks of one row
    return scale.repeat_interleave(scheme.group, 1)
