"""Weights of a CPU server in oneDNN's own layout, where the CPU multiplies bfloat16.

A product with a plain weight reorders it in every call. Here it is reordered once, at load. Attention and MLP
layers keep the reordered copy alone: until the order is restored, the parameter has a shape but no values,
and a direct reader gets NaN. Other layers, whose weight models read directly, keep both copies. So does a
head that is tied to the embedding, which looks up rows.

SGLang restores the order and reorders again around a weight update through `restore_weights_before_loading`
and `process_weights_after_loading`, as it does for quantized weights.
"""

from collections import Counter
from typing import Any

import torch
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.runtime_context import get_lora
from torch import nn

from sglang_dflash.srt.hardware_backend.cpu.speedups import multiplies_bfloat16

# Models read the weights of replicated layers directly, a router's for example.
_REORDERED = (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear, ReplicatedLinear)
_ROWS = 8  # that oneDNN chooses the layout for, which serves any number of rows
_PRODUCT = torch.ops.mkldnn._linear_pointwise.default


class ReorderedWeight:
    """Part of a method that multiplies with a reordered weight. Each layer has its own method.

    The layer's parameter keeps its values if `keeps_plain`.
    """

    def __init__(self, keeps_plain: bool):
        self.keeps_plain = keeps_plain
        self.reordered: torch.Tensor | None = None  # None: the order is plain

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.reordered is not None and not self.keeps_plain:
            return
        plain = layer.weight.data
        self.reordered = torch.ops.mkldnn._reorder_linear_weight(plain, _ROWS)
        if not self.keeps_plain:
            layer.weight.data = plain.new_full((1, 1), torch.nan).expand(plain.shape)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Restore the plain order, in which products then run."""
        layer.weight.data = self.plain(layer)
        self.reordered = None

    def plain(self, layer: Any) -> torch.Tensor:
        return layer.weight.data if self.reordered is None or self.keeps_plain else self.reordered.to_dense()

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.reordered is None:
            return torch.nn.functional.linear(x, layer.weight, bias)
        return _PRODUCT(x.to(torch.bfloat16), W=self.reordered, B=bias, attr="none", scalars=[], algorithm="")


class ReorderedLinearMethod(ReorderedWeight, UnquantizedLinearMethod):
    """SGLang's method of plain layers, with a reordered weight."""


class ReorderedHeadMethod(ReorderedWeight, UnquantizedEmbeddingMethod):
    """SGLang's method of plain heads and embeddings, with a reordered weight for logits."""


def reorder(model: nn.Module) -> None:
    """Reorder the plain bfloat16 weights of a loaded model's layers and head.

    A server with LoRA adapters keeps all weights plain, and so does a CPU that cannot multiply bfloat16.
    """
    if get_lora().enable_lora or not multiplies_bfloat16():
        return
    heads = {id(module.lm_head) for module in model.modules() if hasattr(module, "lm_head")}
    if any(_computes_logits_otherwise(module) for module in model.modules()):
        heads.clear()
    readers = Counter(_storage(one) for _, one in model.named_parameters(remove_duplicate=False))
    module: Any
    for module in model.modules():
        method = _method(module, is_head=id(module) in heads)
        if method is None or not _is_reorderable(module.weight):
            continue
        is_read = readers[_storage(module.weight)] > 1 or type(module) is ReplicatedLinear
        module.quant_method = method(keeps_plain=is_read)
        module.quant_method.process_weights_after_loading(module)


def _method(module: Any, is_head: bool) -> Any:
    """Return the class of a plain layer's method; None for other modules."""
    kind = type(getattr(module, "quant_method", None))
    if kind is UnquantizedLinearMethod and type(module) in _REORDERED:
        return ReorderedLinearMethod
    return ReorderedHeadMethod if kind is UnquantizedEmbeddingMethod and is_head else None


def _is_reorderable(weight: torch.Tensor) -> bool:
    """Return whether a weight is a bfloat16 matrix, and not a view of another tensor."""
    is_matrix = weight.dtype == torch.bfloat16 and weight.dim() == 2
    return is_matrix and weight.untyped_storage().nbytes() == weight.nbytes


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _computes_logits_otherwise(module: Any) -> bool:
    """Return whether a LogitsProcessor multiplies with the head's weight in another dtype."""
    return isinstance(module, LogitsProcessor) and bool(module.use_fp32_lm_head or module.rl_on_policy_target)
