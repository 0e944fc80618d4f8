"""Look-up of objects by dotted path."""

import importlib
from typing import Any


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
