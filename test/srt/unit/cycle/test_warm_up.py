"""Cycles at start-up: when they run, and what follows if they fail."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.speculative import warm_up


@pytest.fixture
def worker(monkeypatch) -> SimpleNamespace:
    """A worker whose start-up cycles have begun to run, and raise `error` if it has one."""
    worker = SimpleNamespace(device="cpu", penalties="served", observers=["served"], runs=0, error=None)

    def run(worker, _):
        worker.runs, worker.penalties = worker.runs + 1, "of a start-up cycle"
        assert worker.observers == []
        if worker.error is not None:
            raise worker.error

    monkeypatch.setattr(warm_up, "_run_cycles", run)
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
