"""Every kernel compiled for three generations of GPU: spills and access widths.

No GPU need be present.
"""

import os
import re

import pytest
import torch
from support.triton_launches import ARCHITECTURES, Launch

from sglang_dflash.kernels.ops.speculative import (
    accept,
    block,
    context_kv,
    copy_ahead,
    peagle_rows,
    penalties,
    window,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


def launch_prepare_block():
    bs, block_size = 4, 16
    ints, table = torch.zeros(bs, dtype=torch.int64), torch.zeros(48, 40_960, dtype=torch.int32)
    block.prepare_block_triton(ints, ints, ints, table, 151_669, block_size)


def launch_pack_blocks(is_ragged: bool = False):
    lengths, offsets = torch.zeros(48, dtype=torch.int64), torch.zeros(49, dtype=torch.int32)
    counts = lengths.int() if is_ragged else None
    block.pack_blocks_triton(lengths, 16, lengths, offsets, offsets, counts)


def launch_prepare_window():
    ints, table = torch.zeros(4, dtype=torch.int64), torch.zeros(48, 40_960, dtype=torch.int32)
    window.prepare_window_triton(ints, ints, table, table, 4096, 16, 4127)


def launch_penalize_block(dtype: torch.dtype, has_stops: bool, is_ragged: bool = False):
    bs, width, vocabulary = 4, 16, 151_936
    logits, counts = (
        torch.zeros(bs * width, vocabulary, dtype=dtype),
        torch.zeros(48, vocabulary, dtype=torch.int32),
    )
    ints, floats = torch.zeros(bs, dtype=torch.int64), torch.zeros(bs)
    tokens, stops = (
        torch.zeros(bs, width, dtype=torch.int64),
        torch.zeros(bs, vocabulary) if has_stops else None,
    )
    penalties.penalize_block_triton(
        logits,
        tokens,
        counts,
        ints,
        ints,
        floats,
        floats,
        floats,
        ints,
        ints,
        stops,
        *((ints, ints.int()) if is_ragged else ()),
    )


def launch_count_tokens():
    tokens, counts = torch.zeros(4, 16, dtype=torch.int64), torch.zeros(48, 151_936, dtype=torch.int32)
    penalties.count_tokens_triton(
        counts, tokens[:, 0].contiguous(), tokens, torch.zeros(4, dtype=torch.int32)
    )


def launch_prepare_rows(last_start: int | None):
    bs, block_size, hidden = 4, 8, 4096
    ints, table = torch.zeros(bs, dtype=torch.int64), torch.zeros(48, 40_960, dtype=torch.int32)
    states = torch.zeros(48, block_size, hidden, dtype=torch.bfloat16)
    tokens = torch.zeros(48, block_size, dtype=torch.int64)
    pending = peagle_rows.Pending(tokens, states, tokens[:, 0].contiguous())
    fused = torch.zeros(bs * 2 * (block_size - 1), hidden, dtype=torch.bfloat16)
    tables = peagle_rows.RowTables(table, table, 151_669, last_start)
    peagle_rows.prepare_rows_triton(ints, ints, pending, tables, states[0, 0], fused, ints)


def launch_commit_rows(width: int):
    bs, block_size, hidden = 4, 8, 4096
    tokens = torch.zeros(48, block_size, dtype=torch.int64)
    pending = peagle_rows.Pending(
        tokens, torch.zeros(48, block_size, hidden, dtype=torch.bfloat16), tokens[:, 0].contiguous()
    )
    fused = torch.zeros(bs * width, hidden, dtype=torch.bfloat16)
    accept_len = torch.zeros(bs, dtype=torch.int32)
    peagle_rows.commit_rows_triton(
        pending.count[:bs], accept_len, tokens[:bs, :width].contiguous(), fused, pending
    )


def launch_append_rows(has_slots: bool):
    bs, width, hidden = 4, 8, 4096
    tokens = torch.zeros(48, 8, dtype=torch.int64)
    pending = peagle_rows.Pending(
        tokens, torch.zeros(48, 8, hidden, dtype=torch.bfloat16), tokens[:, 0].contiguous()
    )
    fused = torch.zeros(bs * width, hidden, dtype=torch.bfloat16)
    accept_len = torch.zeros(bs, dtype=torch.int32)
    slots = tokens[:bs].contiguous() if has_slots else None
    peagle_rows.append_rows_triton(
        pending.count[:bs], accept_len, tokens[:bs].contiguous(), fused, slots, pending
    )


def launch_find_match():
    texts, ints = torch.zeros(48, 40_977, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    copy_ahead.find_match_triton(texts, ints, ints, 32_768, copy_ahead.RULE)


def launch_choose_copies():
    texts, ints = torch.zeros(48, 40_977, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    keys, records = torch.zeros(4, 16, dtype=torch.int64), torch.zeros(48, 2)
    copy_ahead.choose_copies_triton(texts, records, ints, ints, keys, 16, copy_ahead.RULE)


def launch_append_tokens():
    texts, ints = torch.zeros(48, 40_977, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    tokens, records, counts = (
        torch.zeros(4, 16, dtype=torch.int64),
        torch.zeros(48, 2),
        torch.zeros(4, dtype=torch.int32),
    )
    copy_ahead.append_tokens_triton(texts, records, ints, ints, tokens, counts, counts, True, copy_ahead.RULE)


def launch_accept(is_decided: bool, is_relayed: bool):
    tokens, best = torch.zeros(4, 16, dtype=torch.int64), torch.zeros(4, 16)
    seq_lens = tokens[:, 0].contiguous()
    relay = accept.RelayTables(*torch.zeros(3, 4, dtype=torch.int64)) if is_relayed else None
    if is_decided:
        accept.complete_blocks_triton(seq_lens.int(), tokens, best, seq_lens, 151_936, relay)
    else:
        accept.accept_greedy_triton(tokens, tokens, best, seq_lens, 151_936, relay)


def launch_write_context_kv(head_dim: int, pool_dtype: torch.dtype, prefill: bool):
    """Launch for Qwen3-8B's draft: 5 layers, 8 KV heads, block 16, bfloat16."""
    bs, block_size, layers, heads = 4, 16, 5, 8
    rows = bs * block_size
    kv = torch.zeros(rows, layers, 2, heads, head_dim, dtype=torch.bfloat16)
    weight = torch.ones(layers, head_dim, dtype=torch.bfloat16)
    ints = torch.zeros(rows, dtype=torch.int64)
    buffers = [torch.zeros(rows, heads, head_dim).to(pool_dtype) for _ in range(2 * layers)]
    pool = context_kv.KVPoolPointers.of(buffers[:layers], buffers[layers:])
    accept_len = None if prefill else torch.zeros(bs, dtype=torch.int32)
    context_kv.write_context_kv_triton(
        kv, weight, 1e-6, torch.zeros(64, head_dim), ints, ints, pool, accept_len, block_size
    )


BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
CONTEXT_KV = {
    "dim 128": (128, BF16, False),
    "dim 128, prefill": (128, BF16, True),
    "dim 80": (80, BF16, False),
    "dim 128, e4m3 pool": (128, E4M3, False),
    "dim 80, e5m2 pool": (80, E5M2, False),
}
CASES = {
    "prepare_block": (block, "prepare_block_kernel", launch_prepare_block, ()),
    "pack_blocks": (block, "pack_blocks_kernel", launch_pack_blocks, ()),
    "pack_blocks, own lengths": (block, "pack_blocks_kernel", launch_pack_blocks, (True,)),
    "prepare_window": (window, "prepare_window_kernel", launch_prepare_window, ()),
    "penalize_block": (penalties, "penalize_block_kernel", launch_penalize_block, (torch.float32, False)),
    "penalize_block, bfloat16, stops": (
        penalties,
        "penalize_block_kernel",
        launch_penalize_block,
        (BF16, True),
    ),
    "penalize_block, own lengths": (
        penalties,
        "penalize_block_kernel",
        launch_penalize_block,
        (torch.float32, False, True),
    ),
    "count_tokens": (penalties, "count_tokens_kernel", launch_count_tokens, ()),
    "prepare_rows": (peagle_rows, "prepare_rows_kernel", launch_prepare_rows, (None,)),
    "prepare_rows, from the first pending": (
        peagle_rows,
        "prepare_rows_kernel",
        launch_prepare_rows,
        (40_000,),
    ),
    "commit_rows": (peagle_rows, "commit_rows_kernel", launch_commit_rows, (8,)),
    "commit_rows, one more": (peagle_rows, "commit_rows_kernel", launch_commit_rows, (1,)),
    "append_rows": (peagle_rows, "append_rows_kernel", launch_append_rows, (False,)),
    "append_rows, packed": (peagle_rows, "append_rows_kernel", launch_append_rows, (True,)),
    "find_match": (copy_ahead, "find_match_kernel", launch_find_match, ()),
    "choose_copies": (copy_ahead, "choose_copies_kernel", launch_choose_copies, ()),
    "append_tokens": (copy_ahead, "append_tokens_kernel", launch_append_tokens, ()),
    "accept_greedy": (accept, "accept_kernel", launch_accept, (False, False)),
    "accept_greedy, relayed": (accept, "accept_kernel", launch_accept, (False, True)),
    "complete_blocks": (accept, "accept_kernel", launch_accept, (True, False)),
    "complete_blocks, relayed": (accept, "accept_kernel", launch_accept, (True, True)),
    **{
        f"write_context_kv, {name}": (context_kv, "write_context_kv_kernel", launch_write_context_kv, case)
        for name, case in CONTEXT_KV.items()
    },
}


@pytest.fixture
def compiled(monkeypatch, tmp_path, capfd):
    """Map (case, arch) to (PTX, ptxas' report)."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # a cached kernel would give no report
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")

    def compile_case(case: str, arch: int) -> tuple[str, str]:
        module, kernel, launcher, arguments = CASES[case]
        launch = Launch(getattr(module, kernel))
        with monkeypatch.context() as patch:
            patch.setattr(module, kernel, launch)
            launcher(*arguments)
        capfd.readouterr()
        ptx = launch.compile(arch).asm["ptx"]
        return ptx, capfd.readouterr().out

    return compile_case


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES)
def test_registers_and_spills(case, arch, compiled):
    if arch < 89 and "e4m3" in case:
        pytest.skip("e4m3 needs sm_89")
    ptx, log = compiled(case, arch)
    assert re.search(rf"\.target sm_{arch}", ptx)
    (registers,) = re.findall(r"Used (\d+) registers", log)
    (spills,) = re.findall(r"\d+ bytes stack frame, \d+ bytes spill stores, \d+ bytes spill loads", log)
    print(f"{case}, sm_{arch}: {registers} registers, {spills}")
    assert re.findall(r"\d+", spills) == ["0", "0", "0"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ["dim 128", "dim 128, prefill", "dim 80"])
def test_context_states_move_16_bytes_at_a_time(name, arch, compiled):
    """Two halves of the keys and of the values, in and out; no thread waits for another."""
    ptx, _ = compiled(f"write_context_kv, {name}", arch)
    stores = re.findall(r"st\.global\S*", ptx)
    assert stores == ["st.global.v4.b32"] * 4
    # The states; weights in bfloat16; cosines and sines in float32.
    assert ptx.count("ld.global.v4.b32") == 4 + 2 + 4
    assert "bar.sync" not in ptx and ".shared" not in ptx


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_product_of_a_rotation_is_rounded(arch, compiled):
    """The twin rounds it too; a fused multiply-add does not."""
    ptx, _ = compiled("write_context_kv, dim 128", arch)
    assert "fma" not in ptx.replace("fma.rn.bf16", "")  # sm_80 multiplies bfloat16 by adding -0


def test_a_pool_at_odd_addresses_is_written_in_narrower_steps(monkeypatch, compiled):
    """The alignment promised to the compiler is the pool's own."""
    of = context_kv.KVPoolPointers.of

    def of_shifted(*sides):
        return of(*([torch.zeros(b.numel() + 1, dtype=BF16)[1:].view(b.shape) for b in s] for s in sides))

    monkeypatch.setattr(context_kv.KVPoolPointers, "of", of_shifted)
    ptx, _ = compiled("write_context_kv, dim 128", 90)
    assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.b16"}
