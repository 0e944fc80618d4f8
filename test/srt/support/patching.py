"""Patches of SGLang that only tests make, applied with the product's own."""

from collections.abc import Callable
from typing import Any

from sglang_dflash.srt.plugins.patch import Patch, resolve


def patch_with(target: str, ours: Callable[..., Any]) -> Patch:
    """Replace a callable of SGLang."""
    return _patch(target, lambda: ours)


def patch_around(target: str, ours: Callable[..., Any]) -> Patch:
    """Replace a callable by `ours`, which takes the original before the call's arguments."""

    def build() -> Callable[..., Any]:
        _, original = resolve(target)
        return lambda *args, **kwargs: ours(original, *args, **kwargs)

    return _patch(target, build)


def _patch(target: str, build: Callable[[], Any]) -> Patch:
    return Patch(target=target, build=build, why="a test's", upstream="none")
