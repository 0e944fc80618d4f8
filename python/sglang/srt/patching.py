"""Patches of SGLang: the decorator that declares one, its check, and its application.

`@patches(...)` stands over the function or class that takes a target's place. `plugins/patches.py` lists the
modules that hold patches, by the time when they are made. All targets are checked before any is touched. If a
patch that DFLASH needs cannot be made, none of its time is. If another cannot be made, its feature is off.

SGLang's HookRegistry logs a hook that fails and goes on, and for each hook it walks all loaded modules.
"""

import functools
import importlib
import importlib.metadata
import inspect
import itertools
import logging
import multiprocessing
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Callable[..., Any])

HELP = "docs/dev/updating-sglang.md says what to do."

# Times when patches are made.
LOAD = "when SGLang loads its plugins, in every process"
FRONT_END = "when the arguments turn out to request DFLASH, in the process that receives requests"
DETOKENIZER = "when a detokenizer of a server with DFLASH begins"
WORKER = "before the worker is built, in schedulers that run DFLASH"
FALLBACK = "when SGLang loads its plugins, in processes of servers of SGLang's own DFLASH"
CPU_ATTENTION = "when our CPU attention is built"


class Mismatch(Exception):
    """The installed SGLang lacks what a patch needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One patch of SGLang.

    Attributes:
        target: Dotted path of a callable.
        ours: Function or class in place of the target. A function whose first parameter is `original` wraps.
        at: Times when the patch is made.
        upstream: Proposal that would make the patch unnecessary, a link or a text in our docs.
        until: First release of SGLang that does not need the patch. None: every supported release needs it.
        feature: Feature that is off without the patch. None: DFLASH cannot be served without it.
        signature: The target's parameters. For a class only those that SGLang passes. None: unknown.
    """

    target: str
    ours: Callable[..., Any]
    at: Sequence[str]
    upstream: str
    until: str | None = None
    feature: str | None = None
    signature: str | None = None

    @property
    def name(self) -> str:
        """The last part of the target."""
        return self.target.rpartition(".")[2]

    @property
    def why(self) -> str:
        """The reason for the patch: the first line of the docstring."""
        return (self.ours.__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def is_class(self) -> bool:
        """True if the target is a class."""
        return inspect.isclass(self.ours)

    @property
    def is_for_cpu(self) -> bool:
        """True if only the CPU runtime needs the patch."""
        return ".hardware_backend.cpu." in self.ours.__module__

    @property
    def parameters(self) -> list[str]:
        """The names in the signature."""
        return [name for name in (self.signature or "").strip("()").split(", ") if name]

    def is_needed_on(self, version: str) -> bool:
        """Return whether this release of SGLang needs the patch."""
        return self.until is None or release_numbers(version) < release_numbers(self.until)

    def accepts(self, parameters: list[str]) -> bool:
        """Return whether the patch was written for a target with these parameters."""
        if self.is_class:
            return set(self.parameters) <= set(parameters)
        return self.signature is None or self.parameters == parameters

    def build(self) -> Any:
        """Return the target's new value. Another plugin's wrapper stays inside."""
        owner, original = resolve(self.target)
        value: Any = self.ours
        if next(iter(inspect.signature(value).parameters), None) == "original":
            if getattr(original, "wrapper", None) is value:  # a second server in this process
                return inspect.getattr_static(owner, self.name)
            value = _wrap(original, value)
        is_static = isinstance(inspect.getattr_static(owner, self.name), staticmethod)
        return staticmethod(value) if is_static else value


def _wrap(original: Any, wrapper: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    wrapped.wrapper = wrapper  # type: ignore[attr-defined]
    return wrapped


# The patches of each of our modules.
_declared: defaultdict[str, list[Patch]] = defaultdict(list)


def patches(target: str, *, at: str | Sequence[str], upstream: str, **fields: Any) -> Callable[[T], T]:
    """Declare that the decorated function or class takes the place of one in SGLang.

    The docstring's first line is the reason. The arguments are fields of `Patch`, with one time or several.
    """

    def declare(ours: T) -> T:
        times = (at,) if isinstance(at, str) else at
        patch = Patch(target=target, ours=ours, at=times, upstream=upstream, **fields)
        _declared[ours.__module__].append(patch)
        return ours

    return declare


def declared_in(module: str, at: str) -> list[Patch]:
    """Import a module of ours, and list its patches of a time."""
    path = importlib.import_module(module).__name__
    return [patch for patch in _declared[path] if at in patch.at]


def release_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for sorting. A version without any is the newest."""
    numbers = itertools.takewhile(str.isdigit, version.split("."))
    return tuple(map(int, numbers)) or (2**31,)


def installed_version() -> str:
    """Return the version of the installed SGLang, from its metadata."""
    return importlib.metadata.version("sglang")


def is_main_process() -> bool:
    """Return whether no other process started this one. Messages for users are logged there."""
    return multiprocessing.parent_process() is None


def resolve(path: str) -> tuple[Any, Any]:
    """Return the holder of the object at a dotted path, and the object."""
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            owner = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise
            continue
        for name in parts[split:-1]:
            owner = getattr(owner, name)
        return owner, getattr(owner, parts[-1])
    raise ImportError(f"no module along {path}")


def relevant(table: Sequence[Patch]) -> list[Patch]:
    """List the patches that this release of SGLang needs."""
    version = installed_version()
    return [each for each in table if each.is_needed_on(version)]


def install(table: Sequence[Patch]) -> list[tuple[Any, Any]]:
    """Check all patches of a table, then apply them in this process.

    Returns the old and the new value of each name of a module, which others may have imported. Raises
    Mismatch, before any patch is made, if a required one cannot be.
    """
    needed = relevant(table)
    missing = missing_features(needed)
    level = logging.WARNING if is_main_process() else logging.DEBUG
    for feature, reason in missing.items():
        logger.log(level, "sglang-dflash: without %s on this SGLang: %s", feature, reason)
    # Building imports our modules. It comes first, so that a failure leaves SGLang as it is.
    built = [(patch, patch.build()) for patch in needed if patch.feature not in missing]
    replaced = []
    for patch, value in built:
        owner, target = resolve(patch.target)
        setattr(owner, patch.name, value)
        if isinstance(owner, ModuleType):
            replaced.append((target, value))
    return replaced


def rebind_importers(replaced: list[tuple[Any, Any]]) -> None:
    """Rebind each old value to its new one in all loaded modules of SGLang."""
    if not replaced:  # only a CPU has replaced names at load, and the walk over all modules costs time
        return
    new = {id(old): value for old, value in replaced}
    for path, module in list(sys.modules.items()):
        if path.startswith("sglang.") and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in new:
                    setattr(module, name, new[id(value)])


def check(patch: Patch) -> None:
    """Raise Mismatch unless the target exists with the expected parameters."""
    try:
        _, target = resolve(patch.target)
    except (ImportError, AttributeError) as error:
        raise Mismatch(f"SGLang has no {patch.target} to change ({error}). Reason: {patch.why}") from error
    if patch.signature is None:  # a method of PyTorch, whose signature Python cannot inspect
        return
    parameters = list(inspect.signature(inspect.unwrap(target)).parameters)
    if not patch.accepts(parameters):
        found = f"({', '.join(parameters)})"
        raise Mismatch(f"{patch.target} takes {found}, expected {patch.signature}. Reason: {patch.why}")


def missing_features(table: Sequence[Patch]) -> dict[str, str]:
    """Return the features that lack a target, and why. Raises Mismatch for a required patch."""
    missing: dict[str, str] = {}
    for patch in table:
        try:
            check(patch)
        except Mismatch as mismatch:
            if patch.feature is None:
                raise
            missing.setdefault(patch.feature, str(mismatch))
    return missing
