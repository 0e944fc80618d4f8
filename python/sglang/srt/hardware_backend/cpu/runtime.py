"""CPU runtime for the CUDA build of SGLang on a machine without a GPU.

`pip install sglang` brings the CUDA build of `sgl_kernel`, which cannot be loaded without `libcuda.so.1`, so
SGLang cannot even be imported there. `activate` puts a stand-in package of the same name first on `sys.path`
(spawned children inherit the path) and selects SGLang's own CPU engine.
"""

import ctypes
import gc
import importlib.metadata
import logging
import os
import sys
from typing import Any

from sglang_dflash.srt import environ
from sglang_dflash.srt.environ import STAND_IN_DIR

logger = logging.getLogger(__name__)

CPU_ENGINE_SWITCH = "SGLANG_USE_CPU_ENGINE"  # read by sglang.srt.utils.common.is_cpu
# Read by libgomp, PyTorch's OpenMP, when a process loads it.
SPIN_VARIABLE, SPIN_COUNT = "GOMP_SPINCOUNT", "3000"
COMPILE_SWITCH = "TORCH_COMPILE_DISABLE"  # read by torch._dynamo
# Container objects made between two collections. Python's 700 take 1 s of the 9 s that SGLang's imports need.
COLLECTION_THRESHOLD = 10_000


def needs_stand_in() -> bool:
    """Return whether `sgl_kernel` is the CUDA build and no CUDA driver can load it."""
    return has_cuda_kernels() and not can_load("libcuda.so.1") and not has_other_accelerator()


def activate() -> None:
    """Select the CPU engine and the stand-in kernels for this process and its children.

    Every process also skips what its imports do not need, unless a user has chosen otherwise.
    """
    # torch.compile needs a C++ compiler, which a machine may lack; SGLang compiles a few helpers on any
    # device.
    if os.environ.setdefault(COMPILE_SWITCH, "1") == "1":
        skip_compiling()
    threshold, *older = gc.get_threshold()
    if 0 < threshold < COLLECTION_THRESHOLD:  # not if a user has turned collections off, or has fewer
        gc.set_threshold(COLLECTION_THRESHOLD, *older)
    if environ.serves_on_stand_in():  # a child, which inherited the switch and the path
        return
    os.environ[CPU_ENGINE_SWITCH] = "1"
    _bound_openmp_spin()
    sys.path.insert(0, STAND_IN_DIR)
    logger.warning(
        "sglang-dflash: no CUDA driver on this machine; "
        "serving on the CPU with PyTorch stand-ins for sgl_kernel."
    )


def skip_compiling() -> None:
    """Let `torch.compile` return functions unchanged, without imports of inductor.

    TORCH_COMPILE_DISABLE also leaves functions unchanged, but imports inductor: 0.8 s in each process.
    """
    import torch

    def compile(model: Any = None, **options: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = compile


def _bound_openmp_spin() -> None:
    """Limit the busy waiting of OpenMP threads in child processes to microseconds.

    libgomp's default is milliseconds: if another process uses the same cores, a waiting thread then keeps the
    one it waits for from running. Sleeping at once costs a wake-up per operator on an idle machine
    (benchmark/results/openmp-wait.md). A value that the user has set stays.
    """
    if not {"OMP_WAIT_POLICY", SPIN_VARIABLE} & os.environ.keys():
        os.environ[SPIN_VARIABLE] = SPIN_COUNT


def has_cuda_kernels() -> bool:
    return any(importlib.metadata.distributions(name="sglang-kernel"))


def can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def has_other_accelerator() -> bool:
    # SGLang imports torch before it resolves the platform, so this import costs nothing.
    import torch

    return torch.version.hip is not None or torch.xpu.is_available() or torch.backends.mps.is_available()
