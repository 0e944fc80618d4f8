"""Triton kernels against their PyTorch twins, and the twins against SGLang's code.

Comparisons run compiled on a GPU, and everywhere in Triton's interpreter (test_kernel_comparisons.py).
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_inputs import (
    EPS,
    Context,
    random_appended,
    random_blocks,
    random_lengths,
    random_rows,
    random_verdicts,
    random_window,
)
from support.triton_interpreter import DEVICE, INTERPRETED, against_twin, needs_gpu

from sglang_dflash.kernels.ops.speculative import accept, block, context_kv, peagle_rows, window
from sglang_dflash.kernels.ops.speculative.context_kv import KVPoolPointers

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


# -- block preparation


@against_twin
@given(st.integers(0, 2**31), st.integers(0, 9), st.integers(1, 17))
def test_prepare_block_equals_its_twin(seed, bs, block_size):
    arguments = random_blocks(seed, bs, block_size, DEVICE)
    outputs = block.prepare_block.__wrapped__(*arguments), block.prepare_block_torch(*arguments)
    for got, want in zip(*outputs, strict=True):
        assert got.dtype == want.dtype == torch.int64
        assert torch.equal(got, want) and got.shape == want.shape


def test_prepared_blocks():
    """The second one reaches past the table: its slots there are the padding slot, not another request's."""
    table = torch.arange(10, 50, dtype=torch.int32).view(2, 20).flip(0)
    per_request = torch.tensor([[7, 8], [0, 18], [1, 0]])
    tokens, positions, cache_loc = block.prepare_block(*per_request, table, mask_token_id=99, block_size=3)
    assert tokens.tolist() == [[7, 99, 99], [8, 99, 99]]
    assert positions.tolist() == [[0, 1, 2], [18, 19, 20]]
    assert cache_loc.tolist() == [10, 11, 12, 48, 49, 0]


@against_twin
@given(st.integers(0, 2**31), st.integers(0, 9), st.integers(1, 17), st.booleans())
def test_block_offsets_equal_their_twin(seed, bs, block_size, is_ragged):
    arguments = random_lengths(seed, bs, block_size, DEVICE, is_ragged)
    mine, twins = block.block_offsets.__wrapped__(*arguments), block.block_offsets_torch(*arguments)
    for got, want in zip(mine, twins, strict=True):
        assert torch.equal(got, want) and got.dtype == want.dtype


def test_offsets_of_whole_and_ragged_blocks():
    whole = block.block_offsets(torch.tensor([5, 0, 7]), 4)
    assert [x.tolist() for x in whole] == [[9, 4, 11], [0, 9, 13, 24], [0, 4, 8, 12]]
    ragged = block.block_offsets(
        torch.tensor([5, 0, 7]), 4, counts=torch.tensor([4, 0, 1], dtype=torch.int32)
    )
    assert [x.tolist() for x in ragged] == [[9, 0, 8], [0, 9, 9, 17], [0, 4, 4, 5]]


# -- the table of a window


@against_twin
@given(
    st.integers(0, 2**31),
    st.integers(0, 5),
    st.integers(1, 60),
    st.sampled_from([1, 4, 16]),
    st.integers(1, 24),
)
def test_prepare_window_equals_its_twin(seed, bs, size, page, columns):
    mine, twins = (random_window(seed, bs, size, page, columns, DEVICE) for _ in range(2))
    got, want = window.prepare_window.__wrapped__(*mine), window.prepare_window_torch(*twins)
    assert torch.equal(got, want) and got.dtype == torch.int64
    assert torch.equal(mine[3], twins[3])


# -- rows of a P-EAGLE block


@against_twin
@given(
    st.integers(0, 2**31),
    st.integers(0, 5),
    st.integers(2, 9),
    st.sampled_from([16, 40]),
    st.sampled_from([None, 20, 40]),
)
def test_prepare_rows_equals_its_twin(seed, bs, block_size, hidden, last_start):
    mine, twins = (random_rows(seed, bs, block_size, hidden, DEVICE, last_start) for _ in range(2))
    outputs = peagle_rows.prepare_rows.__wrapped__(*mine), peagle_rows.prepare_rows_torch(*twins)
    for got, want in zip(*outputs, strict=True):
        assert got.dtype == want.dtype == torch.int64
        assert torch.equal(got, want) and got.shape == want.shape
    # Written in place: the table, the fused states, the first drafting row, and that the rows were run.
    assert torch.equal(mine[3].table, twins[3].table)
    assert torch.equal(mine[2].was_run, twins[2].was_run) and mine[2].was_run[mine[0]].all()
    for place in (5, 6):
        assert torch.equal(mine[place], twins[place])


@against_twin
@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(2, 9), st.booleans(), st.sampled_from([16, 40]))
def test_append_rows_equals_its_twin(seed, bs, block_size, is_ragged, hidden):
    """Rows of other requests and rejected rows must stay out, whatever a request had pending."""
    arguments = seed, bs, min(block_size, 4), block_size, hidden, DEVICE, is_ragged
    mine, twins = random_appended(*arguments), random_appended(*arguments)
    peagle_rows.append_rows.__wrapped__(*mine)
    peagle_rows.append_rows_torch(*twins)
    for name in ("tokens", "fused", "count", "was_run"):
        assert torch.equal(getattr(mine[-1], name), getattr(twins[-1], name)), name


# -- SGLang's norm and rotation


@against_twin
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)])
def test_sglangs_norm_and_rotation_equals_its_twin(heads):
    """For a draft layer in bfloat16, equal to the model's CPU path but for the last bit."""
    try:
        from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_
    except ImportError:  # SGLang 0.5.22, where the draft takes the operators
        from sglang_dflash.srt import compat

        assert compat.table_qk_norm_rope_ is None
        return

    rng, (q_heads, kv_heads), dim, rows = torch.Generator().manual_seed(0), heads, 64, 7
    qkv = torch.randn(rows, (q_heads + 2 * kv_heads) * dim, generator=rng).to(DEVICE, torch.bfloat16)
    weights = [(1 + 0.3 * torch.randn(dim, generator=rng)).to(DEVICE, torch.bfloat16) for _ in "qk"]
    angles = torch.randn(40, dim // 2, generator=rng)
    table, positions = (
        torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE),
        torch.randperm(40, generator=rng)[:rows].to(DEVICE),
    )
    by_head = torch.cat([weight.expand(n, -1) for weight, n in zip(weights, heads)])
    normed = context_kv.rms_norm(qkv.view(rows, -1, dim)[:, : sum(heads)], by_head, 1e-6)
    wanted = context_kv.rotate(normed, positions, table)
    values = qkv[:, sum(heads) * dim :].clone()
    table_qk_norm_rope_(qkv, positions, *weights, table, *heads, dim, 1e-6)
    torch.testing.assert_close(qkv.view(rows, -1, dim)[:, : sum(heads)], wanted, rtol=0.02, atol=0.02)
    assert torch.equal(qkv[:, sum(heads) * dim :], values)


# -- acceptance


@against_twin
@given(
    st.integers(0, 2**31), st.integers(0, 9), st.integers(1, 17), st.sampled_from([2**39, accept.NO_LIMIT])
)
def test_accept_blocks_equals_its_twin(seed, bs, block_size, longest):
    """Whether it decides or is told, also in the tables for the next step."""
    drafted, tokens, *rest = random_verdicts(seed, bs, block_size, DEVICE)
    rows = torch.randperm(bs + 4, generator=torch.Generator().manual_seed(seed))[:bs].to(DEVICE)
    accept_len = accept.accept_matching_prefix(drafted, tokens)
    made = []
    for run in (accept.accept_blocks_torch, accept.accept_blocks.__wrapped__):
        for decided, block_to_decide in ((None, drafted), (accept_len, None)):
            tables = torch.full((2, bs + 4), -1, device=DEVICE)
            relay = accept.RelayTables(rows, *tables)
            made.append(
                {**run(decided, tokens, *rest, relay, longest, block_to_decide)._asdict(), "tables": tables}
            )
    for got in made[1:]:
        for name, value in made[0].items():
            assert got[name].dtype == value.dtype and torch.equal(got[name], value), name
    assert torch.equal(tables[0][rows], got["committed"]) and torch.equal(tables[1][rows], got["bonus"])
    assert (tables == -1).sum() == 2 * 4, "rows of other requests"


@against_twin
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_broken_logits_of_half_the_width_equals_its_twin(dtype):
    drafted, tokens, best, *rest = random_verdicts(5, 9, 8, DEVICE)
    runs = accept.accept_blocks.__wrapped__, accept.accept_blocks_torch
    got, want = (run(None, tokens, best.to(dtype), *rest, block=drafted) for run in runs)
    assert torch.equal(got.reported, want.reported) and (want.reported == rest[-1]).any()


def test_accepted_blocks():
    """All kept; none kept, and a later match that does not count."""
    tokens, target_tokens = torch.tensor([[[5, 1, 2], [5, 9, 2]], [[1, 2, 3], [1, 2, 3]]])
    committed = torch.tensor([10, 2**40])
    got = accept.accept_blocks(None, target_tokens, torch.zeros(2, 3), committed, 9, block=tokens)
    rows = [[1, 2, 3], [1, 2, 3]]
    assert [x.tolist() for x in got] == [[2, 0], [3, 1], [3, 1], [13, 2**40 + 1], rows, rows]
    assert [x.dtype for x in got] == [torch.int32, torch.int32, *[torch.int64] * 4]


def test_no_length_exceeds_the_longest():
    tokens, relayed = torch.tensor([[5, 1, 2], [5, 1, 2]]), torch.zeros(2, 2, dtype=torch.int64)
    committed, tables = torch.tensor([94, 98]), accept.RelayTables(torch.tensor([0, 1]), *relayed)
    got = accept.accept_blocks(None, tokens.roll(-1, 1), torch.zeros(2, 3), committed, 9, tables, 100, tokens)
    assert got.commit_lens.tolist() == [3, 3] and got.committed.tolist() == [97, 100]
    assert tables.lengths.tolist() == [97, 100]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_broken_logits_end_a_request_where_they_are_output(value):
    """Two equal requests: the first kept three tokens, the second one.

    The second never emitted a token after broken logits.
    """
    tokens, target_tokens = torch.tensor([[5, 1, 2, 8], [5, 9, 2, 8]]), torch.tensor([[1, 2, 3, 4]] * 2)
    best = torch.zeros(2, 4)
    best[:, 1] = value
    got = accept.accept_blocks(None, target_tokens, best, torch.tensor([10, 10]), 9, block=tokens)
    assert got.accept_len.tolist() == [2, 0]
    assert got.reported.tolist() == [[9, 9, 9, 9], [1, 2, 3, 4]]
    assert got.bonus.tolist() == [3, 1]  # what the next cycle works on stays in the vocabulary


# -- context K/V


@st.composite
def contexts(draw):
    """Draw arguments of Context and options of write_context_kv, with few programs."""
    bs, block_size = draw(st.integers(0, 5)), draw(st.integers(1, 9))
    rows = bs * block_size
    layers = draw(st.integers(1, min(5, max(1, 40 // max(rows, 1)))))
    kv_dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    pool_dtype = draw(st.sampled_from([kv_dtype, kv_dtype, torch.bfloat16, torch.float32, *FP8]))
    if not INTERPRETED and torch.cuda.get_device_capability() < (8, 9) and pool_dtype == torch.float8_e4m3fn:
        pool_dtype = torch.float8_e5m2
    arguments = dict(
        seed=draw(st.integers(0, 2**31)),
        rows=rows,
        layers=layers,
        heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([64, 80, 128])),
        kv_dtype=kv_dtype,
        pool_dtype=pool_dtype,
        table_dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        device=DEVICE,
    )
    options = {}
    if draw(st.booleans()):
        accept_len = draw(st.lists(st.integers(-1, block_size - 1), min_size=bs, max_size=bs))
        options["accept_len"] = torch.tensor(accept_len, dtype=torch.int32, device=DEVICE)
        options["block_size"] = block_size
    return arguments, options


def slots_to_write(context: Context, options: dict) -> list[int]:
    """Return the slots, by a plain loop."""
    slots, accept_len = context.cache_loc.tolist(), options.get("accept_len")
    if accept_len is None:
        return sorted(slots)
    width, kept = options["block_size"], accept_len.tolist()
    return sorted(slot for row, slot in enumerate(slots) if row % width <= kept[row // width])


def assert_same_pool(got: torch.Tensor, want: torch.Tensor, coarsest: torch.dtype) -> None:
    """Assert equality up to rounding.

    The kernel adds the squares of the norm in another order (and a GPU approximates its rsqrt and fuses
    multiplications into additions), so a float32 intermediate may be off by a few units in the last place.
    In a narrower format that rarely shows; then a value moves to its neighbour, before two are subtracted.
    """
    step = torch.finfo(coarsest).eps * (16 if coarsest == torch.float32 else 1)
    largest = want.nan_to_num().abs().max().item() if want.numel() else 0.0
    torch.testing.assert_close(got, want, rtol=step, atol=step * largest, equal_nan=True)
    if coarsest != torch.float32:
        moved = (got != want) & ~want.isnan()
        assert moved.sum() <= 1 + 0.01 * (~want.isnan()).sum()


@against_twin
@given(contexts())
def test_write_context_kv_equals_its_twin(case):
    context, options = Context(**case[0]), case[1]
    got, want = context.by_both(**options)
    coarsest = max(context.kv.dtype, context.pool_dtype, key=lambda dtype: torch.finfo(dtype).eps)
    assert_same_pool(got, want, coarsest)
    assert torch.equal(got[:, 1].nan_to_num(nan=1e9), want[:, 1].nan_to_num(nan=1e9))  # a plain copy
    written = ~got.isnan().all(dim=(0, 1, 3, 4))
    assert written.nonzero().flatten().tolist() == slots_to_write(context, options)
    assert not got[:, :, written].isnan().any()


@against_twin
def test_a_large_pool_equals_its_twin():
    """Slots lie beyond 2**31 elements. The memory between them is never touched."""
    context = Context(0, 2, 1, 2, 64, torch.bfloat16, torch.float8_e5m2, torch.float32, DEVICE)
    context.cache_loc = torch.tensor([2, 1], device=DEVICE)
    memory, stride = torch.empty(2**31 + 4096, dtype=torch.uint8, device=DEVICE), 2**30 + 128
    k, v = (memory.as_strided((3, 2, 64), (stride, 64, 1), start) for start in (0, 1024))
    pool = KVPoolPointers.from_pools([k], [v], torch.float8_e5m2)
    contents = []
    for write in (context_kv.write_context_kv.__wrapped__, context_kv.write_context_kv_torch):
        k[1:], v[1:] = 0, 0
        write(*context.arguments(pool))
        contents.append(torch.stack([k[1:], v[1:]]).view(torch.float8_e5m2).float())
    assert_same_pool(*contents, torch.float8_e5m2)
    assert contents[0].any(dim=-1).all()


@against_twin
@pytest.mark.parametrize("dtype", FP8)
def test_saturation_equals_its_twin(dtype):
    """fp8 overflow becomes the largest value, not NaN and not infinity."""
    if not INTERPRETED and torch.cuda.get_device_capability() < (8, 9) and dtype == torch.float8_e4m3fn:
        pytest.skip("e4m3 needs sm_89")
    context = Context(0, 3, 1, 1, 64, torch.float32, dtype, torch.float32, DEVICE)
    context.kv[:, :, 1] *= 1e6
    got, want = (pool[:, 1, context.cache_loc] for pool in context.by_both())
    assert torch.equal(got, want)
    assert got.abs().max() == torch.finfo(dtype).max


@against_twin
def test_keys_near_zero_equals_its_twin():
    """The norm's eps bounds what it scales them by."""
    context = Context(0, 3, 2, 1, 64, torch.float32, torch.float32, torch.float32, DEVICE)
    context.kv *= 1e-5
    got, want = context.by_both()
    assert_same_pool(got, want, torch.float32)
    keys = got[:, 0, context.cache_loc]
    assert 0 < keys.abs().max() < 1, "eps is far above the squares"


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, *FP8])
def test_the_twin_stores_what_the_model_and_sglang_do(kv_dtype, pool_dtype):
    """Bit for bit as the model's `write_context_kv` after its GEMM, in SGLang's pool."""
    from support import engine

    engine.start()
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    context = Context(3, 13, 3, 2, 80, kv_dtype, pool_dtype, torch.float32, "cpu")
    got, want = (
        MHATokenToKVPool(context.pool_shape[2], 4, pool_dtype, 2, 80, 3, "cpu", enable_memory_saver=False)
        for _ in range(2)
    )
    pool = KVPoolPointers.from_pools(got.k_buffer, got.v_buffer, pool_dtype)
    context_kv.write_context_kv(*context.arguments(pool))
    keys, values = context.kv.unbind(2)
    cos, sin = context.table[context.positions].chunk(2, dim=-1)
    options = dict(
        hidden_size=80, variance_epsilon=EPS, variance_size_override=None, override_orig_dtype=None
    )
    options |= dict(cast_x_before_out_mul=False, fp32_residual=False)
    for layer in range(3):
        norm = SimpleNamespace(weight=context.weight[layer], **options)
        normed = inspect.unwrap(RMSNorm.forward_native)(norm, keys[:, layer])
        states = apply_rotary_emb(normed, cos, sin, True), values[:, layer]
        want.set_kv_buffer(None, context.cache_loc, *states, layer_id_override=layer)
    for ours, sglangs in zip([*got.k_buffer, *got.v_buffer], [*want.k_buffer, *want.v_buffer], strict=True):
        assert ours.any() and torch.equal(ours, sglangs)


def pool_buffers(layers: int = 2, shape=(8, 2, 64), dtype=torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for _ in range(layers)]


BYTES = pool_buffers(dtype=torch.uint8)


@pytest.mark.parametrize(
    ("k_buffers", "v_buffers", "dtype", "message"),
    [
        (pool_buffers(), pool_buffers(dtype=torch.float16), None, "must be alike"),
        (pool_buffers(), pool_buffers(shape=(8, 2, 80)), None, "must be alike"),
        (pool_buffers(1), [torch.zeros(8, 4, 64, dtype=torch.bfloat16)[:, :2]], None, "must be alike"),
        (pool_buffers(shape=(2, 2, 4, 64)), pool_buffers(shape=(2, 2, 4, 64)), None, "one contiguous"),
        ([pool_buffers(1)[0].mT], [pool_buffers(1)[0].mT], None, "one contiguous"),
        (BYTES, BYTES, None, "cannot write torch.uint8"),
        (pool_buffers(), pool_buffers(), torch.float8_e5m2, "cannot write torch.float8_e5m2"),
    ],
)
def test_pools_the_kernel_cannot_write_are_refused(k_buffers, v_buffers, dtype, message):
    with pytest.raises(ValueError, match=message):
        KVPoolPointers.from_pools(k_buffers, v_buffers, dtype)


def test_alignment_is_what_all_buffers_have():
    memory = torch.zeros(4096, dtype=torch.bfloat16)

    def at(element: int) -> torch.Tensor:
        return memory[element : element + 256].view(2, 2, 64)

    assert KVPoolPointers.from_pools([at(0)], [at(512)]).slot_alignment == 16
    assert KVPoolPointers.from_pools([at(0)], [at(514)]).slot_alignment == 4


# -- on the device itself


@pytest.mark.gpu
@needs_gpu
def test_no_kernel_synchronises_with_the_host():
    """One CUDA graph captures all of them, and replays on other data."""
    blocks, verdicts = random_blocks(0, 3, 16, "cuda"), random_verdicts(0, 3, 16, "cuda")
    appended = random_appended(0, 3, 16, 16, 64, "cuda")
    context = Context(0, 48, 5, 8, 128, torch.bfloat16, torch.bfloat16, torch.float32, "cuda")
    buffers = torch.full(context.pool_shape, torch.nan, device="cuda", dtype=torch.bfloat16)
    arguments = context.arguments(KVPoolPointers.from_pools(*buffers.unbind(1)))

    def cycle():
        prepared = block.prepare_block(*blocks)
        accepted = accept.accept_blocks(None, *verdicts[1:], block=verdicts[0])
        context_kv.write_context_kv(*arguments, accept_len=accepted.accept_len, block_size=16)
        peagle_rows.append_rows(*appended)
        return *prepared, *accepted

    cycle()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cycle()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cycle()
    for current, other in zip(verdicts[:-1], random_verdicts(1, 3, 16, "cuda")[:-1], strict=True):
        current.copy_(other)
    buffers.fill_(torch.nan)
    graph.replay()
    accepted = accept.accept_blocks_torch(None, *verdicts[1:], block=verdicts[0])
    for got, want in zip(captured, (*block.prepare_block_torch(*blocks), *accepted), strict=True):
        assert torch.equal(got, want)
    options = {"accept_len": accepted.accept_len, "block_size": 16}
    want = context.written_by(context_kv.write_context_kv_torch, **options)
    assert_same_pool(buffers.float(), want, torch.bfloat16)
