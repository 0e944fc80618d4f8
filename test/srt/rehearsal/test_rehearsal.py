"""The CUDA paths of SGLang and the plugin on CPU tensors, against the CPU path.

See `support/rehearsal/` and docs/dev/rehearsal.md. Acceptance is compared exactly, request by request: a
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

from sglang_dflash.srt.plugins.compatibility import SUPPORTED
from sglang_dflash.srt.plugins.patch import installed_version

pytestmark = [pytest.mark.server, on_cpu]


@pytest.fixture(scope="module")
def expected(servers, reference) -> Expected:
    return Expected(servers, reference)


@pytest.fixture(scope="module")
def flashinfer(expected) -> Iterator[Rehearsal]:
    expected.answers(DRAFT, greedy_requests())  # first, so that fewer servers run at a time
    with rehearse(Scene("flashinfer", plans_within_bounds=True), DRAFT, NO_CACHE) as played:
        yield played


def test_dflash_on_flashinfer(expected):
    """By default the plans are SGLang's, and each decode step waits for the lengths of the last one."""
    with expected.rehearsed(Scene("flashinfer"), DRAFT) as played:
        assert_launches(played, "flashinfer-dflash")
        assert "lengths" in played.waits() and "speculative_plans" not in played.state()
        backends = {(note["role"], note["name"]) for note in played.notes("backend")}
        assert backends == {(role, "FlashInferAttnBackend") for role in ("target", "draft")}


def test_plans_within_bounds(flashinfer, expected):
    expected.compare(flashinfer, DRAFT, greedy_requests())
    assert_launches(flashinfer, "flashinfer-bounds-dflash")
    assert flashinfer.waits() == []


def test_plans_hold_for_lengths_that_the_host_does_not_know(flashinfer, reference):
    """Keys cross the edges of FlashInfer's chunks, and no decode step waits for a length."""
    requests = requests_across_chunks()
    flashinfer.forget()
    answers = flashinfer.server.generate_many(requests, 2)
    assert_same(requests, answers, reference.answers(requests))
    assert flashinfer.problems() == [] and flashinfer.waits() == []
    assert flashinfer.state()["speculative_plans"].keys() == {"plans"}


@pytest.fixture
def plant(flashinfer) -> Iterator:
    """Plant a fault, send two requests, and return the answers."""

    def plant_and_send(fault: str, requests: Sequence[dict] | None = None) -> list[dict]:
        flashinfer.forget()
        flashinfer.plant(fault)
        return flashinfer.server.generate_many(requests or greedy_requests()[:2], 2)

    yield plant_and_send
    flashinfer.plant("")


def test_a_wrong_host_length_is_noticed(flashinfer, plant):
    plant("wrong host length")
    assert any("keys on the host" in problem for problem in flashinfer.problems())


def test_plans_with_plain_upper_bounds_are_noticed(flashinfer, plant):
    plant("plain upper bounds", requests_across_chunks())
    assert any("chunks of" in problem for problem in flashinfer.problems())


@pytest.mark.parametrize("fault", ["no plan", "another chunk than planned"])
def test_without_a_plan_that_holds_the_device_is_asked(fault, flashinfer, plant, reference):
    requests = requests_across_chunks()
    before = flashinfer.state()["speculative_plans"].get("exact_plans", 0)
    assert_same(requests, plant(fault, requests), reference.answers(requests))
    # A cycle that plans twice waits for an event before it reuses a buffer. A CPU's events never wait.
    assert [problem for problem in flashinfer.problems() if "pinned memory" not in problem] == []
    assert flashinfer.state()["speculative_plans"]["exact_plans"] > before


def test_an_overwritten_plan_is_noticed(flashinfer, plant):
    plant("one staging buffer")
    assert any("overwritten before its copy is over" in problem for problem in flashinfer.problems())


def test_stale_states_are_noticed(plant, expected, reference):
    """Stale states change the acceptance only: the output is still the target's."""
    requests = greedy_requests()
    answers = plant("stale states")
    assert_same(requests[:2], answers, reference.answers(requests[:2]))
    wanted = expected.answers(DRAFT, requests)[:2]
    assert acceptance(answers) != acceptance(wanted)


@pytest.mark.skipif(installed_version() != SUPPORTED[-1], reason="counts operations of the newest SGLang")
def test_a_new_host_read_is_noticed(flashinfer, plant):
    plant("host read")
    with pytest.raises(AssertionError, match="tolist <- dflash_worker.py run_cycle"):
        assert_launches(flashinfer, "flashinfer-bounds-dflash")


def test_a_read_of_rows_that_may_have_another_owner_is_noticed(flashinfer, plant):
    plant("late read")
    assert any("SGLang may have rewritten it: ['clone <- " in problem for problem in flashinfer.problems())


def test_a_kernel_that_is_compiled_in_a_step_is_noticed(flashinfer, plant):
    plant("new kernel")
    assert any("block_offsets_kernel is compiled in a step" in problem for problem in flashinfer.problems())


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
