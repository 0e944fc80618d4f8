"""Verify chains and draft blocks on the CPU (TorchNativeSpecAttnBackend) against a plain softmax loop.

float32 against float64, values of order 1: tolerance 1e-5. Slots nobody wrote hold NaN, so a read out of bounds shows.
"""

import math

import pytest
import torch
from engine import Pools
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

TOLERANCE = 1e-5
HEAD_DIM = 16


def sees(query: int, key: int, causal: bool, window: int | None) -> bool:
    """window: positions before the query still in sight, and after it where attention is not causal."""
    if causal:
        return key <= query and (window is None or key >= query - window)
    return window is None or abs(key - query) <= window


def attend(q, k, v, anchor: int, causal: bool, window: int | None) -> torch.Tensor:
    """One request. q: [B, heads, dim]; k, v: [anchor + B, kv_heads, dim]; returns [B, heads * dim] in float64."""
    q, k, v = q.double(), k.double(), v.double()
    output = torch.empty_like(q)
    for slot in range(q.shape[0]):
        for head in range(q.shape[1]):
            shared = head // (q.shape[1] // k.shape[1])
            seen = [key for key in range(k.shape[0]) if sees(anchor + slot, key, causal, window)]
            weights = torch.softmax(k[seen, shared] @ q[slot, head] / math.sqrt(q.shape[2]), dim=0)
            output[slot, head] = weights @ v[seen, shared]
    return output.flatten(1)


def compare(lengths, width, *, heads=4, kv_heads=2, causal=True, window=None, page_size=1, seed=0) -> float:
    """Largest difference over a batch of blocks behind committed contexts of these lengths."""
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
    """Smaller than the block, between block and context, larger than everything."""
    assert compare(lengths, width=5, causal=causal, window=window) < TOLERANCE


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (6, 2), (8, 1)])
def test_grouped_heads(heads, kv_heads, causal):
    assert compare([9, 2], width=4, heads=heads, kv_heads=kv_heads, causal=causal) < TOLERANCE


@pytest.mark.parametrize("width", [1, 2, 16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_widths_and_pages(width, page_size):
    assert compare([30, 1, 16], width=width, page_size=page_size) < TOLERANCE


@settings(max_examples=60, deadline=None)
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
    """The batch is padded to its longest request. Rounding aside (a longer padded row may sum in another order), a
    request's output is the same alone as beside a long one."""

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


@pytest.mark.parametrize("prefix", [0, 4])
def test_other_modes_are_left_to_sglang(prefix):
    """A prefill runs SGLang's own code, before and after a verify on the same backend."""
    width, total = 3, 9
    states = torch.randn(total + width, 2, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    pools = Pools(1, 32, layers=1, kv_heads=2, head_dim=HEAD_DIM)
    layer = RadixAttention(2, HEAD_DIM, HEAD_DIM**-0.5, num_kv_heads=2, layer_id=0)

    def run(batch, rows):
        flat = states[rows].flatten(1)
        return pools.forward(lambda *_: layer(flat, flat, flat, batch), batch)

    pools.token_to_kv_pool.set_kv_buffer(layer, pools.slots(0, 0, prefix), states[:prefix], states[:prefix])
    for _ in range(2):
        found = run(pools.extend([[0] * total], [prefix]), slice(prefix, total))
        expected = attend(states[prefix:total], states[:total], states[:total], prefix, True, None)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE)
        found = run(
            pools.blocks(torch.zeros(1, width, dtype=torch.int64), [total]), slice(total, total + width)
        )
        expected = attend(states[total:], states, states, total, True, None)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE)
