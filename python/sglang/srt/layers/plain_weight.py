"""Plain weights of layers whose quant method may have a `reordered` one instead."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def is_reordered(layer: Any) -> bool:
    """Return whether a layer multiplies with a reordered weight."""
    return getattr(getattr(layer, "quant_method", None), "reordered", None) is not None


def plain_weight(layer: Any) -> torch.Tensor:
    """Return a layer's weight, in its plain layout."""
    return layer.quant_method.plain(layer) if is_reordered(layer) else layer.weight


@contextmanager
def hold_plain_weights(model: nn.Module) -> Iterator[None]:
    """Hold a model's weights plain, to be written. Weights that are plain before stay so."""
    layers: list[Any] = [layer for layer in model.modules() if is_reordered(layer)]
    for layer in layers:
        layer.quant_method.restore_weights_before_loading(layer)
    try:
        yield
    finally:
        for layer in layers:
            layer.quant_method.process_weights_after_loading(layer)
