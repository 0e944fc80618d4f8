"""Field types and error messages that the configs share."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_LAYERS = 10_000  # far beyond any model; keeps a garbled config from being allocated for
MAX_PROBLEMS = 20  # shown

Positive = Annotated[int, Field(ge=1)]
NumLayers = Annotated[int, Field(ge=1, le=MAX_LAYERS)]
LayerIds = Annotated[tuple[int, ...], Field(min_length=1, strict=False)]  # a list in JSON

# Pydantic's types of errors in the words of JSON.
_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "a non-empty list",
    "dict_type": "an object",
    "model_type": "an object",
}


class DraftConfigError(ValueError):
    """A draft checkpoint that cannot be served. The message names up to MAX_PROBLEMS faults."""

    def __init__(self, checkpoint: str, problems: Sequence[str]):
        self.problems = tuple(problems)
        listed = [*problems[:MAX_PROBLEMS]]
        if len(problems) > len(listed):
            listed.append(f"and {len(problems) - len(listed)} more")
        super().__init__(f"DFLASH draft {checkpoint!r} cannot be served:\n  - " + "\n  - ".join(listed))


class StrictModel(BaseModel):
    """A frozen model of JSON: no conversions between types, no infinity or NaN."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, validate_default=True)


def shown(value: Any) -> str:
    """Return the value's `repr`, at most 80 characters of it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def problems_of(error: ValidationError, where: str = "", names: Mapping[str, str] | None = None) -> list[str]:
    """List what is wrong, a line for each field.

    Args:
        error: of one model.
        where: prefix for the fields' names.
        names: names of fields in the file, if they differ.
    """
    problems = []
    for fault in error.errors(include_url=False):
        first, *rest = map(str, fault["loc"])
        name = where + ".".join(((names or {}).get(first, first), *rest))
        kind = fault["type"]
        if kind == "missing":
            problems.append(f"{name} is missing")
        elif kind == "value_error":  # raised by a validator of ours
            problems.append(f"{name} {fault['ctx']['error']}")
        else:
            message = re.sub(r"^\w+ should", "must", fault["msg"])
            wanted = f"must be {_WANTED[kind]}" if kind in _WANTED else message
            problems.append(f"{name} {wanted}, got {shown(fault['input'])}")
    return problems
