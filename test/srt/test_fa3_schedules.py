"""Which attention calls of a captured forward share a schedule of FlashAttention 3."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.srt.layers.attention import fa3_schedules


@pytest.fixture
def computed(monkeypatch) -> list[dict]:
    """The arguments of every schedule that is computed."""
    calls = []

    def compute(**arguments):
        calls.append(arguments)
        return torch.tensor([len(calls)])

    monkeypatch.setattr(fa3_schedules, "schedule_function", lambda: compute)
    return calls


LENGTHS, OFFSETS = torch.tensor([7, 9], dtype=torch.int32), torch.tensor([0, 8, 16], dtype=torch.int32)


def call(**changes) -> dict:
    """Arguments of SGLang's call for a block of 8 and two requests."""
    return {
        "q": torch.zeros(16, 4, 32),
        "k_cache": torch.zeros(10, 1, 2, 32),
        "v_cache": torch.zeros(10, 1, 2, 32),
        "page_table": torch.zeros(2, 64, dtype=torch.int32),
        "cache_seqlens": LENGTHS,
        "cu_seqlens_q": OFFSETS,
        "cu_seqlens_k_new": OFFSETS,
        "max_seqlen_q": 8,
        "softmax_scale": 0.1,
        "causal": True,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "num_splits": 0,
        "ver": 3,
        "k_descale": None,
        **changes,
    }


def test_layers_of_a_forward_share_a_schedule(computed):
    forward, batch = fa3_schedules.CapturedForward(), SimpleNamespace()
    forward.enter(batch)
    first = forward.schedule(call())
    forward.enter(batch)
    assert forward.schedule(call()) is first and len(computed) == 1
    [arguments] = computed
    assert arguments["max_seqlen_k"] == 64 and arguments["causal"] is True
    assert arguments["cache_seqlens"] is LENGTHS and arguments["cu_seqlens_q"] is OFFSETS
    assert (arguments["num_heads"], arguments["num_heads_k"], arguments["headdim"]) == (4, 2, 32)


@pytest.mark.parametrize(
    "changes",
    [{"causal": False}, {"cache_seqlens": LENGTHS.clone()}, {"num_splits": 1}, {"softcap": 30.0}],
    ids=lambda changes: next(iter(changes)),
)
def test_other_arguments_have_a_schedule_of_their_own(changes, computed):
    forward, batch = fa3_schedules.CapturedForward(), SimpleNamespace()
    forward.enter(batch)
    first = forward.schedule(call())
    other = forward.schedule(call(**changes))
    assert other is not None and other is not first and len(computed) == 2


def test_another_capture_computes_its_own(computed):
    """Also if SGLang's tensors are the same: a schedule belongs to the graph that computes it."""
    forward = fa3_schedules.CapturedForward()
    for batch in (SimpleNamespace(), SimpleNamespace()):
        forward.enter(batch)
        assert forward.schedule(call()) is not None
    assert len(computed) == 2


@pytest.mark.parametrize(
    "changes",
    [{"window_size": (128, 0)}, {"sinks": torch.zeros(4)}, {"ver": 4}, {"score_mod": abs}],
    ids=lambda changes: next(iter(changes)),
)
def test_calls_that_keep_their_own(changes, computed):
    forward = fa3_schedules.CapturedForward()
    forward.enter(SimpleNamespace())
    assert forward.schedule(call(**changes)) is None and computed == []


def test_outside_of_a_capture_nothing_is_shared(computed):
    forward = fa3_schedules.CapturedForward()
    assert forward.schedule(call()) is None
    forward.enter(SimpleNamespace())
    forward.enter(None)
    assert forward.schedule(call()) is None and computed == []
