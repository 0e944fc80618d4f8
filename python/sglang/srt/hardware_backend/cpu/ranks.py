"""More than one rank on the CPU: what SGLang asks for, and what of it a machine without a GPU cannot give."""

import os
from itertools import pairwise
from typing import Any

THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
NUM_THREADS = "OMP_NUM_THREADS"


def prepare_ranks(args: Any) -> None:
    """Give every rank CPUs and threads of its own, in the environment that the ranks inherit. What the user
    has set stays.

    SGLang wants to be told the CPUs of each rank where there are more of them than NUMA nodes. With the
    stand-in kernels it does not bind anything to them."""
    ranks = args.tp_size * args.pp_size * args.dp_size
    if ranks == 1:
        return
    cpus = sorted(os.sched_getaffinity(0))
    # A rank looks itself up by the number of its device.
    devices = args.base_gpu_id + args.gpu_id_step * ranks
    os.environ.setdefault(THREADS_BIND, "|".join(groups_of_cpus(cpus, devices)))
    # PyTorch would start as many threads as there are CPUs in every rank, to wait for each other.
    os.environ.setdefault(NUM_THREADS, str(max(1, len(cpus) // ranks)))


def groups_of_cpus(cpus: list[int], count: int) -> list[str]:
    """`count` lists of CPUs, as even as can be; each CPU several times where there are fewer of them."""
    if len(cpus) < count:
        return [str(cpus[i % len(cpus)]) for i in range(count)]
    bounds = [len(cpus) * i // count for i in range(count + 1)]
    return [",".join(map(str, cpus[start:stop])) for start, stop in pairwise(bounds)]


def find_nccl_library() -> str:
    """In the place of SGLang's, which finds the library that came with PyTorch's CUDA build; made with it, a
    communicator wants a CUDA device. Without one SGLang goes through `torch.distributed`."""
    raise OSError("no CUDA driver on this machine: ranks talk through gloo")
