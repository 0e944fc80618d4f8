"""Figures of a GPU with torch and Triton alone: no SGLang, no FlashInfer, nothing installed.

    python benchmark/gpu/bare.py --out FOLDER

It measures the memory's bandwidth and, by rows, the matrix products of a layer of Qwen3-8B and of its head in
bf16 and FP8. FOLDER/bare.json has every figure as soon as it is measured. One that fails is a line with its
error, and the next one follows. Without CUDA products are small, and their figures mean nothing.

Exit status: 0 all well; 1 something failed.
"""

import argparse
import json
import statistics
import sys
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, benchmark/ is not on the path

from gpu.state import source_fingerprint, versions, write  # noqa: E402

LAYER = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 24_576), "down": (12_288, 4096)}
HEAD = (4096, 151_936)  # like LAYER: columns of the input and of the product
ROWS, HEAD_ROWS = (1, 16, 128, 256, 384, 768, 1536), (15, 240, 720)
COPIES = 4  # of a layer's weights, 1.5 GB: they come from memory in serving too, not from a cache
FP8 = torch.float8_e4m3fn
DEVICE, SHRINK = ("cuda", 1) if torch.cuda.is_available() else ("cpu", 64)


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the median time of a run, launched as one CUDA graph as in serving."""
    if DEVICE == "cuda":
        return triton.testing.do_bench_cudagraph(run, return_mode="median")
    return 1e3 * statistics.median(timeit.repeat(run, number=1, repeat=3))


def bandwidth() -> dict:
    source = torch.zeros((1 << 31) // SHRINK, dtype=torch.uint8, device=DEVICE)
    copy = torch.empty_like(source)
    return {"GB/s": round(2 * source.nbytes / milliseconds(lambda: copy.copy_(source)) / 1e6, 1)}


def random_matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16)


def products(weights: Sequence[torch.Tensor], rows: int, copies: int) -> dict:
    """Multiply `rows` rows by each weight [columns, inputs]. The result is of one copy of all."""
    inputs = {weight.shape[1]: random_matrix(rows, weight.shape[1]) for weight in weights}

    def multiply() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    ms = milliseconds(multiply) / copies
    flops = 2 * rows * sum(weight.numel() for weight in weights) / copies
    return {"ms": round(ms, 4), "TFLOP/s": round(flops / ms / 1e9, 3)}


def fp8_product(head: torch.Tensor, rows: int) -> dict:
    """Quantize `rows` rows and multiply them by an FP8 copy of the head, with scales by row of both."""
    scale = torch.ones(len(head), 1, device=DEVICE)
    copy, inputs = head.to(FP8), random_matrix(rows, head.shape[1])

    def multiply() -> torch.Tensor:
        scales = inputs.abs().amax(dim=1, keepdim=True).float() / torch.finfo(FP8).max
        quantized = (inputs / scales).to(FP8)
        return torch._scaled_mm(quantized, copy.t(), scales, scale.t(), out_dtype=torch.bfloat16)

    return {"ms": round(milliseconds(multiply), 4)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of bare.json")
    out, has_failed = parser.parse_args().out, False
    machine = torch.cuda.get_device_name() if DEVICE == "cuda" else "a CPU: figures mean nothing on a CPU"
    figures: dict = {"machine": machine, "versions": versions(), "source": source_fingerprint()}
    print(f"{machine}; torch {torch.__version__}", flush=True)
    layer = [random_matrix(n // SHRINK, k // SHRINK) for k, n in [*LAYER.values()] * COPIES]
    head = random_matrix(HEAD[1] // SHRINK, HEAD[0] // SHRINK)
    steps = {"copy": bandwidth}
    steps |= {f"a layer, {rows} rows": partial(products, layer, rows, COPIES) for rows in ROWS}
    for rows in HEAD_ROWS:
        steps[f"head in bf16, {rows} rows"] = partial(products, [head], rows, 1)
        steps[f"head in FP8, {rows} rows"] = partial(fp8_product, head, rows)
    for name, measure in steps.items():
        try:
            figures[name] = measure()
        except Exception as error:  # recorded, shown, and in the exit status
            figures[name] = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            has_failed = True
        print(f"{name}: {', '.join(f'{key} {value}' for key, value in figures[name].items())}", flush=True)
        write(out / "bare.json", json.dumps(figures, indent=1) + "\n")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
