"""A stand-in for CUDA graphs, which detects stale reads."""

import pytest
import torch
from support.rehearsal.graphs import CaptureError, GraphBackend, StaleRead, is_in_pool, kernel


class OneGraph(GraphBackend):
    """A graph backend with one graph, of a target."""

    replays = {"target": 0, "draft": 0}

    def __init__(self):
        self._role = "target"
        self._graphs, self._outputs = {}, {}


@pytest.fixture
def graph(monkeypatch) -> OneGraph:
    monkeypatch.setattr("support.rehearsal.report.note", lambda *_, **__: None)
    return OneGraph()


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


def test_a_replay_overwrites_what_other_graphs_have_left(graph):
    """They share a pool. A real graph may have its results in the memory of another one's."""
    static = torch.ones(2)
    for size in (2, 1):
        graph.capture_one(size, lambda size=size: (static[:size] * 2,))
    [left], copied = graph.replay(2, None), graph.replay(2, None)[0].clone()
    assert is_in_pool(left) and not is_in_pool(static)
    graph.replay(1, None)
    assert left.isnan().all() and copied.tolist() == [2, 2]


@pytest.mark.parametrize(
    "read", [torch.Tensor.item, lambda t: bool(t), lambda t: t.nonzero(), lambda t: t[t > 0]]
)
def test_a_host_read_cannot_be_captured(read, graph):
    static = torch.ones(1)
    with pytest.raises(CaptureError, match="not permitted"):
        graph.capture_one("shape", lambda: read(static))
