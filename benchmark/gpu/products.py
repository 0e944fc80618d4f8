"""Matrix products of Qwen3-8B by rows, and the memory's bandwidth. Imports no SGLang.

A CPU gets small products, whose figures mean nothing.
"""

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

LAYER = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 24_576), "down": (12_288, 4096)}
HEAD = (4096, 151_936)  # like LAYER: columns of the input and of the product
ROWS, HEAD_ROWS = (1, 16, 128, 256, 384, 768, 1536), (15, 240, 720)
COSTLY = 1.25  # times what 16 rows take: from there rows cost
CACHE = 1 << 28  # bytes, above any GPU's cache: weights of a layer come from memory in serving too
REPEATS = 20


def milliseconds(calls: Sequence[Callable[[], Any]], device: str) -> float:
    """Return the median time of a call. The calls take turns, so that no weight stays in the cache."""

    def take_turns() -> None:
        for call in calls:
            call()

    take_turns()
    if device == "cpu":
        moments = [time.perf_counter()]
        for _ in range(3):
            take_turns()
            moments.append(time.perf_counter())
        times = [1000 * (after - before) for before, after in itertools.pairwise(moments)]
    else:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()  # as in serving: no waits for launches
        with torch.cuda.graph(graph):
            take_turns()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        times = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return statistics.median(times) / len(calls)


def bandwidth(device: str) -> dict:
    source = torch.zeros(1 << (31 if device == "cuda" else 24), dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    ms = milliseconds([lambda: copy.copy_(source)], device)
    return {"GB/s": round(2 * source.nbytes / ms / 1e6, 1)}


def product(multiply: Sequence[Callable[[torch.Tensor], Any]], rows: int, shape: tuple[int, int]) -> dict:
    """Measure products of `rows` rows. The functions do the same with other weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(rows, shape[0], device=device, dtype=torch.bfloat16)
    ms = milliseconds([functools.partial(one, x) for one in multiply], device)
    return {"ms": round(ms, 4), "TFLOP/s": round(2 * rows * shape[0] * shape[1] / ms / 1e9, 3)}


def measure_products(report: Any, device: str) -> None:
    """Measure a layer's products and the head's by rows, and print what they decide."""
    shrink = 1 if device == "cuda" else 16

    def weights(shape: tuple[int, int], most: int) -> tuple[tuple[int, int], list[torch.Tensor]]:
        columns, outputs = shape[0] // shrink, shape[1] // shrink
        count = min(most, math.ceil(CACHE / (2 * columns * outputs)))
        options = dict(device=device, dtype=torch.bfloat16)
        return (columns, outputs), [torch.randn(outputs, columns, **options) for _ in range(count)]

    for name, shape in LAYER.items():
        shape, copies = weights(shape, most=8)
        linears = [functools.partial(F.linear, weight=weight) for weight in copies]
        for rows in ROWS:
            report.take("products", f"{name}, {rows} rows", functools.partial(product, linears, rows, shape))
    shape, (weight,) = weights(HEAD, most=1)

    def fp8_product(rows: int) -> dict:
        from sglang_dflash.srt.layers.fp8_head import Fp8Head

        return product([Fp8Head(SimpleNamespace(weight=weight))], rows, shape)

    for rows in HEAD_ROWS:
        linear = [functools.partial(F.linear, weight=weight)]
        report.take("head", f"bf16, {rows} rows", functools.partial(product, linear, rows, shape))
        report.take("head", f"FP8, {rows} rows", functools.partial(fp8_product, rows))

    def ratios() -> dict:
        ms = {name: figure["ms"] for name, figure in report.figures["head"].items()}
        return {f"{n} rows": round(ms[f"bf16, {n} rows"] / ms[f"FP8, {n} rows"], 2) for n in HEAD_ROWS}

    def costly() -> dict:
        ms = {name: figure["ms"] for name, figure in report.figures["products"].items()}
        return {"from rows": rows_that_cost({n: sum(ms[f"{of}, {n} rows"] for of in LAYER) for n in ROWS})}

    report.take("verdict", "FP8 head, times as fast as bf16", ratios)
    report.take("verdict", f"a layer's products take {COSTLY} x those of 16 rows", costly)


def rows_that_cost(ms: dict[int, float]) -> float | None:
    """Return the rows at which `ms`, by rows, reaches COSTLY x that of 16 rows; None: not in the table."""
    limit, rows = COSTLY * ms[16], sorted(n for n in ms if n >= 16)
    for few, many in itertools.pairwise(rows):
        if ms[many] >= limit:
            return round(few + (many - few) * (limit - ms[few]) / (ms[many] - ms[few]))
    return None
