"""Every mode and layer option of our CPU attention against a plain softmax loop.

TorchNativeSpecAttnBackend in float32 is compared with float64; values are of order 1, tolerance 1e-5.
Unwritten slots hold NaN, so a read out of bounds shows.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from support.engine import Pools, start

from sglang_dflash.srt.hardware_backend.cpu import attention
from sglang_dflash.srt.hardware_backend.cpu.attention import cuts_by_length, is_needed
from sglang_dflash.srt.speculative.dflash_info import DFlashVerifyInput

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

    q: [B, heads, dim]; k, v: [anchor + B, kv_heads, dim]; returns [B, heads * dim] in float64.
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


def largest_error(
    mode: str,
    lengths,
    widths,
    *,
    heads=6,
    kv_heads=2,
    causal=True,
    window=None,
    cap=0.0,
    sinks=False,
    page_size=1,
    seed=0,
) -> float:
    """Return the largest difference over a batch.

    Requests have these committed lengths and this many queries each. mode: "extend", "decode", "verify", or
    "own lengths" to verify different numbers of tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    totals = [n + width for n, width in zip(lengths, widths, strict=True)]
    pools = Pools(
        len(lengths),
        max(totals),
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
        logit_cap=cap,
        sliding_window_size=-1 if window is None else window,
        attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
    )
    options = {"sinks": torch.randn(heads, generator=generator) * 2} if sinks else {}
    keys, values = (
        [torch.randn(total, kv_heads, HEAD_DIM, generator=generator) for total in totals] for _ in range(2)
    )
    queries = [torch.randn(width, heads, HEAD_DIM, generator=generator) for width in widths]
    for request, n in enumerate(lengths):
        where = pools.slots(request, 0, n)
        pools.token_to_kv_pool.set_kv_buffer(layer, where, keys[request][:n], values[request][:n])
    batch = pools.extend([[0] * total for total in totals], lengths)
    if mode == "decode":
        batch.forward_mode = ForwardMode.DECODE
    elif mode != "extend":
        batch.forward_mode, batch.seq_lens = ForwardMode.TARGET_VERIFY, torch.tensor(lengths)
        batch.spec_info = DFlashVerifyInput(
            draft_token_num=widths[0], capture_hidden_mode=CaptureHiddenMode.FULL
        )
        if mode == "own lengths":
            batch.spec_info.ragged = SimpleNamespace(num_draft_tokens=np.array(widths) - 1)

    def attention(input_ids, positions, batch):
        new = [torch.cat([t[n:] for t, n in zip(tensors, lengths)]).flatten(1) for tensors in (keys, values)]
        return layer(torch.cat(queries).flatten(1), *new, batch, **options)

    found = pools.forward(attention, batch)
    expected = torch.cat(
        [
            attend(q, k, v, n, causal, window, cap, options.get("sinks"))
            for q, k, v, n in zip(queries, keys, values, lengths, strict=True)
        ]
    )
    for request, n in enumerate(lengths):  # what the block computed stays in the pool
        stored = pools.token_to_kv_pool.get_key_buffer(1)[pools.slots(request, n, totals[request])]
        assert torch.equal(stored, keys[request][n:])
    difference = (found.double().view_as(expected) - expected).abs().max()
    assert not difference.isnan(), "an unwritten slot was read"
    return difference.item()


@given(
    requests=st.lists(st.tuples(st.integers(0, 24), st.integers(1, 9)), min_size=1, max_size=5),
    mode=st.sampled_from(["verify", "own lengths"]),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 30),
    page_size=st.sampled_from([1, 4]),
    seed=st.integers(0, 1000),
)
@example([(0, 1)], "verify", 1, 1, True, None, 1, 0)
@example([(17, 5), (3, 5), (8, 5), (1, 5)], "verify", 3, 2, False, 3, 16, 0)
@example([(0, 4), (33, 1), (2, 16)], "own lengths", 8, 1, True, 8, 1, 0)
def test_blocks(requests, mode, group, kv_heads, causal, window, page_size, seed):
    lengths, widths = map(list, zip(*requests))
    widths = widths[:1] * len(widths) if mode == "verify" else widths
    shape = {"heads": group * kv_heads, "kv_heads": kv_heads, "page_size": page_size}
    assert largest_error(mode, lengths, widths, causal=causal, window=window, seed=seed, **shape) < TOLERANCE


OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "soft cap": {"cap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 5, "cap": 2.0, "sinks": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    "mode, lengths, widths",
    [
        ("verify", [0, 33, 2], [4, 4, 4]),
        ("own lengths", [9, 30, 2], [5, 2, 1]),
        ("decode", [0, 33, 2], [1, 1, 1]),
        ("extend", [0, 4, 0], [9, 7, 1]),
        ("extend", [0, 11], [80, 70]),  # beyond what is folded into one KV head's queries
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_modes_and_options(mode, lengths, widths, options):
    assert largest_error(mode, lengths, widths, **options) < TOLERANCE


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
