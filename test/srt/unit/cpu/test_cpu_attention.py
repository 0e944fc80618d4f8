"""Every mode and layer option of our CPU attention against a plain softmax loop.

TorchNativeSpecAttnBackend in float32 is compared with float64; values are of order 1, tolerance 1e-5.
Unwritten slots hold NaN, so a read out of bounds shows.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from support.engine import Pools, start

from sglang_dflash.srt.hardware_backend.cpu import attention
from sglang_dflash.srt.hardware_backend.cpu.attention import (
    TorchNativeSpecAttnBackend,
    cuts_by_length,
    is_needed,
)

TOLERANCE = 1e-5
HEAD_DIM = 16


@pytest.fixture(params=[1, 1 << 20], ids=["many segments", "one segment"], autouse=True, scope="module")
def segment_cost(request):
    """Run this file twice: unequal requests cut into segments everywhere, and nowhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "SEGMENT_COST", request.param)
        yield


def padding(lengths, cuts) -> int:
    edges = [0, *cuts, len(lengths)]
    return sum((end - start) * lengths[end - 1] for start, end in zip(edges, edges[1:])) - sum(lengths)


@given(lengths=st.lists(st.integers(0, 900), min_size=1, max_size=20).map(sorted), cost=st.integers(0, 600))
def test_cuts_spare_padding(lengths, cost):
    """The cuts pay for themselves, and no further cut would."""
    cuts = cuts_by_length(lengths, cost)
    assert cuts == sorted(set(cuts)) and all(0 < cut < len(lengths) for cut in cuts)
    assert padding(lengths, []) - padding(lengths, cuts) >= cost * len(cuts)
    for more in set(range(1, len(lengths))) - set(cuts):
        assert padding(lengths, cuts) - padding(lengths, sorted([*cuts, more])) <= cost


def sees(query: int, key: int, causal: bool, window: int | None) -> bool:
    """Return whether a query sees a key.

    window: positions in sight before the query, and after it if attention is not causal.
    """
    if causal:
        return key <= query and (window is None or key >= query - window)
    return window is None or abs(key - query) <= window


def attend(
    q, k, v, anchor: int, causal: bool, window: int | None, cap: float = 0.0, sinks=None
) -> torch.Tensor:
    """Attend for one request.

    q: [B, heads, dim]; k, v: [anchor + B, kv_heads, dim or another]; returns [B, heads * dim] in float64.
    cap: scores s become cap * tanh(s / cap). sinks: [heads], a score of each head whose weight goes
    nowhere.
    """
    q, k, v = q.double(), k.double(), v.double()
    output = q.new_empty(*q.shape[:2], v.shape[2])
    for slot in range(q.shape[0]):
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // k.shape[1])
            seen = [key for key in range(k.shape[0]) if sees(anchor + slot, key, causal, window)]
            scores = k[seen, shared] @ q[slot, head] / math.sqrt(q.shape[2])
            if cap:
                scores = cap * torch.tanh(scores / cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head].double()[None]))
            output[slot, head] = torch.softmax(scores, dim=0)[: len(seen)] @ v[seen, shared]
    return output.flatten(1)


def compare(lengths, width, *, heads=4, kv_heads=2, causal=True, window=None, page_size=1, seed=0) -> float:
    """Return the largest difference over a batch of blocks behind contexts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    pools = Pools(
        len(lengths),
        max(lengths) + width,
        layers=2,
        kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        page_size=page_size,
        seed=seed,
    )
    layer = RadixAttention(
        heads,
        HEAD_DIM,
        HEAD_DIM**-0.5,
        num_kv_heads=kv_heads,
        layer_id=1,
        sliding_window_size=-1 if window is None else window,
        attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
    )
    keys = [torch.randn(n + width, kv_heads, HEAD_DIM, generator=generator) for n in lengths]
    values = [torch.randn(n + width, kv_heads, HEAD_DIM, generator=generator) for n in lengths]
    queries = torch.randn(len(lengths), width, heads, HEAD_DIM, generator=generator)
    for request, n in enumerate(lengths):
        where = pools.slots(request, 0, n)
        pools.token_to_kv_pool.set_kv_buffer(layer, where, keys[request][:n], values[request][:n])

    def attention(input_ids, positions, batch):
        new_keys = torch.cat([k[-width:] for k in keys])
        new_values = torch.cat([v[-width:] for v in values])
        return layer(queries.flatten(0, 1).flatten(1), new_keys.flatten(1), new_values.flatten(1), batch)

    batch = pools.blocks(torch.zeros(len(lengths), width, dtype=torch.int64), lengths)
    found = pools.forward(attention, batch).view(len(lengths), width, -1)
    expected = [attend(queries[i], keys[i], values[i], n, causal, window) for i, n in enumerate(lengths)]
    difference = (found.double() - torch.stack(expected)).abs().max()
    assert not difference.isnan(), "a slot that nobody had written was read"
    for request, n in enumerate(lengths):  # what the block computed stays in the pool
        stored = pools.token_to_kv_pool.get_key_buffer(1)[pools.slots(request, n, n + width)]
        assert torch.equal(stored, keys[request][n:])
    return difference.item()


CONTEXTS = [[0], [1], [7], [0, 0], [5, 5, 5], [0, 33, 2], [17, 3, 8, 1]]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", CONTEXTS, ids=str)
def test_contexts(lengths, causal):
    assert compare(lengths, width=5, causal=causal) < TOLERANCE


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 3, 8, 100])
@pytest.mark.parametrize("lengths", [[20], [0, 33, 2], [6, 6]], ids=str)
def test_windows(lengths, window, causal):
    """Windows are smaller than the block, between block and context, larger than everything."""
    assert compare(lengths, width=5, causal=causal, window=window) < TOLERANCE


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (6, 2), (8, 1)])
def test_grouped_heads(heads, kv_heads, causal):
    assert compare([9, 2], width=4, heads=heads, kv_heads=kv_heads, causal=causal) < TOLERANCE


@pytest.mark.parametrize("width", [1, 2, 16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_widths_and_pages(width, page_size):
    assert compare([30, 1, 16], width=width, page_size=page_size) < TOLERANCE


@given(
    lengths=st.lists(st.integers(0, 24), min_size=1, max_size=5),
    width=st.integers(1, 9),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 30),
    page_size=st.sampled_from([1, 4]),
    seed=st.integers(0, 1000),
)
def test_anything(lengths, width, group, kv_heads, causal, window, page_size, seed):
    shape = {"heads": group * kv_heads, "kv_heads": kv_heads, "page_size": page_size}
    assert compare(lengths, width, causal=causal, window=window, seed=seed, **shape) < TOLERANCE


def test_a_request_does_not_depend_on_its_neighbours():
    """A request's output is the same alone as next to a long one.

    The batch is padded to its longest request, and a longer padded row may sum in another order, so
    rounding may differ.
    """

    def output(lengths):
        pools = Pools(2, 64, layers=1, kv_heads=1, head_dim=HEAD_DIM)
        layer = RadixAttention(1, HEAD_DIM, HEAD_DIM**-0.5, num_kv_heads=1, layer_id=0)
        states = torch.randn(64, 1, HEAD_DIM, generator=torch.Generator().manual_seed(0))
        for request, n in enumerate(lengths):
            pools.token_to_kv_pool.set_kv_buffer(layer, pools.slots(request, 0, n), states[:n], states[:n])
        block = states[:4].flatten(1).repeat(len(lengths), 1)
        batch = pools.blocks(torch.zeros(len(lengths), 4, dtype=torch.int64), lengths)
        return pools.forward(lambda *_: layer(block, block, block, batch), batch)[:4]

    torch.testing.assert_close(output([6]), output([6, 50]), rtol=0, atol=1e-6)


OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "soft cap": {"cap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 5, "cap": 2.0, "sinks": True},
}
HEADS, KV_HEADS = 6, 2


def run_mode(mode: str, lengths, widths, *, window=None, cap=0.0, sinks=False, seed=0) -> float:
    """Return the largest difference over a batch: a decode step, a prefill, or verify chains.

    Requests have these committed lengths and this many queries each.
    """
    generator = torch.Generator().manual_seed(seed)
    pools = Pools(len(lengths), 128, layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, seed=seed)
    layer = RadixAttention(
        HEADS,
        HEAD_DIM,
        HEAD_DIM**-0.5,
        num_kv_heads=KV_HEADS,
        layer_id=0,
        logit_cap=cap,
        sliding_window_size=-1 if window is None else window,
    )
    options = {"sinks": torch.randn(HEADS, generator=generator) * 2} if sinks else {}
    totals = [n + width for n, width in zip(lengths, widths, strict=True)]
    keys, values = (
        [torch.randn(total, KV_HEADS, HEAD_DIM, generator=generator) for total in totals] for _ in range(2)
    )
    queries = [torch.randn(width, HEADS, HEAD_DIM, generator=generator) for width in widths]
    for request, n in enumerate(lengths):
        where = pools.slots(request, 0, n)
        pools.token_to_kv_pool.set_kv_buffer(layer, where, keys[request][:n], values[request][:n])
    if mode == "extend":
        batch = pools.extend([[0] * total for total in totals], lengths)
    else:
        batch = pools.blocks(torch.zeros(len(lengths), widths[0], dtype=torch.int64), lengths)
    if mode == "decode":
        batch.forward_mode, batch.seq_lens, batch.spec_info = ForwardMode.DECODE, batch.seq_lens + 1, None

    def attention(input_ids, positions, batch):
        new = [torch.cat([t[n:] for t, n in zip(tensors, lengths)]).flatten(1) for tensors in (keys, values)]
        return layer(torch.cat(queries).flatten(1), *new, batch, **options)

    found = pools.forward(attention, batch).view(-1, HEADS * HEAD_DIM).split(list(widths))
    worst = 0.0
    for q, k, v, n, output in zip(queries, keys, values, lengths, found, strict=True):
        expected = attend(q, k, v, n, True, window, cap, options.get("sinks"))
        worst = max(worst, (output.double() - expected).abs().max().item())
    return worst


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "mode, lengths, widths",
    [
        ("verify", [0, 33, 2], [4, 4, 4]),
        ("verify", [9], [5]),
        ("decode", [0, 33, 2], [1, 1, 1]),
        ("extend", [0, 4, 0], [9, 7, 1]),
        ("extend", [0, 11], [80, 70]),  # beyond what is folded into one KV head's queries
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_modes_and_options(mode, lengths, widths, options):
    assert run_mode(mode, lengths, widths, **options) < TOLERANCE


def test_latent_keys():
    """MLA as SGLang's models absorb it: one latent per token is the key of every head.

    Its first part is the value.
    """
    rank, rope, heads, lengths, width = 24, 8, 4, [7, 0, 19], 3
    generator = torch.Generator().manual_seed(2)
    pools = Pools(len(lengths), 32, layers=1, kv_heads=1, head_dim=HEAD_DIM)
    pools.token_to_kv_pool = MLATokenToKVPool(
        256, 1, torch.float32, rank, rope, 1, "cpu", enable_memory_saver=False
    )
    pools.backend = TorchNativeSpecAttnBackend(pools)
    layer = RadixAttention(
        heads, rank + rope, (rank + rope) ** -0.5, num_kv_heads=1, layer_id=0, v_head_dim=rank
    )
    latents = [torch.randn(n + width, 1, rank + rope, generator=generator) for n in lengths]
    queries = torch.randn(len(lengths), width, heads, rank + rope, generator=generator)
    for request, (n, latent) in enumerate(zip(lengths, latents)):
        pools.token_to_kv_pool.set_kv_buffer(layer, pools.slots(request, 0, n), latent[:n], None)

    def attention(input_ids, positions, batch):
        new = torch.cat([latent[-width:] for latent in latents])
        return layer(queries.flatten(0, 1).flatten(1), new, new[..., :rank].contiguous(), batch)

    batch = pools.blocks(torch.zeros(len(lengths), width, dtype=torch.int64), lengths)
    found = pools.forward(attention, batch).view(len(lengths), width, -1)
    for request, (n, latent) in enumerate(zip(lengths, latents)):
        expected = attend(queries[request], latent, latent[..., :rank], n, True, None)
        torch.testing.assert_close(found[request].double(), expected, rtol=0, atol=TOLERANCE)


def test_a_server_without_a_draft_gets_it_on_request(monkeypatch):
    """SGLang's own can run this model, so it does unless ours is asked for."""
    start()
    runner = SimpleNamespace(
        spec_algorithm=SpeculativeAlgorithm.NONE,
        use_mla_backend=False,
        token_to_kv_pool=None,
        model=torch.nn.Linear(1, 1),
    )
    assert not is_needed(runner)
    monkeypatch.setenv("SGLANG_DFLASH_CPU_LAYERS", "1")
    assert is_needed(runner)
