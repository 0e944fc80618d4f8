"""Values of JSON: tests of their types, and a short text of each for messages."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard


def short_repr(value: Any) -> str:
    """Return the value's `repr`, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def is_int(value: Any) -> TypeGuard[int]:
    """Return True for an integer of JSON, which its booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return True for a finite number of JSON."""
    return is_int(value) and abs(value) < 2**63 or isinstance(value, float) and math.isfinite(value)


def as_object(value: Any) -> Mapping[str, Any]:
    """Return an object of JSON; an empty one for any other value."""
    return value if isinstance(value, Mapping) else {}


def first_name(architectures: Any) -> str | None:
    """Return the first of a config's `architectures`; None if they are no list of names."""
    is_named = isinstance(architectures, list) and architectures and isinstance(architectures[0], str)
    return architectures[0] if is_named else None
