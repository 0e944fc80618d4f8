"""An FP8 copy of an LM head, for drafting.

A draft step reads the whole head once, which is a large part of its time on a GPU. The copy halves the bytes.
Verification uses the target's own head, so the output stays the target's. Only acceptance can change.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sglang_dflash.srt.layers.plain_weight import plain_weight

DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(DTYPE).max
_ALIGNMENT = 16  # of both sizes of the weight, in torch._scaled_mm
_MIN_CAPABILITY = (8, 9)
_SLICE = 1 << 24  # elements quantized at a time: float32 copies of a whole head would take gigabytes


def quantize_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values [n, k] in FP8 (E4M3), and a float32 scale [n, 1] for each row."""
    scale = values.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12) / _LARGEST
    return (values.float() / scale).to(DTYPE), scale


def reason_against(head: nn.Module) -> str | None:
    """Return why a head cannot be copied, or None."""
    weight = getattr(head, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        return f"the head has no plain weight ({type(head).__name__})"
    if weight.element_size() < 2:
        return f"the head is quantized already ({weight.dtype})"
    if weight.is_cuda:
        capability = torch.cuda.get_device_capability(weight.device)
        if capability < _MIN_CAPABILITY:
            needed, found = (".".join(map(str, one)) for one in (_MIN_CAPABILITY, capability))
            return f"FP8 needs compute capability {needed}, this GPU has {found}"
        if any(size % _ALIGNMENT for size in weight.shape):
            return f"the head is {tuple(weight.shape)}, and FP8 needs multiples of {_ALIGNMENT}"
    return None


class Fp8Head:
    """Logits of a head from an FP8 copy of its weight, one scale per row and one per token.

    A CPU has no FP8 product. There the copy is kept in the weight's dtype, which holds every E4M3 value.

    Args:
        head: an LM head or an embedding with weight [vocab, hidden]. There must be no `reason_against` it.

    Attributes:
        weight: [vocab, hidden], the copy.
        scale: [vocab, 1] float32.
    """

    def __init__(self, head: nn.Module):
        self._source: Any = head
        source: Any = head.weight
        self.weight = torch.empty_like(source, dtype=DTYPE if source.is_cuda else None, requires_grad=False)
        self.scale = torch.empty(source.shape[0], 1, dtype=torch.float32, device=source.device)
        self.shard_indices = getattr(head, "shard_indices", None)
        self.org_vocab_size = getattr(head, "org_vocab_size", None)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weight again after an update, in place, as CUDA graphs read the copy."""
        rows = max(1, _SLICE // self.weight.shape[1])
        parts = (
            tensor.split(rows) for tensor in (plain_weight(self._source).detach(), self.weight, self.scale)
        )
        for source, weight, scale in zip(*parts, strict=True):
            quantized, own_scale = quantize_rows(source)
            weight.copy_(quantized)
            scale.copy_(own_scale)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab] of hidden [n, hidden], in the dtype of `hidden`."""
        rows, row_scale = quantize_rows(hidden)
        if not hidden.is_cuda:
            product = F.linear(rows.to(hidden.dtype), self.weight.to(hidden.dtype))
            return (product.float() * row_scale * self.scale.t()).to(hidden.dtype)
        logits = torch._scaled_mm(
            rows, mat2=self.weight.t(), scale_a=row_scale, scale_b=self.scale.t(), out_dtype=torch.bfloat16
        )
        return logits.to(hidden.dtype)
