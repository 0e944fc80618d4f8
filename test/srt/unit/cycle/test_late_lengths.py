"""The wait for lengths under the draft: which lengths arrive, when, and which backends it is for."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import get_spec
from support.engine import start

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.plugins import algorithm
from sglang_dflash.srt.speculative.cycle import lengths
from sglang_dflash.srt.speculative.cycle.lengths import LateLengths, check_backends
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput

POOL = SimpleNamespace(req_to_token=torch.zeros(4, 9))
WAITS, ASKS_NOTHING = SimpleNamespace(needs_cpu_seq_lens=True), SimpleNamespace(needs_cpu_seq_lens=False)


def batch_of(mode: ForwardMode) -> SimpleNamespace:
    nothing = torch.zeros(2, dtype=torch.int64)
    draft_input = DFlashDraftInput(nothing, nothing, future_indices=torch.tensor([1, 3]))
    return SimpleNamespace(spec_info=draft_input, forward_mode=mode, seq_lens_cpu="stale", seq_lens_sum=0)


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.MIXED])
@pytest.mark.parametrize("needs_lengths", [True, False])
def test_a_decode_batch_is_resolved_on_the_device(mode, needs_lengths):
    """Its lengths are those of the step, whatever is published later. Other batches wait as before."""
    start()
    relay = LateLengths(
        torch.device("cpu"), SpeculativeAlgorithm.DFLASH, POOL, needs_cpu_seq_lens=needs_lengths
    )
    relay.publish(torch.arange(4), torch.tensor([5, 6, 7, 8]))
    batch = batch_of(mode)
    relay.resolve_seq_lens_cpu(batch)
    assert batch.seq_lens.tolist() == [6, 8] and relay.needs_cpu_seq_lens == needs_lengths
    arriving = batch.spec_info.arriving_lens
    if mode == ForwardMode.DECODE and needs_lengths:
        assert batch.seq_lens_cpu is None
        relay.publish(torch.arange(4), torch.tensor([50, 60, 70, 80]))
        assert arriving.wait().tolist() == [6, 8]
    else:
        assert arriving is None
        assert (batch.seq_lens_cpu is None) != needs_lengths


@pytest.mark.parametrize("is_on", [False, True])
def test_the_relay_is_sglangs_unless_the_wait_is_on(monkeypatch, is_on):
    start()
    monkeypatch.setenv(DFlashOptions.WAIT_UNDER_DRAFT.variable, "1" if is_on else "")
    algorithm.register()
    relay = get_spec(algorithm.NAME).create_future_map(torch.device("cpu"), POOL)
    assert type(relay) is (LateLengths if is_on else FutureMap)


@pytest.mark.parametrize(
    "target, draft, splits, words",
    [
        (WAITS, ASKS_NOTHING, False, None),
        (WAITS, WAITS, False, "of the draft plans with lengths on the host"),
        (WAITS, object(), False, "object of the draft plans"),  # it does not say
        (ASKS_NOTHING, ASKS_NOTHING, False, "nothing waits"),
        (WAITS, ASKS_NOTHING, True, "--enable-two-batch-overlap"),
    ],
)
def test_other_backends_are_refused_by_name(target, draft, splits, words, monkeypatch):
    overlap = SimpleNamespace(enable_two_batch_overlap=splits)
    monkeypatch.setattr(lengths, "get_exec", lambda: SimpleNamespace(overlap=overlap))
    check_backends(target, draft)  # off
    monkeypatch.setenv(DFlashOptions.WAIT_UNDER_DRAFT.variable, "1")
    if words is None:
        check_backends(target, draft)
        return
    with pytest.raises(ValueError, match=f"{DFlashOptions.WAIT_UNDER_DRAFT.variable}: .*{words}"):
        check_backends(target, draft)
