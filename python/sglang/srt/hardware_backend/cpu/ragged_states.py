"""GatedDeltaNet layers of a verify forward whose requests have different numbers of rows."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch


def verifying_own_lengths() -> Callable[..., Any]:
    """Build `GDNAttnBackend.forward_extend`, which also verifies different numbers of rows.

    SGLang's verifies blocks of one width. A request with fewer rows repeats its last one up to that width.
    Its recurrence runs on in vain: no output and no state after its last row is read.
    """
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend

    # Each of a process's attention backends installs its table of changes.
    original = inspect.unwrap(GDNAttnBackend.forward_extend)

    @functools.wraps(original)
    def forward_extend(
        self: Any,
        layer: Any,
        forward_batch: Any,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        rows = getattr(forward_batch.spec_info, "ragged", None)
        if rows is None or not forward_batch.forward_mode.is_target_verify():
            return original(self, layer, forward_batch, mixed_qkv, a, b, **kwargs)
        # SGLang has planned for blocks of one width from the number of rows.
        starts = torch.arange(0, rows.bs * rows.width + 1, rows.width, dtype=torch.int32)
        self.forward_metadata = replace(self.forward_metadata, query_start_loc=starts)
        blocks = (rows.unpack(x).flatten(0, 1) for x in (mixed_qkv, a, b))
        return original(self, layer, forward_batch, *blocks, **kwargs)[:, rows.index]

    forward_extend.takes_own_lengths = True  # type: ignore[attr-defined]
    return forward_extend


def verifies_any_width(linear_backend: Any) -> bool:
    """Tell whether a linear attention backend verifies blocks of any width, and own lengths.

    linear_backend: None if the target has none.
    """
    forward_extend = getattr(type(linear_backend), "forward_extend", None)
    return getattr(forward_extend, "takes_own_lengths", False)
