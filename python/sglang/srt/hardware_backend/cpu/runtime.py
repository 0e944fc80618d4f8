"""Let the CUDA build of SGLang run on a machine that has no GPU.

`pip install sglang` brings the CUDA build of `sgl_kernel`, which cannot be loaded without `libcuda.so.1`,
so SGLang does not even import there. `activate` puts a stand-in package of the same name first on
`sys.path` (spawned children inherit the path) and selects SGLang's own CPU engine.
"""

import ctypes
import importlib.metadata
import logging
import os
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

STAND_IN_DIR = str(Path(__file__).parent / "stand_in")
CPU_ENGINE_SWITCH = "SGLANG_USE_CPU_ENGINE"  # read by sglang.srt.utils.common.is_cpu
SPIN_VARIABLE, SPIN_COUNT = (
    "GOMP_SPINCOUNT",
    "3000",
)  # read by libgomp, PyTorch's OpenMP, when a process loads it


def needs_stand_in() -> bool:
    """True where the installed `sgl_kernel` is the CUDA build and there is no CUDA driver to load it with."""
    return _has_cuda_kernels() and not _can_load("libcuda.so.1") and not _has_other_accelerator()


def activate() -> None:
    """Select the CPU engine and the stand-in kernels for this process and every child it spawns."""
    if is_active():  # a child: the switch and the path came with it
        return
    os.environ[CPU_ENGINE_SWITCH] = "1"
    # torch.compile wants a C++ compiler, which a plain machine may lack; SGLang compiles a few helpers for
    # any device.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    _bound_openmp_spin()
    sys.path.insert(0, STAND_IN_DIR)
    logger.warning(
        "sglang-dflash: no CUDA driver on this machine; serving on the CPU with PyTorch stand-ins for sgl_kernel."
    )


def _bound_openmp_spin() -> None:
    """Have the threads of the processes started from here wait for each other for some microseconds before
    they sleep.

    libgomp's own choice is milliseconds, in which a thread that waits keeps the one it waits for from running
    where another process is busy on the same cores; sleeping at once costs a wake-up per operator on an idle
    machine (benchmark/openmp_wait.py, benchmark/results/openmp-wait.md). Who has set either variable has
    chosen."""
    if not {"OMP_WAIT_POLICY", SPIN_VARIABLE} & os.environ.keys():
        os.environ[SPIN_VARIABLE] = SPIN_COUNT


def is_active() -> bool:
    """Whether this process runs on the stand-in."""
    return STAND_IN_DIR in sys.path


def _has_cuda_kernels() -> bool:
    try:
        importlib.metadata.distribution("sglang-kernel")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _has_other_accelerator() -> bool:
    # SGLang has imported torch before it resolves its platform; importing it here costs nothing.
    import torch

    return torch.version.hip is not None or torch.xpu.is_available() or torch.backends.mps.is_available()
