"""What is read behind the replay of another CUDA graph, with graphs that forget what a replay may overwrite.

Graphs for several numbers of requests share memory as those of target and draft do.
"""

import itertools
from http.client import HTTPException

import pytest
from serving import DFLASH2_DRAFT, DRAFT, PEAGLE_DRAFT
from support.parity import assert_same
from support.rehearsal.compare import greedy_requests
from support.rehearsal.play import on_cpu, rehearse
from support.rehearsal.stage import Scene
from support.sequence_probs import PROBABILISTIC
from support.servers import wait_for_end

pytestmark = [pytest.mark.server, on_cpu]

IN_EVERY_RUN, IN_FULL = (1, 4), (1, 16, 48)
ROOM = ("--max-total-tokens", 16384, "--context-length", 256)
TOKENS = 8


@pytest.mark.parametrize("loads", [IN_EVERY_RUN, pytest.param(IN_FULL, marks=pytest.mark.rehearsal_full)])
@pytest.mark.parametrize(
    "draft",
    [
        pytest.param(DRAFT, marks=pytest.mark.rehearsal_full, id="dflash"),
        pytest.param(DFLASH2_DRAFT, id="dflash2"),
        pytest.param(PEAGLE_DRAFT, marks=pytest.mark.rehearsal_full, id="peagle"),
    ],
)
def test_greedy_and_drawn_drafts_at_each_load(draft, loads, reference):
    """Greedy requests get the target's answers, alone and beside sampled ones, whose blocks are drawn.

    A step of 48 requests takes ten seconds and more, as kernels are interpreted.
    """
    greedy, sampled = greedy_requests(5, TOKENS), greedy_requests(5, TOKENS, temperature=1.0, top_k=2)
    room = ("--max-running-requests", max(loads), *ROOM)
    with rehearse(Scene("fa3", buckets=loads), draft, *room, *PROBABILISTIC) as played:
        for load, kinds in itertools.product(loads, (greedy, sampled, greedy + sampled)):
            requests = list(itertools.islice(itertools.cycle(kinds), load))
            played.forget()
            answers = played.server.generate_many(requests, load)
            assert played.problems() == [] and played.steps_without_graphs() == []
            assert load // 2 < max(step["bs"] for step in played.notes("step")) <= load
            pairs = [pair for pair in zip(requests, answers, strict=True) if pair[0] in greedy]
            if pairs:
                requests, answers = map(list, zip(*pairs, strict=True))
                assert_same(requests, answers, reference.answers(requests))
        if draft == DFLASH2_DRAFT:
            played.plant("candidates that are not copied")
            with pytest.raises((OSError, HTTPException)):  # of a server that ends
                played.server.generate_many(sampled[:1], 1)
            assert wait_for_end(played.server) not in (None, 0)
            assert "index -1 is out of bounds" in played.server.log()
            assert any("block.probs.ids lies in memory" in problem for problem in played.problems())
