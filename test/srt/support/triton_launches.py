"""Triton kernel launches, recorded and compiled for GPUs that need not be present."""

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import create_function_from_signature

ARCHITECTURES = (80, 90, 100)  # CUDA compute capabilities, times ten


class Launch:
    """A stand-in for a kernel that records its launch, to compile exactly that variant."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self._record

    def _record(self, *arguments, **keywords) -> None:
        self.arguments, self.keywords = arguments, keywords

    def compile(self, arch: int):
        """Compile the recorded launch as Triton does at the first launch."""
        target, backend, bound, specialization, options = self._bind(arch)
        options, signature, constants, attributes = self.kernel._pack_args(
            backend, dict(self.keywords), bound, specialization, options
        )
        source = ASTSource(self.kernel, signature, constants, attributes)
        return compile(source, target=target, options=options.__dict__)

    def variant(self, arch: int = 90) -> str:
        """Return Triton's key of the recorded launch: another key is compiled anew."""
        *_, specialization, options = self._bind(arch)
        return f"{specialization} {options}"

    def _bind(self, arch: int):
        target = GPUTarget("cuda", arch, 32)
        backend = make_backend(target)
        bind = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        return target, backend, *bind(*self.arguments, **self.keywords)
