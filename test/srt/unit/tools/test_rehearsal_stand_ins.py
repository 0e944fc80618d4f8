"""Stand-ins for a GPU: graphs that detect stale reads, and attention."""

import pytest
import torch
from support.rehearsal.attention import attend, merge
from support.rehearsal.graphs import CaptureError, GraphBackend, StaleRead, kernel
from support.rehearsal.prefill_graphs import Segment


class OneGraph(GraphBackend):
    """A graph backend with one graph, of a target."""

    replays = {"target": 0, "draft": 0}

    def __init__(self):
        self._role = "target"
        self._graphs, self._outputs = {}, {}

    def drop_operations(self, key: str) -> None:
        """Let replays of a graph run no operation."""
        self._graphs[key].nodes.clear()


@pytest.fixture
def graph(monkeypatch) -> OneGraph:
    monkeypatch.setattr("support.rehearsal.report.note", lambda *_, **__: None)
    return OneGraph()


def test_a_replay_reads_its_inputs_anew(graph):
    static, weight = torch.ones(3), torch.arange(3.0)
    graph.capture_one("shape", lambda: (static * weight).cumsum(0)[1:])
    static.fill_(2)
    assert graph.replay("shape", None).tolist() == [2, 6]
    static.zero_()
    assert graph.replay("shape", None).tolist() == [0, 0]


def test_a_replay_writes_in_place(graph):
    static, pool = torch.ones(2), torch.zeros(4)

    def forward():
        pool[1:3].copy_(static + 1)
        return pool

    graph.capture_one("shape", forward)
    pool.zero_(), static.fill_(4)
    assert graph.replay("shape", None).tolist() == [0, 5, 5, 0]


def test_a_kernel_is_one_operation(graph):
    """A kernel's body may read values, because it runs anew at each replay."""
    static = torch.tensor([2])
    repeat = kernel("repeat", lambda n: torch.full((4,), n.item()))
    graph.capture_one("shape", lambda: repeat(static) + 1)
    static.fill_(5)
    assert graph.replay("shape", None).tolist() == [6, 6, 6, 6]


def test_memory_that_nobody_keeps_is_not_read(graph):
    """Reading a freed tensor is an error: a real graph would read reused memory."""
    made_for_this_step = torch.ones(3)
    graph.capture_one("shape", lambda: made_for_this_step * 2)
    assert graph.replay("shape", None).tolist() == [2, 2, 2]
    made_for_this_step = None
    with pytest.raises(StaleRead, match="mul"):
        graph.replay("shape", None)


def test_a_replay_clears_the_results_of_the_previous_one(graph):
    kept = {}

    def forward():
        kept["early"] = torch.ones(2)
        return kept["early"] * 1

    graph.capture_one("shape", forward)
    out = graph.replay("shape", None)
    graph.drop_operations("shape")
    assert out.tolist() == [1, 1] and graph.replay("shape", None).isnan().all()


@pytest.mark.parametrize(
    "read", [torch.Tensor.item, lambda t: bool(t), lambda t: t.nonzero(), lambda t: t[t > 0]]
)
def test_a_host_read_cannot_be_captured(read, graph):
    static = torch.ones(1)
    with pytest.raises(CaptureError, match="not permitted"):
        graph.capture_one("shape", lambda: read(static))


def test_attention_counts_positions_from_the_end():
    """Compare with PyTorch's attention, for queries at positions 3 and 4 of five.

    Two query heads share one KV head.
    """
    rng = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(n, h, 8, generator=rng) for n, h in ((2, 2), (5, 1), (5, 1)))
    for causal, back, ahead, seen in (
        (False, -1, -1, [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
        (True, -1, -1, [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        (True, 1, -1, [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]),
        (False, 1, 0, [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]),
    ):
        out, _ = attend(q, keys, values, causal=causal, scale=0.3, back=back, ahead=ahead)
        want = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1),
            keys.transpose(0, 1).expand(2, -1, -1),
            values.transpose(0, 1).expand(2, -1, -1),
            attn_mask=torch.tensor(seen).bool(),
            scale=0.3,
        )
        torch.testing.assert_close(out, want.transpose(0, 1))


def test_two_parts_of_the_keys_merge_to_the_whole():
    rng = torch.Generator().manual_seed(1)
    q, keys, values = (torch.randn(n, 2, 8, generator=rng) for n in (3, 7, 7))
    options = {"causal": False, "scale": 0.4}
    parts = [attend(q, keys[part], values[part], **options) for part in (slice(0, 4), slice(4, 7))]
    out, lse = merge(*parts[0], *parts[1])
    want, want_lse = attend(q, keys, values, **options)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def test_a_graph_with_a_break():
    """Between two segments the host calls something; a replay reads nothing of the last one."""
    static, read = torch.ones(3), []
    segments = Segment(), Segment()
    segments[0].capture_begin()
    doubled = static * 2
    segments[0].capture_end()
    read.append(doubled.tolist())
    segments[1].capture_begin()
    total = doubled.sum()
    segments[1].capture_end()
    static.fill_(5)
    for segment in segments:
        segment.recorder.forget()
    assert doubled.isnan().all() and total.isnan()
    segments[0].replay()
    read.append(doubled.tolist())
    segments[1].replay()
    assert read == [[2, 2, 2], [10, 10, 10]] and total == 30
