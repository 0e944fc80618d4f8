"""float32 `linear` by PyTorch's own choice (MKL) and by oneDNN, one thread, at the bundled target's shapes
and others.

    python benchmark/float32_linear.py

Prints microseconds of thread time, the best of several repetitions, and the ratio.
"""

import time
from collections.abc import Callable

import torch

SHAPES = ((512, 256), (1024, 256), (256, 512), (2048, 2048))  # out, in features
ROWS = (1, 8, 16, 64, 128, 384)


def microseconds(run: Callable[[], torch.Tensor], calls: int = 12, repetitions: int = 8) -> float:
    run()
    best = float("inf")
    for _ in range(repetitions):
        began = time.thread_time()
        for _ in range(calls):
            run()
        best = min(best, (time.thread_time() - began) / calls)
    return 1e6 * best


def main() -> None:
    torch.set_num_threads(1)
    print("| rows | out x in | MKL, us | oneDNN, us | ratio |\n|---:|---:|---:|---:|---:|")
    for rows in ROWS:
        for out_features, in_features in SHAPES:
            x, weight = torch.randn(rows, in_features), torch.randn(out_features, in_features)
            mkl = microseconds(lambda: torch.nn.functional.linear(x, weight))
            onednn = microseconds(lambda: torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], ""))
            print(
                f"| {rows} | {out_features} x {in_features} | {mkl:.0f} | {onednn:.0f} | {mkl / onednn:.2f}x |",
                flush=True,
            )


if __name__ == "__main__":
    main()
