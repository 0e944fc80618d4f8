"""Lengths that the host knows by itself, without a read from the device."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from support.engine import start

from sglang_dflash.srt.speculative.cycle.known_lengths import resolving_known_lengths
from sglang_dflash.srt.speculative.dflash_info import Cycle, DFlashDraftInput, Prompts

ON_DEVICE = torch.tensor([5, 6, 7, 8])


def draft_input(known: list[int] | None, rows: list[int]) -> DFlashDraftInput:
    lens = None if known is None else torch.tensor(known)
    nothing = torch.zeros(len(rows), dtype=torch.int64)
    return DFlashDraftInput(nothing, nothing, future_indices=torch.tensor(rows), new_seq_lens_cpu=lens)


@pytest.fixture
def relay() -> FutureMap:
    start()
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 9))
    relay = FutureMap(torch.device("cpu"), SpeculativeAlgorithm.DFLASH, pool)
    relay.publish(torch.arange(4), ON_DEVICE)
    return relay


@pytest.mark.parametrize("known", [[60, 80], None])
def test_the_device_is_asked_for_what_is_not_known(relay, known):
    batch = SimpleNamespace(
        spec_info=draft_input(known, [1, 3]), reqs=[1, 2], seq_lens_cpu="stale", seq_lens_sum="stale"
    )
    resolving_known_lengths()(relay, batch)
    assert batch.seq_lens.tolist() == [6, 8], "there it is the device's in any case"
    assert batch.seq_lens_cpu.tolist() == (known or [6, 8]) and batch.seq_lens_sum == sum(known or [6, 8])
    assert relay.needs_cpu_seq_lens


def test_backends_that_want_no_lengths_get_none(relay):
    relay.needs_cpu_seq_lens = False
    batch = SimpleNamespace(spec_info=draft_input([60, 80], [1, 3]), reqs=[1, 2])
    resolving_known_lengths()(relay, batch)
    assert batch.seq_lens_cpu is None and not relay.needs_cpu_seq_lens


@pytest.mark.parametrize("spec_info", [None, DFlashDraftInput.empty(torch.device("cpu"))])
def test_a_prefill_has_its_own(relay, spec_info):
    batch = SimpleNamespace(spec_info=spec_info, seq_lens_cpu="its own")
    resolving_known_lengths()(relay, batch)
    assert batch.seq_lens_cpu == "its own"


def test_what_is_known_stays_with_its_requests():
    batch = draft_input([60, 70, 80], [1, 2, 3])
    batch.filter_batch(torch.tensor([0, 2]), [0, 2])
    assert batch.new_seq_lens_cpu.tolist() == [60, 80]
    batch.merge_batch(draft_input([9], [0]))
    assert batch.new_seq_lens_cpu.tolist() == [60, 80, 9] and batch.future_indices.tolist() == [1, 3, 0]
    batch.filter_batch(torch.tensor([1]))  # nobody says on the host which
    assert batch.new_seq_lens_cpu is None
    batch.merge_batch(draft_input([9], [0]))
    assert batch.new_seq_lens_cpu is None


def test_a_plain_cycle_commits_one_token_and_a_prefill_its_own():
    def cycle(width: int, is_exact: bool) -> Cycle:
        tokens = torch.zeros(2, 4, dtype=torch.int64)
        lens = torch.tensor([5, 7])
        whole = Cycle(2, lens, lens, lens, tokens, tokens, tokens.flatten(), None, True, is_exact=is_exact)
        return whole.narrowed(width)

    assert cycle(1, True).next_committed_host.tolist() == [6, 8]
    assert cycle(2, True).next_committed_host is None and cycle(1, False).next_committed_host is None
    prompts = Prompts(
        None, None, None, prefix_lens=[4, 0], extend_lens=[3, 2], num_running=0, is_continued=[True, False]
    )
    assert prompts.lens_cpu.tolist() == [7, 2] and prompts.lens_cpu.dtype == torch.int64
    mixed = Prompts(
        None, None, None, prefix_lens=[4, 9], extend_lens=[3, 1], num_running=1, is_continued=[True, True]
    )
    assert mixed.lens_cpu is None
