"""What a bare GPU machine runs, on a CPU: SGLang cannot be imported."""

import json
import os
import subprocess
import sys

from serving import ROOT

BLOCKED = """
import importlib.abc, runpy, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
sys.argv = sys.argv[1:]
{run}
"""
NOT_THERE = ("sglang", "flashinfer", "sgl_kernel", "transformers", "xgrammar", "zmq", "msgspec", "orjson")


def run_bare(run: str, *arguments: str, blocked: tuple[str, ...] = NOT_THERE) -> str:
    command = [sys.executable, "-c", BLOCKED.format(packages=blocked, run=run), *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_figures_without_the_package(tmp_path):
    arguments = "benchmark/gpu/bare.py", "--out", str(tmp_path)
    blocked = *NOT_THERE, "sglang_dflash", "pytest", "hypothesis"
    printed = run_bare("runpy.run_path(sys.argv[0], run_name='__main__')", *arguments, blocked=blocked)
    figures = json.loads((tmp_path / "bare.json").read_text())
    assert not [name for name, figure in figures.items() if "error" in figure] and len(figures) > 15
    assert "figures mean nothing on a CPU" in printed


def test_kernel_comparisons_without_sglang():
    """`sheet.sh bare` runs them under compute-sanitizer."""
    command = (ROOT / "benchmark/gpu/sheet.sh").read_text().partition("-m pytest ")[2].partition("\n")[0]
    run = "import pytest; sys.exit(pytest.main([*sys.argv[1:], '--collect-only']))"
    found = run_bare(run, "pytest", *command.split())
    for kernel in ("prepare_block", "walk", "accept_blocks", "penalize_block", "block_conv"):
        assert kernel in found
