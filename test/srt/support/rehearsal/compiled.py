"""Kernels of ours that Triton would compile while a server is running, and all requests wait."""

from typing import Any

import torch
from support.rehearsal import report, steps

_known: set[tuple] = set()


def on_launch(kernel: Any, args: tuple, kwargs: dict) -> None:
    """Take in a launch of an interpreted kernel; report one of a step that start-up has not compiled."""
    if not kernel.fn.__module__.startswith("sglang_dflash."):
        return
    values = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
    annotations = kernel.fn.__annotations__
    unspecialized = kernel.kwargs.get("do_not_specialize") or ()
    unaligned = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    key = tuple(
        (name, value if name in annotations else _kind(value, name in unspecialized, name in unaligned))
        for name, value in values.items()
    )
    variant = kernel.fn.__name__, key
    if variant not in _known and steps.launched:
        report.problem(f"{kernel.fn.__name__} is compiled in a step: {key}")
    _known.add(variant)


def _kind(value: Any, is_unspecialized: bool, is_unaligned: bool) -> Any:
    """Return Triton's view of an argument: another one is compiled anew."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), is_unaligned or value.data_ptr() % 16 == 0
    if not isinstance(value, int):
        return type(value).__name__
    width = "i32" if -(2**31) <= value < 2**31 else "i64"
    return width if is_unspecialized else (width, value == 1, value % 16 == 0)
