"""Environment variables that are on or off."""

import os


def is_on(variable: str) -> bool:
    """Off where it is empty or not set. Raises ValueError for what is neither 1 nor 0."""
    value = os.environ.get(variable) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{variable} is 1 or 0, got {value!r}.")
    return value == "1"
