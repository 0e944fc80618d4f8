"""A change to SGLang, and what the tables of changes are written with."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change to SGLang.

    Kinds: "around" (wrap a method), "replace" (rebind a name), "class" (rebind a class).
    """

    target: str  # dotted path of a callable
    why: str
    build: Callable[[], Any]  # returns the hook or the new value, when the change is applied: imports wait
    kind: str = "replace"
    # SGLang's state in which the change is no longer needed. What is proposed there: a link, or our text.
    remove_when: str
    upstream: str
    # The first release of SGLang that does not need it. None: every supported release does.
    until: str | None = None
    # What is off if the target is missing or has changed. None: DFLASH cannot be served without the change.
    feature: str | None = None
    # The target's parameters; of a class only those that SGLang passes. None if unknown.
    signature: str | None = None
    # Other parameters that a supported SGLang has here, which the hook takes too.
    also: str | None = None
    cpu_only: bool = False

    @property
    def name(self) -> str:
        """The last part of the target."""
        return self.target.rpartition(".")[2]

    @property
    def parameters(self) -> list[str]:
        """The names in the signature."""
        return _names(self.signature)

    def is_needed_on(self, version: str) -> bool:
        """Tell whether this release of SGLang needs the change."""
        return self.until is None or release_numbers(version) < release_numbers(self.until)

    def accepts(self, parameters: list[str]) -> bool:
        """Tell whether a target with these parameters is the one that the change was written for."""
        if self.signature is None:
            return True
        if self.kind == "class":
            return set(self.parameters) <= set(parameters)
        return parameters in [_names(one) for one in (self.signature, self.also) if one is not None]


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


def _names(signature: str | None) -> list[str]:
    return [name for name in (signature or "").strip("()").split(", ") if name]


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


def our_object(path: str) -> Callable[[], Any]:
    """Return a builder of the object at this path in our package."""
    return lambda: resolve(f"sglang_dflash.{path}")[1]


def made_by(path: str) -> Callable[[], Any]:
    """Return a builder that calls our function at this path."""
    return lambda: our_object(path)()()


CpuChange = functools.partial(Change, cpu_only=True)

# Features that need several changes: if one of them does not fit, none is made.
RECURRENT = "targets with recurrent states on a CPU"
SPEED = "faster operators on a CPU"
RECURRENT_WIDTH = "adaptive width for targets with recurrent states"
