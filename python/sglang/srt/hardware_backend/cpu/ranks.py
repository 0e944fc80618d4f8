"""Several ranks on a CPU: CPU binding, thread counts, and no NCCL."""

import os
from itertools import pairwise
from typing import Any

THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
NUM_THREADS = "OMP_NUM_THREADS"


def prepare_ranks(args: Any) -> None:
    """Set CPUs and threads of every rank in the inherited environment; the user's values stay.

    SGLang requires the CPUs of each rank if there are more ranks than NUMA nodes. With the stand-in kernels
    it binds nothing to them.
    """
    ranks = args.tp_size * args.pp_size * args.dp_size
    if ranks == 1:
        return
    cpus = sorted(os.sched_getaffinity(0))
    # A rank's entry is indexed by its device number.
    devices = args.base_gpu_id + args.gpu_id_step * ranks
    os.environ.setdefault(THREADS_BIND, "|".join(groups_of_cpus(cpus, devices)))
    # PyTorch would start a thread per CPU in every rank, and they would wait for each other.
    os.environ.setdefault(NUM_THREADS, str(max(1, len(cpus) // ranks)))


def groups_of_cpus(cpus: list[int], count: int) -> list[str]:
    """Split CPUs into `count` even lists; CPUs repeat if there are fewer than `count`."""
    if len(cpus) < count:
        return [str(cpus[i % len(cpus)]) for i in range(count)]
    bounds = [len(cpus) * i // count for i in range(count + 1)]
    return [",".join(map(str, cpus[start:stop])) for start, stop in pairwise(bounds)]


def find_nccl_library() -> str:
    """Report that there is no NCCL: its communicators need a CUDA device, unlike gloo."""
    raise OSError("no CUDA driver on this machine: ranks talk through gloo")
