"""GatedDeltaNet layers that verify another number of rows of each request."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
import torch
from sglang.srt.layers.attention.linear import gdn_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from support.releases import IS_0_5_22
from support.triton_interpreter import DEVICE, against_twin

from sglang_dflash.srt.hardware_backend.cpu import gated_delta_rule
from sglang_dflash.srt.layers.attention.ragged_rows import gdn_forward_extend, map_rows

BLOCK, HEADS, DIM, WINDOW = 4, 2, 16, 3
CHANNELS = 3 * HEADS * DIM
# Rows of each request. The last two pad a graph: one has rows that are left over, one none.
COUNTS, NUM_PADDING = (2, 4, 1, 3, 2, 0), 2
STATES = torch.tensor([5, 1, 4, 2, -1, -1], dtype=torch.int32)


def starts_of(counts) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32)


def test_the_map_names_each_row_once():
    random = np.random.default_rng(2)
    for _ in range(50):
        counts = random.integers(0, BLOCK + 1, random.integers(1, 9))
        counts[random.integers(len(counts))] = BLOCK
        total, starts = int(counts.sum()), starts_of(counts)
        rows_of_slots, slots_of_rows = map_rows(starts, total, BLOCK)
        assert rows_of_slots.shape == (len(counts), BLOCK) and rows_of_slots.max() < total
        assert torch.equal(rows_of_slots.flatten()[slots_of_rows], torch.arange(total))
        for i, count in enumerate(counts.tolist()):
            assert rows_of_slots[i, :count].tolist() == list(range(starts[i], starts[i + 1]))


@pytest.fixture
def inputs() -> SimpleNamespace:
    torch.manual_seed(4)
    total, slots = sum(COUNTS), 7
    return SimpleNamespace(
        qkv=torch.randn(total, CHANNELS),
        a=torch.randn(total, HEADS),
        b=torch.randn(total, HEADS),
        conv=torch.randn(slots, CHANNELS, WINDOW),
        temporal=torch.randn(slots, HEADS, DIM, DIM),
        weights=torch.randn(CHANNELS, WINDOW + 1),
        bias=torch.randn(CHANNELS),
        A_log=torch.rand(HEADS).log(),
        dt_bias=torch.randn(HEADS),
    )


def verify(inputs, rows: slice, counts, states, kernel, device="cpu"):
    """Run one layer's verify of some rows. Returns outputs, and the states and windows after each row."""
    here = {name: value.to(device) for name, value in vars(inputs).items()}
    layer = SimpleNamespace(
        layer_id=3,
        conv_weights=here["weights"],
        bias=here["bias"],
        activation="silu",
        A_log=here["A_log"],
        dt_bias=here["dt_bias"],
        **dict.fromkeys(("q_dim", "k_dim", "v_dim"), HEADS * DIM),
        **dict.fromkeys(("num_q_heads", "num_k_heads", "num_v_heads"), HEADS),
        **dict.fromkeys(("head_q_dim", "head_k_dim", "head_v_dim"), DIM),
    )
    cache = SimpleNamespace(
        conv=[here["conv"]],
        temporal=here["temporal"],
        intermediate_ssm=torch.zeros(len(counts), BLOCK, HEADS, DIM, DIM, device=device),
        intermediate_conv_window=[torch.zeros(len(counts), BLOCK, CHANNELS, WINDOW, device=device)],
    )
    before = cache.temporal.clone()
    backend = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(mamba2_layer_cache=lambda _: cache, mamba_map={3: 0}, size=8),
        forward_metadata=SimpleNamespace(
            query_start_loc=starts_of(counts).to(device), mamba_cache_indices=states.to(device)
        ),
        verify_intermediate_state_indices=torch.arange(8, dtype=torch.int32, device=device),
        kernel_dispatcher=SimpleNamespace(tree_verify_kernel=kernel),
    )
    batch = SimpleNamespace(
        spec_info=SimpleNamespace(ragged_verify_layout=object()),
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=None,
    )
    qkv, a, b = (here[name][rows] for name in ("qkv", "a", "b"))
    outputs = gdn_forward_extend(None, backend, layer, batch, qkv, a, b)
    assert torch.equal(cache.temporal, before), "verify commits nothing"
    found = outputs[0], cache.intermediate_ssm, cache.intermediate_conv_window[0]
    return [value.cpu() for value in found]


def kernel_of(update) -> SimpleNamespace:
    """Return the part of SGLang's dispatcher that runs a recurrence, the kernel or its twin."""

    def target_verify(*, ssm_states, cache_indices, query_start_loc, **arguments):
        return update(
            **arguments,
            initial_state_source=ssm_states,
            initial_state_indices=cache_indices,
            cu_seqlens=query_start_loc,
            softplus_beta=1.0,
            softplus_threshold=20.0,
            use_qk_l2norm_in_kernel=True,
            disable_state_update=True,
        )

    return SimpleNamespace(target_verify=target_verify)


TWIN = kernel_of(gated_delta_rule.fused_sigmoid_gating_delta_rule_update_cpu)


def test_ragged_rows_equal_each_request_alone(inputs, monkeypatch):
    monkeypatch.setattr(gdn_backend, "causal_conv1d_update", gated_delta_rule.causal_conv1d_update_cpu)
    outputs, states, windows = verify(inputs, slice(None), COUNTS, STATES, TWIN)
    starts = starts_of(COUNTS)
    for i, count in enumerate(COUNTS[:-NUM_PADDING]):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        alone = verify(inputs, rows, (count,), STATES[i : i + 1], TWIN)
        for found, wanted in zip(
            (outputs[rows], states[i, :count], windows[i, :count]),
            (alone[0], alone[1][0, :count], alone[2][0, :count]),
            strict=True,
        ):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@against_twin
def test_sglangs_kernels_on_ragged_rows_equals_its_twin(inputs, monkeypatch):
    room = "fla" if IS_0_5_22 else "linear"
    fused = importlib.import_module(f"sglang.kernels.ops.attention.{room}.fused_sigmoid_gating_recurrent")
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    monkeypatch.setattr(gdn_backend, "causal_conv1d_update", gated_delta_rule.causal_conv1d_update_cpu)
    wanted = verify(inputs, slice(None), COUNTS, STATES, TWIN)
    monkeypatch.setattr(gdn_backend, "causal_conv1d_update", causal_conv1d_update)
    kernel = kernel_of(fused.fused_sigmoid_gating_delta_rule_update)
    found = verify(inputs, slice(None), COUNTS, STATES, kernel, device=DEVICE)
    starts = starts_of(COUNTS)
    for i, count in enumerate(COUNTS[:-NUM_PADDING]):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        for index, part in ((0, rows), (1, (i, slice(count))), (2, (i, slice(count)))):
            torch.testing.assert_close(found[index][part], wanted[index][part], atol=1e-4, rtol=1e-4)
