"""Work behind the target's forward, on rows that SGLang gives to another request meanwhile."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.scheduler import Scheduler

from sglang_dflash.srt.speculative.targets import recurrent
from sglang_dflash.srt.speculative.targets.recurrent import RecurrentStates


class ForwardStream:
    """Work that is launched, but runs only once somebody waits for it."""

    def __init__(self):
        self._waiting = []

    def launch(self, work) -> None:
        self._waiting.append(work)

    def record(self) -> int:
        return len(self._waiting)

    def run_until(self, event: int | None = None) -> None:
        for work in self._waiting[:event]:
            work()
        del self._waiting[:event]


@pytest.mark.parametrize("has_ring", [True, False])
def test_a_late_commit_is_over_before_a_row_changes_hands(has_ring, monkeypatch):
    """A request has ended and is in one more cycle; the scheduler then gives its row to a new one.

    ReplaySSM's cursors are in rows of requests, and SGLang resets those of the new one. Copied states are in
    slots that the forward has looked up, so nothing needs to wait.
    """
    stream, cursors = ForwardStream(), torch.tensor([5, 7])
    target = SimpleNamespace(
        shared_read_done_event=None, model_config=None, req_to_token_pool=SimpleNamespace(size=2)
    )
    worker = SimpleNamespace(device="cpu", model_runner=target)
    scheduler = SimpleNamespace(
        _war_barrier_enabled=True,
        model_worker=SimpleNamespace(last_shared_read_runner=target),
        forward_stream=stream,
        schedule_stream=SimpleNamespace(
            wait_event=stream.run_until, wait_stream=lambda forward: forward.run_until()
        ),
    )

    def advance(_worker, batch, accept_lens, **_):
        stream.launch(lambda: cursors.index_add_(0, batch.req_pool_indices, accept_lens.long()))

    mamba = SimpleNamespace(enable_linear_replayssm_spec=has_ring)
    monkeypatch.setattr(recurrent, "get_exec", lambda: SimpleNamespace(mamba=mamba))
    monkeypatch.setattr(recurrent, "commit_mamba_states_after_verify", advance)
    monkeypatch.setattr(recurrent, "mambaish_config", lambda config: object())
    target_states = RecurrentStates(worker, block_size=8)
    stream.launch(lambda: None)  # the verify forward, which reads the request table
    target.shared_read_done_event = event = stream.record()
    target_states.commit(SimpleNamespace(req_pool_indices=torch.tensor([1])), torch.tensor([3]))
    assert (target.shared_read_done_event == event) == (not has_ring)
    Scheduler._apply_war_barrier(scheduler)
    cursors[1] = 0
    stream.run_until()
    assert (cursors.tolist() == [5, 0]) == has_ring
