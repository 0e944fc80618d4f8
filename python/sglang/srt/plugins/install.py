"""Checks and applies the ledger's changes to SGLang.

Each target is looked up and its signature compared before any is touched. If a change that DFLASH needs
cannot be made, none of its table is made. If another cannot be made, the feature that it belongs to is off.

SGLang's own HookRegistry is not used. For every hook it walks all attributes of all loaded modules, in each
process of a server. That takes ten times as long as the rest of our installation.
"""

import functools
import importlib.metadata
import inspect
import logging
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.plugins import ledger
from sglang_dflash.srt.plugins.change import Change, resolve

logger = logging.getLogger(__name__)


class Mismatch(Exception):
    """The installed SGLang lacks what a change needs."""


def install_at_load() -> None:
    """Apply AT_LOAD, also in modules of SGLang that imported a replaced name before us.

    Raises Mismatch if DFLASH cannot be served. Nothing has been changed then, except what a CPU needs.
    """
    try:
        replaced = install(ledger.AT_LOAD)
    except Mismatch:
        _rebind_importers(install([change for change in ledger.AT_LOAD if change.cpu_only]))
        raise
    _rebind_importers(replaced)
    if DFlashOptions.FALLBACK.get():
        install(ledger.AT_HAND_OVER)


def install(table: Sequence[Change]) -> list[tuple[Any, Any]]:
    """Check all changes of a table, then apply them in this process.

    Returns:
        The old and the new value of every replaced name.

    Raises:
        Mismatch: A required change cannot be made. None is.
    """
    changes = _that_fit(relevant(table))
    # Building imports our modules. It comes first, so that a failure leaves SGLang as it is.
    built = [(change, change.build()) for change in changes]
    replaced = []
    for change, value in built:
        if change.kind == "around":
            _wrap(change, value)
        else:
            old_and_new = _rebind(change, value)
            if change.kind == "replace":
                replaced.append(old_and_new)
    return replaced


def check(change: Change) -> None:
    """Raise Mismatch unless the target exists with the expected parameters."""
    try:
        _, target = resolve(change.target)
    except (ImportError, AttributeError) as error:
        raise Mismatch(f"SGLang has no {change.target} to change ({error}). Reason: {change.why}") from error
    if change.signature is None:
        return
    parameters = list(inspect.signature(inspect.unwrap(target)).parameters)
    if not change.accepts(parameters):
        found = f"({', '.join(parameters)})"
        raise Mismatch(f"{change.target} takes {found}, expected {change.signature}. Reason: {change.why}")


def find_mismatch(changes: Sequence[Change], is_loaded_only: bool = False) -> str | None:
    """Return why a required change of a process to come cannot be made. None: each can.

    Files do not show what another plugin has replaced at run time. It has done so in this process too,
    because SGLang loads plugins in all of them.

    Args:
        changes: tables of the process to come.
        is_loaded_only: check only targets whose modules are loaded. No other can have been replaced.
    """
    for change in relevant(changes):
        if change.feature is not None:
            continue
        if is_loaded_only and not _is_loaded(change.target):
            continue
        try:
            check(change)
        except Mismatch as mismatch:
            return str(mismatch)
    return None


def _is_loaded(path: str) -> bool:
    """Tell whether the module of a dotted path is loaded, and has the next name of the path."""
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        if (module := sys.modules.get(".".join(parts[:split]))) is not None:
            return hasattr(module, parts[split])
    return False


def is_main_process() -> bool:
    """Tell whether SGLang started this process itself: what a user reads once is logged there."""
    return multiprocessing.parent_process() is None


def _that_fit(changes: Sequence[Change]) -> list[Change]:
    """Leave out the features that lack a target, with a warning for each. Raises Mismatch."""
    missing = missing_features(changes)
    level = logging.WARNING if is_main_process() else logging.DEBUG
    for feature, reason in missing.items():
        logger.log(level, "sglang-dflash: without %s on this SGLang: %s", feature, reason)
    return [change for change in changes if change.feature not in missing]


def missing_features(changes: Sequence[Change]) -> dict[str, str]:
    """Return the reason by feature that lacks a target.

    Raises Mismatch if a required change lacks one.
    """
    missing: dict[str, str] = {}
    for change in changes:
        try:
            check(change)
        except Mismatch as mismatch:
            if change.feature is None:
                raise
            missing.setdefault(change.feature, str(mismatch))
    return missing


def installed_version() -> str:
    """Return the version of the installed SGLang, from its metadata."""
    return importlib.metadata.version("sglang")


def _wrap(change: Change, hook: Callable[..., Any]) -> None:
    owner, original = resolve(change.target)

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return hook(original, *args, **kwargs)

    is_static = isinstance(vars(owner)[change.name], staticmethod)
    setattr(owner, change.name, staticmethod(wrapped) if is_static else wrapped)


def _rebind(change: Change, value: Any) -> tuple[Any, Any]:
    """Rebind a name; return the target before and the new value."""
    owner, target = resolve(change.target)
    setattr(owner, change.name, value)
    return target, value


def _rebind_importers(replaced: list[tuple[Any, Any]]) -> None:
    """Rebind each old value to its new one in all loaded modules of SGLang."""
    if not replaced:  # only on a CPU is there any: the walk over all modules costs time
        return
    new = {id(old): value for old, value in replaced}
    for path, module in list(sys.modules.items()):
        if path.startswith("sglang.") and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, name, new[id(value)])


def relevant(changes: Sequence[Change]) -> list[Change]:
    """List what this machine and this release of SGLang need."""
    from sglang_dflash.srt.hardware_backend.cpu import runtime

    version = installed_version()
    return [
        change
        for change in changes
        if (runtime.is_active() or not change.cpu_only) and change.is_needed_on(version)
    ]
