"""Try the unpacked packages on a GPU, a line per part, in about 20 seconds.

    . ~/gpu-env/env.sh && python3 benchmark/gpu/offline/smoke.py --fa3 64 128 256

Exit status: the number of parts that failed.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable

TOLERANCE = 2e-2  # relative, of bfloat16 attention


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fa3", type=int, nargs="*", default=[64, 128, 256], help="head sizes to try")
    args = parser.parse_args()
    parts: list[tuple[str, Callable[[], object]]] = [
        (f"import {name}", lambda name=name: importlib.import_module(name))
        for name in ("torch", "triton", "flashinfer", "sgl_kernel", "sglang.launch_server", "sglang_dflash")
    ]
    parts += [("matrix product", multiply), ("profiler", profile_gpu)]
    parts += [(f"FlashAttention 3, heads of {size}", lambda size=size: attend(size)) for size in args.fa3]
    return sum(not succeeds(name, work) for name, work in parts)


def succeeds(name: str, work: Callable[[], object]) -> bool:
    """Run a part and print its line; a broken library may raise anything."""
    begun, said = time.perf_counter(), "PASS"
    try:
        work()
    except BaseException as error:
        said = f"FAIL {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(f"{time.perf_counter() - begun:6.1f} s  {name}: {said}", flush=True)
    return said == "PASS"


def multiply() -> None:
    import torch

    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    _compare(a @ a, a.float() @ a.float())


def profile_gpu() -> None:
    """Record a kernel: the profiler needs CUPTI."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        multiply()
        torch.cuda.synchronize()
    if not any(event.device_type.name == "CUDA" for event in recorded.events()):
        raise RuntimeError("no kernel in the trace")


def attend(head_size: int) -> None:
    """Attend 16 queries to 512 keys, causally, with 8 query heads on 2 of keys."""
    import torch

    attention = importlib.import_module("sgl_kernel.flash_attn")

    def random(*shape: int):
        return torch.randn(*shape, head_size, device="cuda", dtype=torch.bfloat16)

    q, k, v = random(1, 16, 8), random(1, 512, 2), random(1, 512, 2)
    lengths = torch.tensor([512], dtype=torch.int32, device="cuda")
    found = attention.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
    queries, keys, values = (x[0].float().transpose(0, 1) for x in (q, k, v))
    keys, values = (x.repeat_interleave(4, dim=0) for x in (keys, values))
    scores = queries @ keys.transpose(1, 2) * head_size**-0.5
    rows, columns = torch.arange(16, device="cuda"), torch.arange(512, device="cuda")
    scores.masked_fill_(columns > rows[:, None] + 512 - 16, float("-inf"))
    _compare(found[0].transpose(0, 1), scores.softmax(-1) @ values)


def _compare(found, wanted) -> None:
    error = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
    if not error < TOLERANCE:
        raise AssertionError(f"relative error {error:.3g}")


if __name__ == "__main__":
    sys.exit(main())
