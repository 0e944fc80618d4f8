"""What a bare GPU machine runs, on a CPU: SGLang cannot be imported."""

import os
import subprocess
import sys

from serving import ROOT

BLOCKED = """
import importlib.abc, pytest, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
sys.exit(pytest.main(sys.argv[1:]))
"""
NOT_THERE = ("sglang", "flashinfer", "sgl_kernel", "transformers", "xgrammar", "zmq", "msgspec", "orjson")


def test_kernel_comparisons_without_sglang():
    """`sheet.sh bare` runs them under compute-sanitizer."""
    command = (ROOT / "benchmark/gpu/sheet.sh").read_text().partition("-m pytest ")[2].partition("\n")[0]
    run = [sys.executable, "-c", BLOCKED.format(packages=NOT_THERE), *command.split(), "--collect-only"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("prepare_block", "walk", "accept_blocks", "penalize_block", "block_conv"):
        assert kernel in done.stdout
