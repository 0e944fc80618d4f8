"""Cycles at start-up: when they run, and what follows if they fail."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.speculative import warm_up


@pytest.fixture
def worker(monkeypatch) -> SimpleNamespace:
    """A worker whose start-up cycles have begun to run, and raise `error` if it has one."""
    worker = SimpleNamespace(device="cpu", penalties="served", observers=["served"], runs=0, error=None)
    runner = SimpleNamespace(max_running_requests=48, model_config=SimpleNamespace(vocab_size=1000))
    worker.target_worker, worker.block_size = SimpleNamespace(model_runner=runner), 16
    worker.draft_parallel_layout = SimpleNamespace(local_dp=False)
    worker.acceptor = SimpleNamespace(draws_drafts=lambda info: not info.is_all_greedy)
    worker.copies = SimpleNamespace(look_up=lambda batch: SimpleNamespace(lengths=np.zeros(48)))
    worker.run_cycle = lambda batch, plan, matches: worker.cycles.append((batch, plan))
    worker.cycles = []

    def run(worker, _):
        worker.runs, worker.penalties = worker.runs + 1, "of a start-up cycle"
        assert worker.observers == []
        if worker.error is not None:
            raise worker.error

    def make_batch(_, bs, context, **sampling):
        info = SimpleNamespace(is_all_greedy=not sampling, bs=bs, context=context)
        return SimpleNamespace(sampling_info=info)

    monkeypatch.setattr(warm_up, "_run_cycles", run)
    monkeypatch.setattr(warm_up, "make_batch", make_batch)
    monkeypatch.setattr(warm_up, "feasible_context", lambda worker, wanted: wanted)
    monkeypatch.setattr(warm_up, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null"))
    monkeypatch.setattr(warm_up, "get_parallel", lambda: SimpleNamespace(tp_size=1))
    return worker


def is_as_before(worker: SimpleNamespace) -> bool:
    return worker.penalties == "served" and worker.observers == ["served"]


def test_basic_mode_does_without(worker, monkeypatch):
    warm_up.warm_up(worker, None)
    assert worker.runs == 1 and is_as_before(worker)
    monkeypatch.setenv(DFlashOptions.BASIC_MODE.variable, "1")
    warm_up.warm_up(worker, None)
    assert worker.runs == 1


def test_the_largest_sampled_cycle(worker, monkeypatch):
    """SGLang leaves its peak free, or a bound of it where no cycle can run."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 300 + 10 * len(worker.cycles))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    worker.device = "cuda"
    assert warm_up.warm_up(worker, None) == 210
    [(batch, plan)] = worker.cycles
    assert batch.sampling_info.bs == plan.layout.bs == 48 and plan.draws and plan.verify_len == 16
    assert plan.max_accept.tolist() == [15] * 48
    worker.draft_parallel_layout.local_dp = True
    assert warm_up.warm_up(worker, None) == 3 * 48 * 16 * 1000 * 4 and len(worker.cycles) == 1


def test_serving_goes_on_after_an_error(worker, caplog):
    worker.error = ValueError("no such kernel")
    warm_up.warm_up(worker, None)
    [said] = caplog.messages
    assert "cycles at start-up failed" in said and said.endswith("ValueError: no such kernel")
    assert is_as_before(worker)


def unusable_device(monkeypatch) -> None:
    def synchronize():
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cpu, "synchronize", synchronize)


def several_ranks(monkeypatch) -> None:
    monkeypatch.setattr(warm_up, "get_parallel", lambda: SimpleNamespace(tp_size=2))


@pytest.mark.parametrize(
    "error, prepare, raised",
    [
        (torch.OutOfMemoryError("no memory"), None, torch.OutOfMemoryError),
        (RuntimeError("a launch failed"), unusable_device, torch.AcceleratorError),
        (None, unusable_device, torch.AcceleratorError),  # known only once the device is waited for
        (ValueError("no such kernel"), several_ranks, ValueError),
    ],
)
def test_the_start_ends_if_serving_cannot_go_on(worker, monkeypatch, error, prepare, raised):
    worker.error = error
    if prepare is not None:
        prepare(monkeypatch)
    with pytest.raises(raised):
        warm_up.warm_up(worker, None)
