"""The CPU stand-in's GatedDeltaNet operators against transformers' own functions.

Batched, ragged, and in scattered slots.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import softplus
from transformers.models.qwen3_5 import modeling_qwen3_5 as reference

from sglang_dflash.srt.hardware_backend.cpu import gated_delta_rule as ours
from sglang_dflash.srt.hardware_backend.cpu import operators
from sglang_dflash.srt.hardware_backend.cpu.operators import install

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, CHANNELS, WIDTH = 2, 4, 16, 8, 12, 4
NUM_SLOTS = 9
LENGTHS = (1, 2, 63, 64, 65, 130, 200)


def close(left, right, tolerance=2e-5):
    torch.testing.assert_close(left.float(), right.float(), atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(3)


def random_inputs(tokens):
    """Return q, k, v, a, b of concatenated tokens, A_log and dt_bias."""
    heads = [(KEY_HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM)]
    q, k, v = (torch.randn(1, tokens, *shape) for shape in heads)
    a, b = torch.randn(tokens, VALUE_HEADS), torch.randn(tokens, VALUE_HEADS)
    return q, k, v, a, b, torch.rand(VALUE_HEADS).log(), torch.randn(VALUE_HEADS)


def some_tokens(inputs, which):
    """Return the inputs of some tokens: a slice, or a list of indices."""
    q, k, v, a, b, A_log, dt_bias = inputs
    return q[:, which], k[:, which], v[:, which], a[which], b[which], A_log, dt_bias


def expected_rule(function, inputs, state):
    """Return transformers' answer for one request; its state is [heads, key dim, value dim]."""
    q, k, v, a, b, A_log, dt_bias = inputs
    repeat = VALUE_HEADS // KEY_HEADS
    outputs, state = function(
        q.repeat_interleave(repeat, dim=2),
        k.repeat_interleave(repeat, dim=2),
        v,
        g=(-A_log.exp() * softplus(a + dt_bias))[None],
        beta=b.sigmoid()[None],
        initial_state=state.transpose(-1, -2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return outputs, state[0].transpose(-1, -2)


def update(inputs, pool, slots, starts, **aside):
    """Run the recurrence of the stand-in."""
    q, k, v, a, b, A_log, dt_bias = inputs
    return ours.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log, dt_bias, q, k, v, a, b, pool, slots, starts, use_qk_l2norm_in_kernel=True, **aside
    )


def starts_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def test_prompts_in_chunks():
    starts, slots = starts_of(LENGTHS), 1 + torch.randperm(NUM_SLOTS - 1)[: len(LENGTHS)].int()
    inputs = random_inputs(int(starts[-1]))
    q, k, v, a, b, A_log, dt_bias = inputs
    pool = torch.randn(NUM_SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM)
    before = pool.clone()
    g, beta = ours.fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    outputs, _, at_chunks = ours.chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, pool, starts, False, True, slots
    )
    at_chunks = iter(at_chunks[0])
    for i, length in enumerate(LENGTHS):
        own = slice(int(starts[i]), int(starts[i + 1]))
        request, first = some_tokens(inputs, own), before[slots[i]]
        want, state = expected_rule(reference.torch_chunk_gated_delta_rule, request, first)
        close(outputs[:, own], want)
        close(pool[slots[i]], state)
        for tokens in range(0, length, ours.CHUNK):
            known = some_tokens(request, slice(tokens))
            rule = reference.torch_recurrent_gated_delta_rule
            close(next(at_chunks), expected_rule(rule, known, first)[1] if tokens else first)
    assert not list(at_chunks)
    untouched = [slot for slot in range(NUM_SLOTS) if slot not in slots.tolist()]
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("verify", [False, True])
def test_token_by_token(steps, verify):
    bs = 3
    slots, rows = torch.tensor([4, 1, 7], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    inputs = random_inputs(bs * steps)
    pool = torch.randn(NUM_SLOTS, VALUE_HEADS, VALUE_DIM, KEY_DIM)
    aside = torch.full((bs + 1, steps, VALUE_HEADS, VALUE_DIM, KEY_DIM), torch.nan)
    before = pool.clone()
    where = dict(intermediate_states_buffer=aside, intermediate_state_indices=rows) if verify else {}
    outputs = update(inputs, pool, slots, starts_of([steps] * bs), disable_state_update=verify, **where)
    for i in range(bs):
        for kept in range(1, steps + 1):
            part = some_tokens(inputs, slice(i * steps, i * steps + kept))
            want, state = expected_rule(reference.torch_recurrent_gated_delta_rule, part, before[slots[i]])
            if verify:
                close(aside[rows[i], kept - 1], state)
        close(outputs[:, i * steps : (i + 1) * steps], want)
        close(pool[slots[i]], before[slots[i]] if verify else state)
    assert aside[bs].isnan().all()


@pytest.mark.parametrize("with_bias", [False, True])
def test_convolution_of_prompts_and_of_what_follows(with_bias):
    starts, slots = starts_of(LENGTHS), 1 + torch.randperm(NUM_SLOTS - 1)[: len(LENGTHS)].int()
    has_past = torch.tensor([i % 2 == 0 for i in range(len(LENGTHS))])
    x = torch.randn(CHANNELS, int(starts[-1]))
    weights, bias = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS) if with_bias else None
    pool = torch.randn(NUM_SLOTS, CHANNELS, WIDTH - 1)
    before = pool.clone()
    outputs = ours.causal_conv1d_fn_cpu(
        x, weights, bias, "silu", pool, has_past, slots, starts, list(LENGTHS)
    )
    following = torch.randn(len(LENGTHS), CHANNELS)
    next_outputs = ours.causal_conv1d_update_cpu(following, pool, weights, bias, "silu", slots)
    for i, length in enumerate(LENGTHS):
        part = x[None, :, starts[i] : starts[i + 1]]
        past = before[slots[i]][None] * has_past[i]
        everything = torch.cat([past, part, following[i][None, :, None]], dim=-1)
        want = reference.causal_conv1d_fn(everything, weights, bias, "silu")[0, :, WIDTH - 1 :]
        close(outputs[:, starts[i] : starts[i + 1]], want[:, :length])
        close(next_outputs[i], want[:, -1])
        assert torch.equal(pool[slots[i]], everything[0, :, -(WIDTH - 1) :])


@pytest.mark.parametrize("whose", ["twin", "SGLang"])
@pytest.mark.parametrize("positions", [None, [1, 1, 0]])
def test_the_slots_of_snapshots(whose, positions):
    """A request's next buffer is taken, or the one that was planned; a freed request has none."""
    choose = operators
    if whose == "SGLang":
        from support.releases import IS_0_5_22  # loads our platform plugin before any of SGLang's modules

        if IS_0_5_22:
            pytest.skip("SGLang 0.5.22 pins memory here")
        from sglang.srt.managers import schedule_batch as choose
    requests = [SimpleNamespace(kv=SimpleNamespace(mamba_next_track_idx=one)) for one in (1, None, 0)]
    buffers = torch.tensor([[10, 11], [20, 21], [30, 31], [40, 41]])
    batch = SimpleNamespace(
        reqs=requests,
        req_pool_indices=torch.tensor([3, 0, 1]),
        req_to_token_pool=SimpleNamespace(req_index_to_mamba_ping_pong_track_buffer_mapping=buffers),
    )
    choose.set_mamba_track_indices_from_reqs(batch, positions)
    assert batch.mamba_track_buffer_indices == (positions or [1, 0, 0])
    assert batch.mamba_track_indices.tolist() == [41, -1, 20]


def test_a_missing_operator_is_named_and_can_be_probed():
    install()
    assert torch.ops.sgl_kernel.fused_gdn_gating_cpu is ours.fused_gdn_gating_cpu
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")  # SGLang would take its AMX path
    with pytest.raises(AttributeError, match="'sgl_kernel' object has no attribute 'convert_weight_packed'"):
        torch.ops.sgl_kernel.convert_weight_packed(1)


@pytest.mark.parametrize(
    "operator", [ours.causal_conv1d_update_cpu, ours.fused_sigmoid_gating_delta_rule_update_cpu]
)
def test_token_trees_are_refused(operator):
    needed = {name: None for name in operator.__code__.co_varnames[: operator.__code__.co_argcount]}
    with pytest.raises(NotImplementedError, match="chains"):
        operator(**{**needed, "retrieve_parent_token": torch.zeros(1)})
