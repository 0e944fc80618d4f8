"""The CUDA paths of SGLang and the plugin on CPU tensors, against the CPU path.

See `support/rehearsal/` and docs/dev/testing.md. Acceptance is compared exactly, request by request: a
faulty draft changes acceptance only, because the output is always the target's. test_rehearsal_full.py has
more configurations.
"""

from collections.abc import Iterator, Sequence

import pytest
from serving import DRAFT, PEAGLE_DRAFT
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

from sglang_dflash.srt.patching import installed_version
from sglang_dflash.srt.plugins.compatibility import SUPPORTED

pytestmark = [pytest.mark.server, on_cpu]

# Waits, plans and replays between two publications of lengths.
UNDER_THE_DRAFT = ("draft", "wait", "plan", "target")


@pytest.fixture(scope="module")
def expected(servers, reference) -> Expected:
    return Expected(servers, reference)


LATE = Scene("flashinfer", draft="fa3", waits_under_draft=True)


@pytest.fixture(scope="module")
def late(expected) -> Iterator[Rehearsal]:
    expected.answers(DRAFT, greedy_requests())  # first, so that fewer servers run at a time
    with rehearse(LATE, DRAFT, NO_CACHE) as played:
        yield played


def test_dflash_on_flashinfer(expected):
    """By default each decode step waits for the lengths of the last one, before its draft."""
    with expected.rehearsed(Scene("flashinfer"), DRAFT) as played:
        assert_launches(played, "flashinfer-dflash")
        assert set(map(tuple, played.orders())) == {("wait", "plan", "draft", "plan", "target")}
        backends = {(note["role"], note["name"]) for note in played.notes("backend")}
        assert backends == {(role, "FlashInferAttnBackend") for role in ("target", "draft")}


def test_the_wait_under_the_draft(late, expected):
    """The draft is launched with the device's lengths. The verify is planned with exact ones."""
    expected.compare(late, DRAFT, greedy_requests())
    assert_launches(late, "flashinfer-late-dflash")
    assert set(map(tuple, late.orders())) == {UNDER_THE_DRAFT}
    assert set(late.waits()) == {"lengths"}


def test_keys_that_cross_the_edges_of_chunks(late, reference):
    requests = requests_across_chunks()
    late.forget()
    answers = late.server.generate_many(requests, 2)
    assert_same(requests, answers, reference.answers(requests))
    assert late.problems() == [] and set(map(tuple, late.orders())) == {UNDER_THE_DRAFT}


@pytest.fixture
def plant(late) -> Iterator:
    """Plant a fault, send two requests, and return the answers."""

    def plant_and_send(fault: str, requests: Sequence[dict] | None = None) -> list[dict]:
        late.forget()
        late.plant(fault)
        return late.server.generate_many(requests or greedy_requests()[:2], 2)

    yield plant_and_send
    late.plant("")


def test_a_wrong_host_length_is_noticed(late, plant):
    plant("wrong host length")
    assert any("keys on the host" in problem for problem in late.problems())


def test_a_plan_before_the_lengths_is_noticed(late, plant):
    """Its pinned memory may hold the last plan, whose copy waits behind the last verify."""
    plant("no wait")
    assert any("overwritten before its copy is over" in problem for problem in late.problems())
    assert set(map(tuple, late.orders())) == {("draft", "plan", "target")}


def test_a_second_wait_is_noticed(late, plant):
    plant("second wait")
    assert set(map(tuple, late.orders())) == {("wait", *UNDER_THE_DRAFT)}


def test_stale_states_are_noticed(plant, expected, reference):
    """Stale states change the acceptance only: the output is still the target's."""
    requests = greedy_requests()
    answers = plant("stale states")
    assert_same(requests[:2], answers, reference.answers(requests[:2]))
    wanted = expected.answers(DRAFT, requests)[:2]
    assert acceptance(answers) != acceptance(wanted)


@pytest.mark.skipif(installed_version() != SUPPORTED[-1], reason="counts operations of the newest SGLang")
def test_a_new_host_read_is_noticed(late, plant):
    plant("host read")
    with pytest.raises(AssertionError, match="tolist <- dflash_worker.py run_cycle"):
        assert_launches(late, "flashinfer-late-dflash")


def test_a_read_of_rows_that_may_have_another_owner_is_noticed(late, plant):
    plant("late read")
    assert any("SGLang may have rewritten it: ['clone <- " in problem for problem in late.problems())


def test_a_kernel_that_is_compiled_in_a_step_is_noticed(late, plant):
    plant("new kernel")
    assert any("block_offsets_kernel is compiled in a step" in problem for problem in late.problems())


def test_peagle_on_fa3(expected):
    """Blocks begin with pending rows on the draft's page table, without host lengths."""
    with expected.rehearsed(Scene("fa3"), PEAGLE_DRAFT) as played:
        assert_launches(played, "fa3-peagle")
        # A draft block has 14 rows, a verified one 8: SGLang would make a second, larger buffer.
        logits = {note["role"]: note["rows"] for note in played.notes("logits")}
        assert logits == {"target": 4 * 8, "draft": 0}


def test_own_lengths_with_copies_on_fa3(reference, tmp_path):
    """Start-up has compiled every kernel of a cycle that copies."""
    assert_copies_beside_drafts(Scene("fa3"), reference, tmp_path)
