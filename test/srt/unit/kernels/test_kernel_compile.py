"""Every kernel compiled for three generations of GPU: spills, access widths, and how often it is compiled.

No GPU need be present.
"""

import importlib
import os
import pkgutil
import re
from itertools import product

import pytest
import torch
import triton
from support.kernel_launches import BF16, CASES
from support.triton_launches import ARCHITECTURES, Launch

from sglang_dflash.kernels.ops import speculative
from sglang_dflash.kernels.ops.speculative import context_kv

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
BATCHES, WIDTHS = (1, 2, 3, 16, 47), (1, 2, 3, 7, 8, 16, 31, 32)


def recorded(case: str, monkeypatch, **sizes: int) -> Launch:
    """Record the launch of a case instead of running it."""
    module, kernel, launcher, arguments = CASES[case]
    launch = Launch(getattr(module, kernel))
    with monkeypatch.context() as patch:
        patch.setattr(module, kernel, launch)
        launcher(*arguments, **sizes)
    return launch


@pytest.fixture
def compiled(monkeypatch, tmp_path, capfd):
    """Map (case, arch) to (PTX, ptxas' report)."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # a cached kernel would give no report
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")

    def compile_case(case: str, arch: int) -> tuple[str, str]:
        launch = recorded(case, monkeypatch)
        capfd.readouterr()
        ptx = launch.compile(arch).asm["ptx"]
        return ptx, capfd.readouterr().out

    return compile_case


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_kernel(case, arch, compiled):
    """No kernel spills. Context states move 16 bytes at a time, and their products are rounded."""
    if arch < 89 and "e4m3" in case:
        pytest.skip("e4m3 needs sm_89")
    ptx, log = compiled(case, arch)
    assert re.search(rf"\.target sm_{arch}", ptx)
    (registers,) = re.findall(r"Used (\d+) registers", log)
    (spills,) = re.findall(r"\d+ bytes stack frame, \d+ bytes spill stores, \d+ bytes spill loads", log)
    print(f"{case}, sm_{arch}: {registers} registers, {spills}")
    assert re.findall(r"\d+", spills)[1:] == ["0", "0"]
    # A candidate's score may be computed in two layouts. A fused multiply-add in one would make two of it.
    assert "walk" not in case or "fma" not in ptx
    if not case.startswith("write_context_kv"):
        return
    # The twin rounds every product too; sm_80 multiplies bfloat16 by adding -0.
    assert "fma" not in ptx.replace("fma.rn.bf16", "")
    if "pool" not in case:
        # Two halves of the keys and of the values, in and out; no thread waits for another.
        assert re.findall(r"st\.global\S*", ptx) == ["st.global.v4.b32"] * 4
        # The states; weights in bfloat16; cosines and sines in float32.
        assert ptx.count("ld.global.v4.b32") == 4 + 2 + 4
        assert "bar.sync" not in ptx and ".shared" not in ptx


def test_a_pool_at_odd_addresses_is_written_in_narrower_steps(monkeypatch, compiled):
    """The alignment promised to the compiler is the pool's own."""
    of = context_kv.KVPoolPointers.from_pools

    def of_shifted(*sides):
        return of(*([torch.zeros(b.numel() + 1, dtype=BF16)[1:].view(b.shape) for b in s] for s in sides))

    monkeypatch.setattr(context_kv.KVPoolPointers, "from_pools", of_shifted)
    ptx, _ = compiled("write_context_kv, dim 128", 90)
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.b16"}


@pytest.mark.parametrize("case", CASES)
def test_one_compilation_serves_all_batches_and_lengths(case, monkeypatch):
    """A kernel that Triton compiles anew would stop a running server for as long."""
    variants = {
        recorded(case, monkeypatch, bs=bs, width=width).variant() for bs, width in product(BATCHES, WIDTHS)
    }
    assert len(variants) == 1


def test_every_kernel_is_listed():
    found = {
        (module, name)
        for _, path, _ in pkgutil.iter_modules(speculative.__path__, f"{speculative.__name__}.")
        for module in [importlib.import_module(path)]
        for name, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and not name.startswith("_")
    }
    assert found == {(module, kernel) for module, kernel, *_ in CASES.values()}
