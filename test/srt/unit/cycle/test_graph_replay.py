"""Verify forwards whose graph is replayed without `ModelRunner.forward`."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.speculative.cycle import verify


def target(**watchers) -> MagicMock:
    """Return a worker whose CUDA graphs run every batch."""
    runner = SimpleNamespace(
        device="cuda",
        model=SimpleNamespace(),
        decode_cuda_graph_runner=MagicMock(),
        msprobe_debugger=None,
        canary_manager=None,
        eplb_manager=None,
    )
    vars(runner).update(watchers)
    return MagicMock(model_runner=runner)


@pytest.fixture
def moe(monkeypatch) -> SimpleNamespace:
    options = SimpleNamespace(expert_distribution_recorder_mode=None, elastic_ep_backend=None)
    monkeypatch.setattr(verify, "get_exec", lambda: SimpleNamespace(moe=options))
    monkeypatch.setattr(verify, "get_global_experts_capturer", lambda: None)
    monkeypatch.setattr(verify, "get_global_indexer_capturer", lambda: None)
    return options


def replays_directly(worker: MagicMock, mode: ForwardMode = ForwardMode.TARGET_VERIFY) -> bool:
    """Run a verify forward, and tell whether its graph was replayed directly."""
    result = verify.run_target(worker, SimpleNamespace(forward_mode=mode))
    graphs = worker.model_runner.decode_cuda_graph_runner
    if worker.forward_batch_generation.called:
        assert graphs is None or not graphs.execute.called
        assert worker.forward_batch_generation.call_args.kwargs["is_verify"]
        return False
    assert result.can_run_cuda_graph and result.logits_output is graphs.execute.return_value
    return True


def test_a_graph_is_replayed_directly(moe):
    assert replays_directly(target())


def test_a_batch_without_a_graph_is_run_by_sglang(moe):
    worker = target()
    worker.model_runner.decode_cuda_graph_runner.can_run_graph.return_value = False
    assert not replays_directly(worker)
    assert not replays_directly(target(decode_cuda_graph_runner=None)), "no graphs were captured"


@pytest.mark.parametrize("name", ["msprobe_debugger", "canary_manager", "eplb_manager"])
def test_watchers_of_a_runner_are_served(moe, name):
    assert not replays_directly(target(**{name: object()}))


@pytest.mark.parametrize("name", ["expert_distribution_recorder_mode", "elastic_ep_backend"])
def test_statistics_of_experts_are_kept(moe, name):
    setattr(moe, name, "stat")
    assert not replays_directly(target())


@pytest.mark.parametrize("name", ["get_global_experts_capturer", "get_global_indexer_capturer"])
def test_captures_are_returned(moe, monkeypatch, name):
    monkeypatch.setattr(verify, name, object)
    assert not replays_directly(target())


def test_a_model_that_prepares_its_forwards(moe):
    assert not replays_directly(target(model=SimpleNamespace(prepare_for_forward=None)))


def test_a_plain_cycle_is_replayed_by_sglang(moe, monkeypatch):
    monkeypatch.setenv(DFlashOptions.PLAIN_CYCLE.variable, "1")
    monkeypatch.setattr(verify, "is_plain_cycle", verify.is_plain_cycle.__wrapped__)
    assert not replays_directly(target())
    runner = target().model_runner
    runner.forward = MagicMock()
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY)
    assert verify.run_draft(runner, batch) is runner.forward.return_value.logits_output


def test_a_profiler_sees_spans(moe):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not replays_directly(target())
