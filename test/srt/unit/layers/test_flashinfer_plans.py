"""FlashInfer plans of blocks, with a planner in Python (`support/rehearsal/flashinfer_planner.py`)."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from support.rehearsal import flashinfer_planner as planner

from sglang_dflash.srt.layers.attention.flashinfer_keys import BlockKeys
from sglang_dflash.srt.layers.attention.flashinfer_plans import (
    ChunkCheck,
    FlashInferBlockPlan,
    PlanCounts,
    Staging,
)
from sglang_dflash.srt.layers.attention.kv_chunks import num_chunks

WIDTH, HEADS = 8, (4, 2, 64)
CPU = torch.device("cpu")


class Planner:
    """FlashInfer's compiled module. Keeps what it planned."""

    def __init__(self):
        self.made: list[planner.Plan] = []

    def plan(
        self, float_workspace, int_workspace, pinned, qo, kv, lengths, rows, bs, q_heads, kv_heads, *rest
    ):
        _, in_graph, head_dim, _, _, _, fixed_chunk, _, _, uniform = rest
        assert kv.diff().tolist() == lengths.tolist()
        made = planner.plan(
            lengths.tolist(), qo.diff().tolist(), (q_heads, kv_heads), num_processors=66, max_rows=rows,
            head_dim=head_dim, in_graph=in_graph, fixed_chunk=fixed_chunk, uniform_queries=uniform,
        )  # fmt: skip
        start = made.information[planner.CHUNK_OFFSET]
        pinned[start : start + 4].view(torch.int32).fill_(made.chunk)
        self.made.append(made)
        return made.information


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class Translator:
    """SGLang's translator. Request row r has the slots 1000 r, 1000 r + 1, ..."""

    reads_are_translated = False

    def __init__(self, req_to_token: object = None):
        self.req_to_token, self.num_writes = req_to_token, 0

    def pack_read_stream(
        self, plan, *, req_pool_indices, seq_lens, indptr, out, num_token_blocks, kv_lens_sum
    ):
        self.num_writes += 1
        assert num_token_blocks is None and kv_lens_sum >= int(seq_lens.sum())
        for row, start, length in zip(req_pool_indices, indptr, seq_lens, strict=False):
            out[start : start + length] = 1000 * row + torch.arange(length)


class Graph:
    """A captured graph of `bs` blocks and its plan. captured: queries of each, if they may differ."""

    def __init__(
        self,
        bs: int,
        shared: BlockKeys | None = None,
        table: object = None,
        num_indices: int = 10_000,
        captured: list[int] | None = None,
    ):
        self.module, self.bs, self.counts = Planner(), bs, PlanCounts()
        self.translator = Translator(table)
        self.wrapper = SimpleNamespace(
            _fixed_batch_size=bs,
            _paged_kv_indptr_buf=torch.zeros(bs + 1, dtype=torch.int32),
            _qo_indptr_buf=torch.zeros(bs + 1, dtype=torch.int32),
            _paged_kv_indices_buf=torch.zeros(num_indices, dtype=torch.int32),
            _float_workspace_buffer=None,
            _int_workspace_buffer=None,
            _cached_module=self.module,
        )
        width = WIDTH if captured is None else 0
        self.shares = shared is not None and shared.share_with(self.wrapper, width, self.translator)
        self.keys = shared if self.shares else BlockKeys(self.wrapper, width, self.translator)
        queries = captured or [WIDTH] * bs
        self.plan = FlashInferBlockPlan(
            self.wrapper, width, sum(queries), HEADS, self.keys, Staging(1 << 16, CPU, self.counts)
        )
        self.replay([1] * bs, None, [1 + n for n in queries], counts=captured)  # captures

    def replay(
        self,
        host: list[int],
        spread: list[int] | None,
        device: list[int],
        cycle: object = None,
        counts: list[int] | None = None,
    ) -> planner.Plan:
        """Plan with the host's lengths, and return the last plan.

        device: the true numbers of keys. cycle: SGLang's plan of its slots, if another graph has the same.
        counts: queries of each request, if they differ.
        """
        layout = None
        if counts is not None:
            from sglang_dflash.srt.speculative.cycle.ragged_graphs import GraphLayout  # imports SGLang

            layout = GraphLayout.from_counts(counts, sum(counts), "cpu")
        queries = counts or [WIDTH] * self.bs
        self.plan.prepare(
            SimpleNamespace(
                seq_lens=torch.tensor(device) - torch.tensor(queries),
                seq_lens_cpu=torch.tensor(host),
                req_pool_indices=torch.arange(self.bs),
                kv_loc_plan=cycle or object(),
                spec_info=SimpleNamespace(spread=spread, draft_token_num=WIDTH, ragged_verify_layout=layout),
            )
        )
        assert self.wrapper._paged_kv_indptr_buf.tolist() == offsets(device).tolist()
        assert self.wrapper._qo_indptr_buf.tolist() == offsets(queries).tolist()
        slots = [1000 * row + key for row, length in enumerate(device) for key in range(length)]
        assert self.wrapper._paged_kv_indices_buf[: sum(device)].tolist() == slots
        return self.module.made[-1]


def test_a_plan_holds_where_a_chunk_ends():
    graph = Graph(4)
    made = graph.replay([135, 500, 1, 1], [7, 7], [128, 493, 1 + WIDTH, 1 + WIDTH])
    assert made.information == graph.module.made[0].information, "the layout of the capture"
    for first in range(128, 136):
        device = [first, 500, 1 + WIDTH, 1 + WIDTH]
        assert planner.wrong_rows(made, device) == 0


def test_requests_with_numbers_of_queries_of_their_own():
    """The last lane pads the batch and the one before it has no row."""
    graph = Graph(4, captured=[2, 2, 2, 2])
    made = graph.replay([135, 500, 1, 1], [7, 7], [125, 497, 1, 4], counts=[3, 2, 0, 3])
    assert made.information == graph.module.made[1].information, "the layout of the capture"
    assert made.queries == [3, 2, 0, 3]
    shorter = WIDTH - 3
    for first in range(128 - shorter, 136 - shorter):
        assert planner.wrong_rows(made, [first, 500 - WIDTH + 2, 1, 4]) == 0


def test_exact_lengths_are_planned_as_they_are():
    made = Graph(2).replay([400, 40], None, [400, 40])
    assert made.lengths == [400, 40] and made.chunk == 128


def test_without_a_plan_the_device_is_asked(caplog, monkeypatch):
    monkeypatch.setattr("sglang_dflash.srt.layers.attention.flashinfer_plans.choose_chunk", lambda *_: None)
    graph = Graph(1)
    made = graph.replay([300], [40], [270])
    assert made.lengths == [270] and graph.counts["exact_plans"] == 1


def test_a_plan_that_does_not_hold_is_made_again(monkeypatch):
    """FlashInfer may search for another chunk than this project expects of it."""
    from sglang_dflash.srt.layers.attention import flashinfer_plans, kv_chunks

    monkeypatch.setattr(
        flashinfer_plans, "choose_chunk", lambda least, most, *_: kv_chunks.ChunkChoice(most, None, 999)
    )
    graph = Graph(1)
    assert graph.replay([135], [7], [128]).lengths == [128]
    assert graph.replay([127], [7], [125]).lengths == [127], "this one holds as it is"


def test_two_graphs_of_a_cycle_write_its_keys_once():
    table = object()
    draft = Graph(2, table=table)
    target = Graph(2, draft.keys, table)
    assert target.shares and target.wrapper._paged_kv_indices_buf is draft.wrapper._paged_kv_indices_buf
    before = draft.translator.num_writes
    for length in (130, 137):
        cycle = object()
        for graph in (draft, target):
            graph.replay([length, 60], None, [length, 60], cycle)
    assert draft.translator.num_writes == before + 2 and target.translator.num_writes == 0
    target.replay([90, 61], None, [90, 61])  # a cycle that drafts nothing
    assert draft.translator.num_writes == before + 3


@pytest.mark.parametrize("other", [{"bs": 3}, {"table": object()}, {"num_indices": 10_001}])
def test_a_graph_with_other_keys_keeps_its_own(other):
    table = object()
    target = Graph(**{"bs": 2, "shared": Graph(2, table=table).keys, "table": table} | other)
    assert not target.shares


def test_two_buffers_take_turns():
    staging = Staging(16, CPU, PlanCounts())
    first, second, third = (staging.next().data_ptr() for _ in range(3))
    assert first == third != second


def test_the_check_ends_the_server_a_plan_later():
    check = ChunkCheck(PlanCounts())
    check.start(offsets([130, 60]), [135, 60], 128)
    check.start(offsets([128, 60]), [135, 60], 128)
    with pytest.raises(RuntimeError, match=r"planned for \[2, 1\] chunks of 128 keys, .* found \[1, 1\]"):
        check.start(offsets([130, 60]), [135, 60], 128)
    assert num_chunks(135, 128) == 2
