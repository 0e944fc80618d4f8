"""A cursor over the fields of a config.json, and the error that names all faults."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_dflash.srt.configs.json_values import is_int, is_number, short_repr

MAX_LAYERS = 10_000  # far beyond any model; keeps a garbled config from being allocated for
MAX_PROBLEMS = 20  # shown
Shapes = dict[str, tuple[int, ...]]


class DraftConfigError(ValueError):
    """A draft checkpoint that cannot be served. The message names up to MAX_PROBLEMS faults."""

    def __init__(self, checkpoint: str, problems: Sequence[str]):
        self.problems = tuple(problems)
        more = len(problems) - MAX_PROBLEMS
        shown = [*problems[:MAX_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
        super().__init__("\n  - ".join([f"DFLASH draft {checkpoint!r} cannot be served:", *shown]))


REQUIRED: Any = object()  # in place of a default
# Types of JSON, in Python's words: what a message calls one, and the test of a value.
_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: ("an integer", is_int),
    float: ("a number", is_number),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("a string", lambda value: isinstance(value, str)),
    list: ("a list", lambda value: isinstance(value, list | tuple)),
    dict: ("an object", lambda value: isinstance(value, dict)),
}
# Limits of a number: what a message calls one, and the test of a value.
_LIMITS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": ("greater than or equal to", operator.ge),
    "above": ("greater than", operator.gt),
    "most": ("less than or equal to", operator.le),
}


class Fields:
    """A cursor over an object of config.json.

    A reader takes one field after another. Each fault becomes a line of `problems`, so that one error names
    all of them, and the field reads as None. Null is the same as absent.

    Attributes:
        values: the object.
        problems: shared with the cursors of the objects inside.
        where: the place of the object in the file, with a dot behind it. Empty for the file itself.
        names: the fields that were taken.
    """

    def __init__(self, values: Mapping[str, Any], problems: list[str], where: str = ""):
        self.values, self.problems, self.where = values, problems, where
        self.names: set[str] = set()

    def find(self, name: str) -> Any:
        """Return what a field holds, unchecked."""
        return self.values.get(name)

    def fault(self, name: str, text: str) -> None:
        self.problems.append(f"{self.where}{name} {text}")

    def take(self, name: str, kind: type, default: Any = REQUIRED, **limits: Any) -> Any:
        """Return the value of a field, or `default` if it is absent.

        Args:
            name: of the field.
            kind: its type in JSON. An integer is a number too.
            default: not checked. Without one the field must be there.
            limits: `least`, `above` or `most` of a number; `one_of`, if the possible values are few.
        """
        self.names.add(name)
        if (value := self.find(name)) is not None:
            return self.check(name, value, kind, **limits)
        if default is REQUIRED:
            self.fault(name, "is missing")
        return None if default is REQUIRED else default

    def take_list(self, name: str, kind: type, default: Any = REQUIRED, **limits: Any) -> Any:
        """Return a field that lists values, at least one. The arguments are those of `take`."""
        values = self.take(name, list, default)
        if values is None or values is default:
            return values
        if not values:
            self.fault(name, f"must be a non-empty list, got {values!r}")
        found = [self.check(f"{name}.{place}", value, kind, **limits) for place, value in enumerate(values)]
        return None if None in found else found or None

    def check(self, name: str, value: Any, kind: type, one_of: Sequence[Any] = (), **limits: float) -> Any:
        """Return a value; None, with a fault, if it is not as `take` describes."""
        wanted, is_kind = _KINDS[kind]
        if one_of:
            *others, last = map(repr, one_of)
            wanted = f"{', '.join(others)} or {last}" if others else last
        if is_kind(value) and (not one_of or value in one_of):
            missed = [limit for limit in limits if not _LIMITS[limit][1](value, limits[limit])]
            if not missed:
                return value
            wanted = f"{_LIMITS[missed[0]][0]} {limits[missed[0]]}"
        self.fault(name, f"must be {wanted}, got {short_repr(value)}")
        return None

    def take_object(self, name: str, default: Any = REQUIRED) -> "Fields":
        """Return a cursor over a field that is an object; one without fields if it is not."""
        value = self.take(name, dict, default)
        problems = self.problems if value is not None else []
        return Fields(value or {}, problems, f"{self.where}{name}.")

    def raise_problems(self, checkpoint: str) -> None:
        """Raise DraftConfigError if there are faults."""
        if self.problems:
            raise DraftConfigError(checkpoint, self.problems)


def names_taken(read: Callable[[Fields], Any]) -> set[str]:
    """Return the fields that a reader takes, by letting it read nothing."""
    fields = Fields({}, [])
    read(fields)
    return fields.names
