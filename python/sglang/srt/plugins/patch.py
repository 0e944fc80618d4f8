"""A patch of SGLang: its type, the check of its target, and its application.

Each target is looked up and its signature compared before any is touched. If a patch that DFLASH needs
cannot be made, none of its table is made. If another patch cannot be made, its feature is off.

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
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from sglang_dflash.srt import environ

logger = logging.getLogger(__name__)

HELP = "docs/dev/updating-sglang.md says what to do."


class Mismatch(Exception):
    """The installed SGLang lacks what a patch needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One patch of SGLang.

    Attributes:
        target: Dotted path of a callable.
        why: Reason for the patch.
        build: Returns the new value, when the patch is applied. Imports wait until then.
        upstream: Proposal that would make the patch unnecessary, a link or a text in our docs.
        until: First release of SGLang that does not need the patch. None: every supported release needs it.
        feature: Feature that is off if the target is missing or has changed. None: DFLASH cannot be served
            without the patch.
        signature: The target's parameters. For a class only those that SGLang passes. None: unknown.
        is_class: Whether the target is a class.
        cpu_only: Whether only the CPU runtime needs the patch.
    """

    target: str
    why: str
    build: Callable[[], Any]
    upstream: str
    until: str | None = None
    feature: str | None = None
    signature: str | None = None
    is_class: bool = False
    cpu_only: bool = False

    @property
    def name(self) -> str:
        """The last part of the target."""
        return self.target.rpartition(".")[2]

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


def load_ours(path: str) -> Callable[[], Any]:
    """Return a builder of the object at this path in our package."""
    return lambda: resolve(f"sglang_dflash.{path}")[1]


def call_ours(path: str) -> Callable[[], Any]:
    """Return a builder that calls our function at this path."""
    return lambda: load_ours(path)()()


def wrapping(target: str, ours: str, **fields: Any) -> Patch:
    """Make a patch of a function by ours, which gets SGLang's as its first argument.

    Args:
        target: as of `Patch`.
        ours: path of our function in our package.
        fields: others of `Patch`.
    """

    def build() -> Any:
        original, wrapper = resolve(target)[1], load_ours(ours)()  # another plugin's wrapper stays
        if getattr(original, "wrapper", None) is wrapper:  # a second server in this process
            return original

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        wrapped.wrapper = wrapper  # type: ignore[attr-defined]
        return wrapped

    return Patch(target=target, build=build, **fields)


def release_numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, for sorting.

    A version without any is the newest.
    """
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers) or (2**31,)


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


def relevant(patches: Sequence[Patch]) -> list[Patch]:
    """List the patches that this machine and this release of SGLang need."""
    version = installed_version()
    is_on_cpu = environ.serves_on_stand_in()
    return [each for each in patches if (is_on_cpu or not each.cpu_only) and each.is_needed_on(version)]


def install(table: Sequence[Patch]) -> list[tuple[Any, Any]]:
    """Check all patches of a table, then apply them in this process.

    Returns:
        The old and the new value of every name of a module. Other modules may have imported it.

    Raises:
        Mismatch: A required patch cannot be made. Then no patch of the table is made.
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


def missing_features(patches: Sequence[Patch]) -> dict[str, str]:
    """Return the features that lack a target, with the reasons.

    Raises:
        Mismatch: A required patch lacks its target.
    """
    missing: dict[str, str] = {}
    for patch in patches:
        try:
            check(patch)
        except Mismatch as mismatch:
            if patch.feature is None:
                raise
            missing.setdefault(patch.feature, str(mismatch))
    return missing
