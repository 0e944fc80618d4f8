"""Time float32 `linear` by PyTorch's own choice (MKL) and by oneDNN, on one thread.

    python benchmark/float32_linear.py

Shapes are the bundled target's and others. Prints microseconds of thread time, the least of several
repetitions, and the ratio.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

SHAPES = ((512, 256), (1024, 256), (256, 512), (2048, 2048))  # out, in features
ROWS = (1, 8, 16, 64, 128, 384)


def microseconds(run: Callable[[], torch.Tensor], calls: int = 12, repetitions: int = 8) -> float:
    run()
    shortest = float("inf")
    for _ in range(repetitions):
        start = time.thread_time()
        for _ in range(calls):
            run()
        shortest = min(shortest, (time.thread_time() - start) / calls)
    return 1e6 * shortest


def main() -> None:
    torch.set_num_threads(1)
    print("| rows | out x in | MKL, us | oneDNN, us | ratio |\n|---:|---:|---:|---:|---:|")
    for rows in ROWS:
        for out_features, in_features in SHAPES:
            x, weight = torch.randn(rows, in_features), torch.randn(out_features, in_features)
            mkl = microseconds(partial(torch.nn.functional.linear, x, weight))
            pointwise = partial(torch.ops.mkldnn._linear_pointwise, x, weight, None, "none", [], "")
            onednn = microseconds(pointwise)
            cells = (
                f"{rows} | {out_features} x {in_features} | {mkl:.0f} | {onednn:.0f} | {mkl / onednn:.2f}x"
            )
            print(f"| {cells} |", flush=True)


if __name__ == "__main__":
    main()
