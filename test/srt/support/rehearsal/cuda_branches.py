"""Our own modules on the branches that they take on CUDA.

Their `is_cuda` answers as it does for CUDA.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import SourceFileLoader

PACKAGE = "sglang_dflash."
BRANCHING = ("sglang_dflash.kernels", "sglang_dflash.srt.models", "sglang_dflash.srt.speculative")


class _Swapped(SourceFileLoader):
    def get_code(self, fullname):
        # Not from the bytecode cache, which holds the source as it is.
        source = self.get_source(fullname)
        source = (
            source.replace(".is_cuda", ".is_?").replace(".is_cpu", ".is_cuda").replace(".is_?", ".is_cpu")
        )
        return compile(source, self.path, "exec")


class _Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if not name.startswith(PACKAGE):
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Swapped(name, spec.loader.path)
        return spec


def install() -> None:
    """Install the import hook, before any module with such a branch is imported."""
    late = [name for name in sys.modules if name.startswith(BRANCHING)]
    assert not late, late
    sys.meta_path.insert(0, _Finder())
