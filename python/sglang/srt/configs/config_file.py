"""A checkpoint's config.json as JSON, from a directory or the hub."""

import json
import os
from typing import Any

NAME = "config.json"


def find_config(checkpoint: str, revision: str | None = None, name: str = NAME) -> str | None:
    """Return the path of a file in a directory or hub repository, or None."""
    from transformers.utils import cached_file

    if os.path.isfile(checkpoint) or "://" in checkpoint:
        return None
    folder = os.path.expanduser(checkpoint)
    local = os.path.join(folder, name)
    if os.path.isdir(folder):
        return local if os.path.isfile(local) else None
    try:
        return cached_file(checkpoint, name, revision=revision)
    except OSError:
        return None


def read_object(path: str) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError, in one line, for a file without one."""
    name = os.path.basename(path)
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} must hold an object, this is a {type(value).__name__}")
    return value


def read_config(checkpoint: str | None, revision: str | None) -> dict[str, Any] | None:
    """Read a checkpoint's config.json, or None if it cannot be read, which others report."""
    path = None if checkpoint is None else find_config(checkpoint, revision)
    if path is None:
        return None
    try:
        return read_object(path)
    except ValueError:
        return None
