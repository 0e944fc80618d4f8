"""The CUDA paths of SGLang and the plugin on CPU tensors, against the CPU path.

See `support/rehearsal/` and docs/dev/testing.md. Acceptance is compared exactly, request by request: a
faulty draft changes acceptance only, because the output is always the target's. test_rehearsal_full.py has
more configurations.
"""

import itertools
from collections.abc import Iterator, Sequence
from http.client import HTTPException

import pytest
from serving import DFLASH2_DRAFT, DRAFT, PEAGLE_DRAFT
from support.parity import assert_same
from support.rehearsal.compare import (
    NO_CACHE,
    Expected,
    acceptance,
    assert_copies_beside_drafts,
    assert_launches,
    greedy_requests,
    requests_across_chunks,
)
from support.rehearsal.play import Rehearsal, on_cpu, rehearse
from support.rehearsal.stage import Scene
from support.sequence_probs import PROBABILISTIC
from support.servers import wait_for_end

from sglang_dflash.srt.patching import installed_version
from sglang_dflash.srt.plugins.compatibility import SUPPORTED

pytestmark = [pytest.mark.server, on_cpu]

REQUESTS = greedy_requests(3, 16)


@pytest.fixture(scope="module")
def expected(servers, reference) -> Expected:
    return Expected(servers, reference)


@pytest.fixture(scope="module")
def on_flashinfer(expected) -> Iterator[Rehearsal]:
    expected.answers(DRAFT, REQUESTS)  # first, so that fewer servers run at a time
    with rehearse(Scene("flashinfer"), DRAFT, NO_CACHE) as played:
        yield played


def test_dflash_on_flashinfer(on_flashinfer, expected):
    """By default each decode step waits for the lengths of the last one, before its draft."""
    expected.compare(on_flashinfer, DRAFT, REQUESTS)
    assert_launches(on_flashinfer, "flashinfer-dflash")
    assert set(map(tuple, on_flashinfer.orders())) == {("wait", "plan", "draft", "plan", "target")}
    backends = {(note["role"], note["name"]) for note in on_flashinfer.notes("backend")}
    assert backends == {(role, "FlashInferAttnBackend") for role in ("target", "draft")}


def test_keys_that_cross_the_edges_of_chunks(on_flashinfer, reference):
    requests = requests_across_chunks()[:2]
    on_flashinfer.forget()
    answers = on_flashinfer.server.generate_many(requests, 2)
    assert_same(requests, answers, reference.answers(requests))
    assert on_flashinfer.problems() == []


@pytest.fixture
def plant(on_flashinfer) -> Iterator:
    """Plant a fault, send two requests, and return the answers."""

    def plant_and_send(fault: str, requests: Sequence[dict] = REQUESTS[:2]) -> list[dict]:
        on_flashinfer.forget()
        on_flashinfer.plant(fault)
        return on_flashinfer.server.generate_many(requests, 2)

    yield plant_and_send
    on_flashinfer.plant("")


FEW = greedy_requests(2, 8)


@pytest.mark.parametrize(
    "fault, words",
    [
        ("wrong relayed length", "keys on the host"),
        ("late read", "SGLang may have rewritten it: ['clone <- "),
        ("new kernel", "block_offsets_kernel is compiled in a step"),
    ],
)
def test_a_fault_is_noticed(fault, words, on_flashinfer, plant):
    plant(fault, FEW)
    assert any(words in problem for problem in on_flashinfer.problems())


def test_stale_states_are_noticed(plant, expected, reference):
    """Stale states change the acceptance only: the output is still the target's."""
    answers = plant("stale states")
    assert_same(REQUESTS[:2], answers, reference.answers(REQUESTS[:2]))
    assert acceptance(answers) != acceptance(expected.answers(DRAFT, REQUESTS)[:2])


@pytest.mark.skipif(installed_version() != SUPPORTED[-1], reason="counts operations of the newest SGLang")
def test_a_new_host_read_is_noticed(on_flashinfer, plant):
    plant("host read", FEW)
    with pytest.raises(AssertionError, match="tolist <- dflash_worker.py run_cycle"):
        assert_launches(on_flashinfer, "flashinfer-dflash")


def test_peagle_on_fa3(expected):
    """Blocks begin with pending rows on the draft's page table, without host lengths."""
    with expected.rehearsed(Scene("fa3"), PEAGLE_DRAFT, requests=REQUESTS) as played:
        assert_launches(played, "fa3-peagle")
        # A draft block has 14 rows, a verified one 8: SGLang would make a second, larger buffer.
        logits = {note["role"]: note["rows"] for note in played.notes("logits")}
        assert logits == {"target": 4 * 8, "draft": 0}


def test_own_lengths_with_copies_on_fa3(reference, tmp_path):
    """Start-up has compiled every kernel of a cycle that copies."""
    assert_copies_beside_drafts(Scene("fa3"), reference, tmp_path)


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
    """What is read behind the replay of another graph: graphs forget what a replay may overwrite.

    Graphs for several numbers of requests share memory as those of target and draft do. Greedy requests get
    the target's answers, beside sampled ones, whose blocks are drawn. A step of 48 requests takes ten seconds
    and more, as kernels are interpreted.
    """
    greedy, sampled = greedy_requests(5, TOKENS), greedy_requests(5, TOKENS, temperature=1.0, top_k=2)
    both = [request for pair in zip(greedy, sampled, strict=True) for request in pair]
    room = ("--max-running-requests", max(loads), *ROOM)
    with rehearse(Scene("fa3", buckets=loads), draft, *room, *PROBABILISTIC) as played:
        for load, kinds in itertools.product(
            loads, (both,) if loads == IN_EVERY_RUN else (greedy, sampled, both)
        ):
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
