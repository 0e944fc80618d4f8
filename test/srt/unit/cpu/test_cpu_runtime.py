"""The CPU runtime: activation, its stand-in for `sgl_kernel`, and missing functions."""

import gc
import importlib
import importlib.util
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.srt import environ
from sglang_dflash.srt.hardware_backend.cpu import runtime

NOTICE = "no CUDA driver on this machine"


def load_stand_in():
    """Load the stand-in, whichever `sgl_kernel` this process runs on."""
    path = Path(runtime.STAND_IN_DIR) / "sgl_kernel" / "__init__.py"
    spec = importlib.util.spec_from_file_location("sgl_kernel_stand_in", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


stand_in = load_stand_in()


def murmur3_32(data: bytes) -> int:
    """Return MurmurHash3_x86_32 of whole 4-byte words, seed 0.

    Appleby's public-domain algorithm.
    """

    def rotate(x: int, r: int) -> int:
        return (x << r | x >> (32 - r)) & 0xFFFFFFFF

    state = 0
    for i in range(0, len(data), 4):
        word = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        state = rotate(state ^ (rotate(word, 15) * 0x1B873593 & 0xFFFFFFFF), 13) * 5 + 0xE6546B64 & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**20), min_size=1, max_size=4),
)
def test_seeded_draws_hash_seed_position_and_column(rows, columns):
    seeds = torch.tensor([s - 2**64 if s >= 2**63 else s for s, _ in rows]).view(torch.uint64)
    hashed = stand_in._murmur_hash32_cpu(seeds, torch.tensor([p for _, p in rows]), torch.tensor(columns))
    for (seed, position), row in zip(rows, hashed.tolist(), strict=True):
        for column, found in zip(columns, row, strict=True):
            words = seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little")
            assert found == murmur3_32(words)


# -- its functions


def test_copy_all_layer_kv_cache():
    nothing = torch.empty(0, dtype=torch.int64)
    stand_in.copy_all_layer_kv_cache_cpu(None, None, nothing, nothing)
    stand_in.copy_all_layer_kv_cache_cpu(None, None, torch.tensor([3, 4]), torch.tensor([3, 4]))
    with pytest.raises(NotImplementedError, match="copy_all_layer_kv_cache_cpu"):
        stand_in.copy_all_layer_kv_cache_cpu(None, None, torch.tensor([3]), torch.tensor([4]))


def test_an_unknown_function_names_itself_when_called():
    """Not at import: SGLang imports many kernels that it never launches on a CPU."""
    function = stand_in.verify_tree_greedy_cpu
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.verify_tree_greedy_cpu.*CPU"):
        function(1, candidates=2)
    assert not hasattr(stand_in, "__wrapped__"), "import machinery asks for it"


# -- when it switches itself on


@pytest.fixture
def bare_machine(monkeypatch):
    """A process before activation, on a machine with CUDA kernels and without driver."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != runtime.STAND_IN_DIR])
    variables = runtime.CPU_ENGINE_SWITCH, runtime.COMPILE_SWITCH, runtime.SPIN_VARIABLE, "OMP_WAIT_POLICY"
    for variable in variables:
        monkeypatch.setenv(variable, "")  # so that what is set meanwhile is undone
        monkeypatch.delenv(variable)
    monkeypatch.setattr("torch.compile", torch_compile)
    monkeypatch.setattr(runtime, "has_cuda_kernels", lambda: True)
    monkeypatch.setattr(runtime, "can_load", lambda library: False)
    monkeypatch.setattr(runtime, "has_other_accelerator", lambda: False)
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)


def torch_compile(*_, **__):
    raise AssertionError("the real one imports inductor")


@pytest.mark.parametrize("there", ["has_other_accelerator", "can_load", None])
def test_needed_where_driver_and_other_accelerators_are_missing(there, bare_machine, monkeypatch):
    assert runtime.needs_stand_in()
    if there is None:  # a CPU build of SGLang brings its own kernels
        monkeypatch.setattr(runtime, "has_cuda_kernels", lambda: False)
    else:
        monkeypatch.setattr(runtime, there, lambda *_: True)
    assert not runtime.needs_stand_in()


@pytest.mark.parametrize(
    "patch", ["torch.version.hip", "torch.xpu.is_available", "torch.backends.mps.is_available"]
)
def test_other_accelerators_are_seen(patch, monkeypatch):
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("torch.xpu.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    assert not runtime.has_other_accelerator()
    monkeypatch.setattr(patch, "6.4" if patch.endswith("hip") else lambda: True)
    assert runtime.has_other_accelerator()


def test_libraries_are_really_tried():
    assert runtime.can_load("libc.so.6")
    assert not runtime.can_load("libno-such-library.so.1")


@pytest.mark.parametrize("needed", [True, False])
def test_the_entry_point_activates_only_where_needed(needed, bare_machine, monkeypatch):
    from sglang_dflash.srt.plugins import entry_points

    monkeypatch.setattr(runtime, "needs_stand_in", lambda: needed)
    assert entry_points.prepare_platform() is None
    assert environ.serves_on_stand_in() is needed
    assert (os.environ.get(runtime.CPU_ENGINE_SWITCH) == "1") is needed


def test_activation_speaks_once(bare_machine, caplog):
    """A child inherits `sys.path`, and with it the fact that the notice was printed."""
    with caplog.at_level(logging.WARNING):
        runtime.activate()
        runtime.activate()
    assert [NOTICE in record.message for record in caplog.records].count(True) == 1
    assert sys.path[0] == runtime.STAND_IN_DIR
    assert sys.path.count(runtime.STAND_IN_DIR) == 1
    assert os.environ[runtime.SPIN_VARIABLE] == runtime.SPIN_COUNT


@pytest.mark.parametrize("variable", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_users_choice_of_how_openmp_waits_stands(variable, bare_machine, monkeypatch):
    monkeypatch.setenv(variable, "as chosen")
    runtime.activate()
    assert os.environ[variable] == "as chosen"
    assert ("OMP_WAIT_POLICY" in os.environ) + ("GOMP_SPINCOUNT" in os.environ) == 1


def test_every_process_starts_without_inductor_and_with_few_collections(bare_machine):
    """A spawned child too, in which the path and the switches stand already."""
    for _ in range(2):
        torch.compile, before = torch_compile, gc.get_threshold()
        gc.set_threshold(700, *before[1:])
        runtime.activate()
        assert torch.compile(murmur3_32) is torch.compile(dynamic=True)(murmur3_32) is murmur3_32
        assert gc.get_threshold() == (runtime.COLLECTION_THRESHOLD, *before[1:])


def test_a_user_may_compile(bare_machine, monkeypatch):
    monkeypatch.setenv(runtime.COMPILE_SWITCH, "0")
    runtime.activate()
    assert torch.compile is torch_compile


@pytest.mark.parametrize("chosen", [0, 2 * runtime.COLLECTION_THRESHOLD])
def test_a_users_choice_of_collections_stands(chosen, bare_machine):
    gc.set_threshold(chosen)
    runtime.activate()
    assert gc.get_threshold()[0] == chosen


@pytest.mark.skipif(not runtime.needs_stand_in(), reason="this machine can load the real kernels")
def test_python_submodules_come_from_the_installed_package():
    """server/test_stock_sglang.py has the processes that a server spawns."""
    importlib.import_module("sglang")  # activates the stand-in, and skips this test in the core lane
    import sgl_kernel
    from sgl_kernel.scalar_type import scalar_types

    assert Path(sgl_kernel.__file__).is_relative_to(runtime.STAND_IN_DIR)
    assert scalar_types.uint4.size_bits == 4
