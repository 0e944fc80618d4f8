"""Comparison of a Triton kernel with its twin, compiled on a GPU or interpreted.

Triton decides at its import whether it interprets, so a separate process runs the interpreted
comparisons.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def round_to_nearest(data: np.ndarray, source: tl.dtype, target: tl.dtype, _rounding_mode) -> np.ndarray:
    """Convert floats as the hardware does; data and result hold the formats' bits."""
    formats = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
    }
    values = torch.frombuffer(bytearray(data.tobytes()), dtype=formats[source]).to(formats[target])
    return values.view(torch.uint8).numpy().view(f"uint{target.primitive_bitwidth}").reshape(data.shape)


if INTERPRETED:
    from triton.runtime import interpreter

    interpreter._convert_float = round_to_nearest  # its own cuts the lower bits off


def against_twin(test):
    """Mark a comparison for a GPU and the interpreter."""
    return pytest.mark.twin(test if INTERPRETED else pytest.mark.gpu(needs_gpu(test)))


def run_comparisons(files: Sequence[Path], *options: str) -> None:
    """Run the files' comparisons in one interpreter process; fail unless all pass."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "twin"]
    done = subprocess.run([*command, *options, *files], env=environment, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    skips = [] if "--core" in options else ["skipped"]
    assert "passed" in done.stdout and not any(word in done.stdout for word in skips), output
