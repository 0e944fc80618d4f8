"""A checkpoint's config.json as JSON, from a directory or the hub."""

import json
import os
from typing import Any

NAME = "config.json"


def find_config(checkpoint: str, revision: str | None = None) -> str | None:
    """Where it lies; None where there is none, and of what is neither a directory nor a hub id."""
    from transformers.utils import cached_file

    if os.path.isfile(checkpoint) or "://" in checkpoint:
        return None
    local = os.path.join(os.path.expanduser(checkpoint), NAME)
    if os.path.isfile(local):
        return local
    try:
        return cached_file(checkpoint, NAME, revision=revision)
    except OSError:
        return None


def read_object(path: str) -> dict[str, Any]:
    """Raises ValueError, in one line, for a file that cannot be read or holds no JSON object."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise ValueError(f"{os.path.basename(path)} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.path.basename(path)} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{os.path.basename(path)} must hold an object, this is a {type(value).__name__}")
    return value
