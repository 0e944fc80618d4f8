"""A weight in oneDNN's own layout, and readers that need not know of it.

`reordering.py` says which weights are reordered, and when. Nothing here imports SGLang.
"""

from typing import Any

import torch

# Rows that oneDNN chooses the layout for. It serves any number of rows.
_ROWS = 8
_PRODUCT = torch.ops.mkldnn._linear_pointwise.default


class ReorderedWeight:
    """Part of a method that multiplies with a reordered weight. Each layer has its own method.

    The layer's parameter keeps its values if `keeps_plain`.
    """

    def __init__(self, keeps_plain: bool):
        self._keeps_plain = keeps_plain
        self.weight: torch.Tensor | None = None  # None: the order is plain

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.weight is not None and not self._keeps_plain:
            return
        plain = layer.weight.data
        self.weight = torch.ops.mkldnn._reorder_linear_weight(plain, _ROWS)
        if not self._keeps_plain:
            layer.weight.data = plain.new_full((1, 1), torch.nan).expand(plain.shape)

    def restore_weights_before_loading(self, layer: Any) -> None:
        """Restore the plain order, in which products then run."""
        layer.weight.data = self.plain(layer)
        self.weight = None

    def plain(self, layer: Any) -> torch.Tensor:
        is_gone = self.weight is not None and not self._keeps_plain
        return self.weight.to_dense() if is_gone else layer.weight.data  # type: ignore[union-attr]

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.weight is None:
            return torch.nn.functional.linear(x, layer.weight, bias)
        return _PRODUCT(x.to(torch.bfloat16), W=self.weight, B=bias, attr="none", scalars=[], algorithm="")


def is_reordered(layer: Any) -> bool:
    """Return whether a layer multiplies with a reordered weight."""
    method = getattr(layer, "quant_method", None)
    return isinstance(method, ReorderedWeight) and method.weight is not None


def plain_weight(layer: Any) -> torch.Tensor:
    """Return a layer's weight, in the plain order."""
    return layer.quant_method.plain(layer) if is_reordered(layer) else layer.weight
