"""Changes to modules that a server has not imported yet.

Used by the `sitecustomize.py` files that benchmarks and tests put on a server's PYTHONPATH.
"""

import sys
from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from types import ModuleType


class _Watch(MetaPathFinder):
    def __init__(self, changes: Mapping[str, Callable[[ModuleType], None]]):
        self._changes = dict(changes)

    def find_spec(self, name, path=None, target=None):
        change = self._changes.pop(name, None)
        if change is None:
            return None
        spec = find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


def after_import(changes: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Call each change once with its module, by the module's name, right after its import."""
    sys.meta_path.insert(0, _Watch(changes))
