"""Applies the ledger's changes to SGLang.

Each target is looked up and its signature compared before any is touched; a mismatch ends the process,
because a half-hooked server would answer with the wrong implementation.

SGLang's own HookRegistry is not used: for every hook it walks all attributes of all modules loaded, ten times
what the rest of our installation takes, in each process of a server."""

import functools
import inspect
import os
import sys
from types import ModuleType
from typing import Any

from sglang_dflash.srt.observability.metrics_files import MARK
from sglang_dflash.srt.plugins.ledger import (
    AT_CPU_ATTENTION,
    AT_CPU_DISAGGREGATION,
    AT_DISAGGREGATION,
    AT_FRONT_END,
    AT_LOAD,
    AT_METRICS,
    AT_METRICS_SET_UP,
    AT_WORKER,
    Change,
)
from sglang_dflash.srt.plugins.resolve import resolve


def install_at_load() -> None:
    """Check every AT_LOAD target, then change them all."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    changes = _relevant(AT_LOAD)
    for change in changes:
        check(change)
    replaced = []
    for change in changes:
        if change.kind == "resolution":
            register_resolution_hook(change.target.rpartition(".")[2])(change.build())
        elif change.kind == "around":
            _wrap(change)
        elif change.kind == "replace":
            replaced.append(_rebind(change))
        else:
            _rebind(change)
    if replaced:  # only on a CPU: nobody else pays for the walk
        _rebind_importers(replaced)
    if MARK in os.environ:
        install_at_metrics()


def install_at_front_end(has_metrics: bool = False) -> None:
    """Check and apply AT_FRONT_END in this process, which takes requests in, and AT_METRICS_SET_UP where it
    counts."""
    _install_now(AT_FRONT_END + AT_METRICS_SET_UP if has_metrics else AT_FRONT_END)


def install_at_metrics() -> None:
    """Check and apply AT_METRICS in this process, once prometheus_client knows where its files are."""
    _install_now(AT_METRICS)


def install_at_worker(is_disaggregated: bool = False) -> None:
    """Check and apply AT_WORKER, and AT_DISAGGREGATION where it is asked for, in this scheduler process."""
    _install_now(AT_WORKER + AT_DISAGGREGATION if is_disaggregated else AT_WORKER)


def install_at_cpu_attention() -> None:
    """Check and apply AT_CPU_ATTENTION in this scheduler process."""
    _install_now(AT_CPU_ATTENTION)


def install_at_cpu_disaggregation() -> None:
    """Check and apply AT_CPU_DISAGGREGATION in this scheduler process."""
    _install_now(AT_CPU_DISAGGREGATION)


def _install_now(table: tuple[Change, ...]) -> None:
    changes = _relevant(table)
    for change in changes:
        check(change)
    for change in changes:
        _rebind(change)


def _wrap(change: Change) -> None:
    owner, original = resolve(change.target)
    hook = change.build()

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return hook(original, *args, **kwargs)

    name = change.target.rpartition(".")[2]
    setattr(owner, name, staticmethod(wrapped) if isinstance(vars(owner)[name], staticmethod) else wrapped)


def _rebind(change: Change) -> tuple[Any, Any]:
    """Returns what stood there and what stands there now."""
    value = change.build()
    owner, target = resolve(change.target)
    if change.kind == "entry":
        target[change.key] = value
    else:
        setattr(owner, change.target.rpartition(".")[2], value)
    return target, value


def _rebind_importers(replaced: list[tuple[Any, Any]]) -> None:
    """Where a module of SGLang's, loaded before us, has imported (old, new)'s old under any name, it gets the
    new."""
    new = {id(old): value for old, value in replaced}
    for path, module in list(sys.modules.items()):
        if path.startswith("sglang.") and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, name, new[id(value)])


def check(change: Change) -> None:
    """Raise SystemExit unless the target exists with the parameters we expect."""
    try:
        _, target = resolve(change.target)
    except (ImportError, AttributeError) as error:
        raise SystemExit(
            f"sglang-dflash: SGLang has no {change.target} to change ({error}). Needed to: {change.why}"
        ) from error
    if change.signature is None:
        if change.kind == "entry" and not hasattr(target, "__setitem__"):
            raise SystemExit(f"sglang-dflash: {change.target} is not a registry. Needed to: {change.why}")
        return
    parameters = list(inspect.signature(inspect.unwrap(target)).parameters)
    wanted = [name for name in change.signature.strip("()").split(", ") if name]
    if not set(wanted) <= set(parameters) if change.kind == "class" else parameters != wanted:
        found = f"({', '.join(parameters)})"
        raise SystemExit(
            f"sglang-dflash: {change.target} takes {found}, expected {change.signature}. Needed to: {change.why}"
        )


def _relevant(changes: tuple[Change, ...]) -> list[Change]:
    from sglang_dflash.srt.hardware_backend.cpu import runtime

    return [change for change in changes if runtime.is_active() or not change.cpu_only]
