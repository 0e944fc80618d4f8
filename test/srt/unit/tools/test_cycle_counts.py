"""The record of cycles that two releases of SGLang are compared with."""

from types import SimpleNamespace

from support import cycle_counts, scheduled


def test_cycles_are_added_up_by_test(tmp_path, monkeypatch):
    answers = [SimpleNamespace(accepted=(1, 2, 0)), SimpleNamespace(accepted=())]
    monkeypatch.setattr(scheduled, "run", lambda *_: [answers, answers])
    recorder = cycle_counts.Recorder(tmp_path / "cycles")
    assert scheduled.run([], []) == [answers, answers]
    for test in ("test_one", "test_two"):
        recorder.pytest_runtest_logfinish(test)
    assert (tmp_path / "cycles").read_text() == "test_one: 2 requests, 6 cycles\n"
