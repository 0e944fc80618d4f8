"""Comparing a Triton kernel with its twin: compiled where there is a GPU, everywhere else in Triton's interpreter.

Triton decides at its import whether it interprets, so a process of its own runs the comparisons of a test file.
"""

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def against_twin(test):
    """A comparison that runs on a GPU and in the interpreter; its name ends with `equals_its_twin`."""
    return test if INTERPRETED else pytest.mark.gpu(needs_gpu(test))


def run_comparisons(file: str) -> None:
    """Run a file's comparisons in the interpreter, and fail unless all of them pass."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "equals_its_twin", file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "passed" in done.stdout and "skipped" not in done.stdout, output
