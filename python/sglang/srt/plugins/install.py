"""Checks and applies the ledger's changes to SGLang.

Each target is looked up and its signature compared before any is touched. A mismatch ends the process,
because a half-hooked server would answer with the wrong implementation.

SGLang's own HookRegistry is not used. For every hook it walks all attributes of all loaded modules, in each
process of a server, which takes ten times as long as the rest of our installation.
"""

import functools
import inspect
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from sglang_dflash.srt.plugins import ledger
from sglang_dflash.srt.plugins.ledger import Change, resolve


def install_at_load() -> None:
    """Apply AT_LOAD, also in modules of SGLang that imported a replaced name before us."""
    replaced = install(ledger.AT_LOAD)
    if replaced:  # only on a CPU: the walk over all modules costs time
        _rebind_importers(replaced)


def install(table: Sequence[Change]) -> list[tuple[Any, Any]]:
    """Check all changes of a table, then apply them in this process.

    Returns:
        The old and the new value of every replaced name.
    """
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    changes = _relevant(table)
    for change in changes:
        check(change)
    replaced = []
    for change in changes:
        if change.kind == "resolution":
            register_resolution_hook(change.name)(change.build())
        elif change.kind == "around":
            _wrap(change)
        else:
            old_and_new = _rebind(change)
            if change.kind == "replace":
                replaced.append(old_and_new)
    return replaced


def check(change: Change) -> None:
    """Raise SystemExit unless the target exists with the expected parameters."""
    try:
        _, target = resolve(change.target)
    except (ImportError, AttributeError) as error:
        raise SystemExit(
            f"sglang-dflash: SGLang has no {change.target} to change ({error}). Reason: {change.why}"
        ) from error
    if change.signature is None:
        if change.kind == "entry" and not hasattr(target, "__setitem__"):
            raise SystemExit(f"sglang-dflash: {change.target} is not a registry. Reason: {change.why}")
        return
    parameters = list(inspect.signature(inspect.unwrap(target)).parameters)
    expected = change.parameters
    matches = set(expected) <= set(parameters) if change.kind == "class" else parameters == expected
    if not matches:
        found = f"({', '.join(parameters)})"
        raise SystemExit(
            f"sglang-dflash: {change.target} takes {found}, expected {change.signature}. Reason: {change.why}"
        )


def _wrap(change: Change) -> None:
    owner, original = resolve(change.target)
    hook = change.build()

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return hook(original, *args, **kwargs)

    is_static = isinstance(vars(owner)[change.name], staticmethod)
    setattr(owner, change.name, staticmethod(wrapped) if is_static else wrapped)


def _rebind(change: Change) -> tuple[Any, Any]:
    """Write a registry's entry, or a name; return the target before and the new value."""
    value = change.build()
    owner, target = resolve(change.target)
    if change.kind == "entry":
        target[change.key] = value
    else:
        setattr(owner, change.name, value)
    return target, value


def _rebind_importers(replaced: list[tuple[Any, Any]]) -> None:
    """Rebind each old value to its new one in all loaded modules of SGLang."""
    new = {id(old): value for old, value in replaced}
    for path, module in list(sys.modules.items()):
        if path.startswith("sglang.") and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, name, new[id(value)])


def _relevant(changes: Sequence[Change]) -> list[Change]:
    from sglang_dflash.srt.hardware_backend.cpu import runtime

    return [change for change in changes if runtime.is_active() or not change.cpu_only]
