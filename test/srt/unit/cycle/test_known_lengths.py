"""Bounds of lengths that the host knows by itself, without a read from the device."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import get_spec
from support.engine import start

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.attention.flashinfer_plans import backend_class, plans_blocks
from sglang_dflash.srt.plugins import algorithm
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks
from sglang_dflash.srt.speculative.cycle.lengths import KnownLengthsMap, bounds_of, plans_within_bounds
from sglang_dflash.srt.speculative.cycle.plan import CycleInFlight, CyclePlan, CyclesInFlight
from sglang_dflash.srt.speculative.cycle.prompts import Prompts
from sglang_dflash.srt.speculative.dflash_info import UNKNOWN, DFlashDraftInput

NOTHING = torch.empty(0, dtype=torch.int64)
ON_DEVICE = torch.tensor([5, 6, 7, 8])


def draft_input(known: list, rows: list[int]) -> DFlashDraftInput:
    nothing = torch.zeros(len(rows), dtype=torch.int64)
    return DFlashDraftInput(nothing, nothing, future_indices=torch.tensor(rows), known_lens=known)


def decode_batch(known: list, rows: list[int], committed: list[int]) -> SimpleNamespace:
    """Make a batch of requests with `committed` tokens, as far as the host has processed them."""
    return SimpleNamespace(
        spec_info=draft_input(known, rows), reqs=reqs_of(committed), seq_lens_cpu="stale", seq_lens_sum=0
    )


def reqs_of(committed: list[int]) -> list[SimpleNamespace]:
    return [SimpleNamespace(kv=SimpleNamespace(req_pool_idx=0, kv_committed_len=n)) for n in committed]


def launched(ring: CyclesInFlight, width: int, num_requests: int = 2) -> CycleInFlight:
    return ring.launch(CycleInFlight(CyclePlan(whole_blocks(num_requests, width))))


@pytest.fixture
def relay() -> KnownLengthsMap:
    start()
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 9))
    relay = KnownLengthsMap(torch.device("cpu"), SpeculativeAlgorithm.DFLASH, pool)
    relay.publish(torch.arange(4), ON_DEVICE)
    return relay


@pytest.mark.parametrize("known", [[60, 80], []])
def test_the_device_is_asked_for_what_is_not_known(relay, known):
    batch = decode_batch(known, [1, 3], [0, 0])
    batch.spec_info.spread = [9, 9]  # of the last step
    relay.resolve_seq_lens_cpu(batch)
    assert not relay.counts, "no cycle in flight causes this wait"
    assert batch.seq_lens.tolist() == [6, 8], "there it is the device's in any case"
    assert batch.seq_lens_cpu.tolist() == (known or [6, 8]) and batch.seq_lens_sum == sum(known or [6, 8])
    assert batch.spec_info.spread == ([0, 0] if known else None)
    assert relay.needs_cpu_seq_lens


@pytest.mark.parametrize("is_on", [False, True])
def test_backend_and_relay_are_sglangs_unless_bounds_are_on(monkeypatch, is_on):
    start()
    monkeypatch.setenv(DFlashOptions.PLANS_WITHIN_BOUNDS.variable, "1" if is_on else "")
    monkeypatch.setattr(ModelRegistry, "register", lambda *_, **__: None)
    theirs = ATTENTION_BACKENDS["flashinfer"]
    monkeypatch.setitem(ATTENTION_BACKENDS, "flashinfer", theirs)  # restored afterwards
    algorithm.register_in_scheduler()
    assert (ATTENTION_BACKENDS["flashinfer"] is theirs) is not is_on
    algorithm.register()
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 9))
    relay = get_spec(algorithm.NAME).create_future_map(torch.device("cpu"), pool)
    assert type(relay) is (KnownLengthsMap if is_on else FutureMap)


def test_a_cycle_in_flight_gives_bounds(relay):
    cycle = launched(CyclesInFlight(), 8)
    batch = decode_batch([cycle, 80], [1, 3], [50, 0])
    relay.resolve_seq_lens_cpu(batch)
    assert batch.seq_lens_cpu.tolist() == [58, 80] and batch.spec_info.spread == [7, 0]


def test_backends_that_want_no_lengths_get_none(relay):
    relay.needs_cpu_seq_lens = False
    batch = decode_batch([60, 80], [1, 3], [0, 0])
    relay.resolve_seq_lens_cpu(batch)
    assert batch.seq_lens_cpu is None and not relay.needs_cpu_seq_lens


@pytest.mark.parametrize("spec_info", [None, DFlashDraftInput(NOTHING, NOTHING)])
def test_a_prefill_has_its_own(relay, spec_info):
    batch = SimpleNamespace(spec_info=spec_info, seq_lens_cpu="its own")
    relay.resolve_seq_lens_cpu(batch)
    assert batch.seq_lens_cpu == "its own"


def test_bounds_follow_the_cycles_in_flight():
    ring = CyclesInFlight()
    first = launched(ring, 8)
    assert bounds_of(decode_batch([first] * 2, [0, 1], [50, 60])) == ([58, 68], [7, 7])
    second = launched(ring, 1)
    assert bounds_of(decode_batch([second] * 2, [0, 1], [50, 60])) is None, "two cycles are in flight"
    assert ring.complete([3, 0]) is first
    assert bounds_of(decode_batch([second] * 2, [0, 1], [54, 61])) == ([55, 62], [0, 0]), (
        "an anchor-only cycle"
    )
    assert ring.complete([0, 0]) is second
    assert bounds_of(decode_batch([second] * 2, [0, 1], [55, 62])) == ([55, 62], [0, 0]), "a pause"
    ended = decode_batch([second] * 2, [0, 1], [55, 0])
    ended.reqs[1].kv.req_pool_idx = None
    assert bounds_of(ended) is None, "a session has taken over the lengths of a request that ended"


def test_what_is_known_stays_with_its_requests():
    batch = draft_input([60, 70, 80], [1, 2, 3])
    batch.filter_batch(torch.tensor([0, 2]), [0, 2])
    assert batch.known_lens == [60, 80]
    batch.merge_batch(draft_input([9], [0]))
    assert batch.known_lens == [60, 80, 9] and batch.future_indices.tolist() == [1, 3, 0]
    batch = draft_input([UNKNOWN], [3])
    batch.arrivals, arrived = ["earlier"], draft_input([9], [0])
    arrived.arrivals = ["later"]
    batch.merge_batch(arrived)
    assert batch.known_lens == [UNKNOWN, 9] and batch.arrivals == ["earlier", "later"]
    assert bounds_of(SimpleNamespace(spec_info=batch, reqs=reqs_of([0, 0]))) is None


def test_a_prefill_ends_at_known_lengths():
    prompts = Prompts(
        *(None, None, None),
        prefix_lens=[4, 0, 9],
        extend_lens=[3, 2, 1],
        num_running=1,
        is_continued=[True] * 3,
        table_rows=None,
    )
    assert prompts.ends == [7, 2, 10]


def test_other_backends_wait_for_exact_lengths(monkeypatch, caplog):
    without = SimpleNamespace(needs_cpu_seq_lens=False)
    with caplog.at_level("INFO"):
        assert not plans_within_bounds([without, without], "cuda"), "off by default"
        monkeypatch.setenv(DFlashOptions.PLANS_WITHIN_BOUNDS.variable, "1")
        assert plans_within_bounds([without, without], "cuda")
        assert not plans_within_bounds([without, SimpleNamespace()], "cpu")
        assert not caplog.messages
        assert not plans_within_bounds([without, SimpleNamespace()], "cuda")
    assert "plans with exact lengths, so each cycle waits" in caplog.text


def test_flashinfer_waits_for_exact_lengths_unless_bounds_are_on(monkeypatch):
    """Its plans are then its own, in basic mode too."""
    backend = object.__new__(backend_class())
    vars(backend).update(
        dispatch_reason=None, prefill_backend="fa2", use_sliding_window_kv_pool=False, is_nvfp4_kvcache=False
    )
    assert not plans_within_bounds([backend], "cuda") and not plans_blocks(backend)
    monkeypatch.setenv(DFlashOptions.PLANS_WITHIN_BOUNDS.variable, "1")
    assert plans_within_bounds([backend], "cuda") and plans_blocks(backend)
    monkeypatch.setenv(DFlashOptions.BASIC_MODE.variable, "1")
    assert not plans_within_bounds([backend], "cuda") and not plans_blocks(backend)
