"""Patches of SGLang that only tests make, applied with the product's own."""

from collections.abc import Callable
from typing import Any

from sglang_dflash.srt.patching import LOAD, Patch


def patch_with(target: str, ours: Callable[..., Any]) -> Patch:
    """Replace a callable of SGLang."""
    return Patch(target=target, ours=ours, at=(LOAD,), upstream="none")


def patch_around(target: str, ours: Callable[..., Any]) -> Patch:
    """Replace a callable by `ours`, which takes the original before the call's arguments."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return patch_with(target, around)
