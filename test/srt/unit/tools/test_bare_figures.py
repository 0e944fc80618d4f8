"""Figures of a bare GPU, run on a CPU: nothing but torch and Triton can be imported."""

import json
import os
import re
import subprocess
import sys

import pytest
from gpu.products import HEAD_ROWS, LAYER, ROWS, rows_that_cost
from serving import ROOT

KERNELS = ROOT / "python" / "sglang" / "kernels" / "ops" / "speculative"
# `sglang_dflash` is installed here: only the folder that the program names may be the package.
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name in ("sglang", "sglang_dflash", "flashinfer", "sgl_kernel", "pytest", "hypothesis"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, "benchmark/gpu")
import bare
"""


def figures_of(folder, planted: str, status: int) -> tuple[dict, str]:
    command = [sys.executable, "-c", f"{BLOCKED}{planted}\nsys.exit(bare.main())", "--out", str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads((folder / "bare.json").read_text()), done.stdout


def test_all_figures_without_sglang(tmp_path):
    figures, printed = figures_of(tmp_path, "", 0)
    found = {
        f"{file.stem}.{kernel}"
        for file in KERNELS.glob("*.py")
        for kernel in re.findall(r"^def (\w+)_(?:torch|triton)\(", file.read_text(), re.MULTILINE)
    }
    assert {name.partition(".")[0] for name in found} == {f.stem for f in KERNELS.glob("[!_]*.py")}
    assert found <= figures["kernels"].keys()
    assert all(kernel["verdict"] == "same" and kernel["numbers"] for kernel in figures["kernels"].values())
    products = {f"{name}, {rows} rows" for name in LAYER for rows in ROWS}
    heads = {f"{dtype}, {rows} rows" for dtype in ("bf16", "FP8") for rows in HEAD_ROWS}
    assert figures["products"].keys() == products and figures["head"].keys() == heads
    assert all(figure["ms"] > 0 for name in ("products", "head") for figure in figures[name].values())
    assert figures["bandwidth"]["copy"]["GB/s"] > 0 and len(figures["verdict"]) == 2
    assert "figures mean nothing on a CPU" in printed and "all well" in printed


@pytest.mark.parametrize("late, rows", [(1.25, 256), (1.5, 192), (1.2, None)])
def test_the_rows_from_which_a_product_costs(late, rows):
    assert rows_that_cost({1: 2.0, 16: 1.0, 128: 1.0, 256: late}) == rows
