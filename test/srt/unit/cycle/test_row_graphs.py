"""Rows, layouts and costs of CUDA graphs that are keyed by rows (without the graphs)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dflash.srt.speculative.cycle import ragged_graphs
from sglang_dflash.srt.speculative.cycle.ragged_graphs import (
    CapturedRows,
    RowBackends,
    reason_for_one_width,
    row_sizes,
    spread_rows,
)
from sglang_dflash.srt.speculative.width.controller import AdaptiveLengths, plan_lengths
from sglang_dflash.srt.speculative.width.policy import Costs

BLOCK = 8
CASES = [(1, 1), (1, 8), (4, 8), (5, 16), (48, 8), (96, 16), (7, 3)]


@pytest.mark.parametrize(("max_requests", "block_size"), CASES)
def test_each_batch_has_a_graph_that_is_a_quarter_larger_at_most(max_requests, block_size):
    sizes = row_sizes(max_requests, block_size)
    assert sizes[0] == 1 and sizes[-1] == max_requests * block_size and max_requests in sizes
    gaps = np.diff(sizes)
    assert (gaps > 0).all() and (gaps <= np.maximum(1, np.array(sizes[:-1]) / 4)).all()


@pytest.mark.parametrize(("max_requests", "block_size"), CASES)
def test_rows_between_two_sizes_have_a_request(max_requests, block_size):
    """No request has more rows than a block, which is what attention kernels are planned for."""
    sizes, random = row_sizes(max_requests, block_size), np.random.default_rng(0)
    for _ in range(300):
        n = int(random.integers(1, max_requests + 1))
        counts = random.integers(1, block_size + 1, n)
        size = sizes[int(np.searchsorted(sizes, counts.sum()))]
        slots = min(size, max_requests)
        spread = spread_rows(counts.tolist(), size, slots, block_size)
        assert len(spread) == slots and sum(spread) == size and max(spread) <= block_size
        assert (spread[:n] >= counts).all()
        if size - counts.sum() <= (slots - n) * block_size:
            assert spread[:n] == counts.tolist(), "padding comes first"


def test_rows_without_a_padding_request_go_to_the_longest():
    assert spread_rows([1, 5, 3], 12, 4, 8) == [1, 5, 3, 3]
    assert spread_rows([1, 5, 3], 12, 3, 8) == [1, 8, 3]
    assert spread_rows([1, 5, 3], 14, 3, 8) == [1, 8, 5]


def test_a_layout_of_all_requests_of_a_graph():
    layout = CapturedRows.from_counts([3, 1, 2, 0], 6, "cpu")
    assert layout.verify_lens.tolist() == [3, 1, 2, 0] and layout.graph_num_tokens == 6
    assert layout.qo_indptr_device.tolist() == [0, 3, 4, 6, 6]
    assert layout.extend_start_loc.tolist() == [0, 3, 4, 6]
    assert layout.padded_to_bucket(padded_bs=4) is layout


def graphs(max_requests: int = 4) -> tuple[RowBackends, SimpleNamespace]:
    """Make backends as they are after the capture, and their runner."""
    ragged = SimpleNamespace(
        capture_bs=row_sizes(max_requests, BLOCK),
        max_requests=max_requests,
        device="cpu",
        _ragged_capture_slots=lambda rows: min(rows, max_requests),
    )
    runner = SimpleNamespace(attn_backend="whole", decode_cuda_graph_runner="whole")
    return RowBackends(runner, BLOCK, ("ragged", ragged)), runner


def test_rows_that_are_nobodys_repeat_the_first_and_write_nowhere():
    backends, runner = graphs()
    layout = backends.select(np.array([4, 0, 2]))
    assert runner.attn_backend == "ragged" and layout.verify_len == 5
    assert layout.num_rows == layout.for_graph.graph_num_tokens == 10  # 9 are somebody's
    blocks = torch.arange(15).view(3, 5)
    assert layout.to_rows(blocks).tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 0]
    assert layout.columns(BLOCK).tolist() == [0, 1, 2, 3, 4, 8, 16, 17, 18, -1]
    logits = torch.arange(10.0)[:, None]
    assert layout.to_blocks(logits)[..., 0].tolist() == [[0, 1, 2, 3, 4], [5] * 5, [6, 7, 8, 8, 8]]
    assert layout.repeat(torch.tensor([7, 8, 9])).tolist() == [7, 7, 7, 7, 7, 8, 9, 9, 9, 7]
    assert backends.select(np.array([4, 0, 2])) is layout
    assert backends.select(np.array([4, 0, 1])) is not layout


def test_anchors_alone_are_padded_too():
    backends, _ = graphs(9)
    layout = backends.select(np.zeros(9, dtype=np.int64))
    assert layout.num_rows == 9, "the largest batch has a separate graph"
    backends, _ = graphs(16)
    layout = backends.select(np.zeros(9, dtype=np.int64))
    assert (layout.verify_len, layout.num_rows) == (1, 10)
    assert layout.repeat(torch.arange(9)).tolist() == [*range(9), 0]


def test_equal_lengths_are_padded_too():
    backends, _ = graphs()
    layout = backends.select(np.array([2, 2, 2]))
    assert (
        layout.verify_len == 3
        and layout.for_graph.graph_num_tokens == 10
        and layout.num_draft_tokens.tolist() == [2, 2, 2]
    )
    layout = backends.select(np.array([3, 3, 3]))
    assert layout.is_rectangle and layout.for_graph.graph_num_tokens == 12
    plan = plan_lengths(backends, np.array([3, 3, 3]), np.zeros(3, dtype=bool))
    assert plan.layout.num_draft_tokens.tolist() == [3, 3, 3] and plan.layout.for_graph is not None


@pytest.mark.parametrize(("lengths", "needs_rectangle"), [([7, 7, 7], False), ([3, 0, 1], True)])
def test_whole_blocks_have_graphs_of_their_own(lengths, needs_rectangle):
    backends, runner = graphs()
    backends.select(np.array([1, 0, 0]))
    layout = backends.select(np.array(lengths), needs_rectangle)
    assert layout.shape == (3, BLOCK) and layout.is_rectangle and layout.for_graph is None
    assert runner.decode_cuda_graph_runner == "whole"


def test_start_up_leaves_the_graphs_of_whole_blocks():
    """Its largest cycle runs on them, though no block is verified whole."""
    backends, runner = graphs()
    chooser = SimpleNamespace(backends=backends, policy=SimpleNamespace(max_draft_tokens=3))
    unlike, whole = AdaptiveLengths.warm_up_plans(chooser, 4)
    assert unlike.layout.num_draft_tokens.tolist() == [3, 0]
    assert whole.verify_len == BLOCK and runner.decode_cuda_graph_runner == "whole"


def test_whole_blocks_tell_who_copies():
    backends, _ = graphs()
    plan = plan_lengths(backends, np.array([7, 7]), np.array([True, False]))
    assert plan.verify_len == BLOCK and plan.layout.for_graph is None and plan.layout.num_rows == 2 * BLOCK
    assert plan.copies.tolist() == [True, False] and plan.layout.num_draft_tokens.tolist() == [7, 7]


def test_a_batch_beyond_the_graphs_has_no_padding():
    backends, _ = graphs()
    layout = backends.select(np.array([4, 0, 2, 1, 1]))
    assert layout.for_graph.graph_num_tokens == layout.num_rows == 13
    assert layout.for_graph.verify_lens.tolist() == [5, 1, 3, 2, 2]


def test_costs_are_those_of_the_next_size():
    loads, widths = np.array([1, 4]), np.array([1, 2, 8])
    verify = np.outer(loads, widths) / 100  # 10 ms a row
    sizes = [1, 2, 4, 8, 16, 32]
    costs = Costs(loads, widths, verify, np.zeros(2), sizes=sizes)
    expected = [0.04] + [0.08] * 4 + [0.16] * 8 + [0.32] * 16
    np.testing.assert_allclose(costs.of_load(4)[0], expected)
    np.testing.assert_allclose(costs.of_load(1)[0], [0.01, 0.02, 0.04, 0.04, 0.08, 0.08, 0.08, 0.08])
    np.testing.assert_allclose(costs.of_load(8)[0][-1], 0.64)  # beyond the graphs


def runner_of(**graph_fields) -> SimpleNamespace:
    fields = dict(disable_padding=False, require_gathered_buffer=False, enable_two_batch_overlap=False)
    return SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(**fields | graph_fields))


FA, TRTLLM, TRITON = "FlashAttentionBackend", "TRTLLMHAAttnBackend", "TritonAttnBackend"


@pytest.mark.parametrize(
    ("name", "fields", "graph_fields", "words"),
    [
        (FA, {}, {}, None),
        (FA, {"has_local_attention": True}, {}, "chunks"),
        (FA, {}, {"disable_padding": True}, "no CUDA graphs"),
        (FA, {}, {"require_gathered_buffer": True}, "data-parallel"),
        (TRTLLM, {"is_xqa_impl": False}, {}, None),
        (TRTLLM, {"is_xqa_impl": True}, {}, "TRTLLMHAAttnBackend verifies one width"),
        (TRITON, {"enable_deterministic": False}, {}, None),
        (TRITON, {"enable_deterministic": True}, {}, "TritonAttnBackend verifies one width"),
        ("AnyBackend", {}, {}, "AnyBackend verifies one width"),
    ],
)
def test_who_verifies_one_width_and_why(name, fields, graph_fields, words):
    attention = type(name, (SimpleNamespace,), {})(**fields)
    reason = reason_for_one_width(runner_of(**graph_fields), attention)
    assert reason is None if words is None else words in reason


def test_without_a_name_that_it_overrides_there_is_one_width(monkeypatch):
    monkeypatch.setattr(ragged_graphs, "missing_name", {ragged_graphs.ROWS: "no such method"}.get)
    reason = reason_for_one_width(runner_of(), type(FA, (SimpleNamespace,), {})())
    assert reason == "no such method"
