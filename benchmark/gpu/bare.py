"""Figures of a GPU with torch and Triton alone: no SGLang, no FlashInfer, nothing installed.

    python benchmark/gpu/bare.py --out FOLDER

It measures the memory's bandwidth, the matrix products of Qwen3-8B by rows, its head in bf16 and FP8, and
compares every Triton kernel with its plain PyTorch twin. FOLDER/bare.json has every figure as soon as it is
measured. A figure that fails is a line with its error, and the next one follows.

Without CUDA, products are small and Triton interprets the kernels: their figures mean nothing.

Exit status: 0 all well; 1 something failed or differs.
"""

import argparse
import functools
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmark"), str(ROOT / "test" / "srt")]

from gpu.products import bandwidth, measure_products  # noqa: E402
from gpu.state import source_fingerprint, versions, write  # noqa: E402


def stand_alone() -> None:
    """Make the package importable from the checkout, and Triton interpret where it cannot compile."""
    package = types.ModuleType("sglang_dflash")
    package.__path__ = [str(ROOT / "python" / "sglang")]
    sys.modules.setdefault("sglang_dflash", package)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at its import


class Report:
    """Figures by section and name, printed and written as they come."""

    def __init__(self, out: Path | None, **setting: Any):
        self.figures: dict[str, Any] = setting
        self.has_failed = False
        self._out = out

    def take(self, section: str, name: str, measure: Callable[[], dict]) -> dict:
        """Keep what `measure` returns, or its error."""
        begun = time.perf_counter()
        try:
            figure = measure()
        except Exception as error:  # recorded, shown, and in the exit status
            figure = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        figure["seconds"] = round(time.perf_counter() - begun, 2)
        self.has_failed |= "error" in figure or figure.get("verdict") == "differs"
        self.figures.setdefault(section, {})[name] = figure
        print(f"{section} {name}: {', '.join(f'{key} {value}' for key, value in figure.items())}", flush=True)
        if self._out is not None:
            write(self._out / "bare.json", json.dumps(self.figures, indent=1) + "\n")
        return figure


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of bare.json; default: nothing is written")
    out, begun = parser.parse_args().out, time.perf_counter()
    stand_alone()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = torch.cuda.get_device_name() if device == "cuda" else "a CPU: figures mean nothing on a CPU"
    print(f"{machine}; torch {torch.__version__}", flush=True)
    report = Report(out, machine=machine, versions=versions(), source=source_fingerprint())
    report.take("bandwidth", "copy", functools.partial(bandwidth, device))
    measure_products(report, device)
    from gpu import twins  # imports the kernels and Triton, which `stand_alone` has prepared

    for name, pairs in twins.TWINS.items():
        report.take("kernels", name, functools.partial(twins.compare, pairs, device))
    print(f"{time.perf_counter() - begun:.0f} s; {'something failed' if report.has_failed else 'all well'}")
    return int(report.has_failed)


if __name__ == "__main__":
    sys.exit(main())
