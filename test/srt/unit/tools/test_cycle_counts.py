"""The record of cycles that two releases of SGLang are compared with."""

import json

from support import cycle_counts

TEST = "test/srt/engine/test_lossless.py::test_one"


def answer(*histogram: int) -> dict:
    return {"meta_info": {"spec_correct_drafts_histogram": list(histogram)}}


def test_cycles_are_added_up_by_test(tmp_path, monkeypatch):
    from serving import Server
    from support import scheduled, streaming

    for holder, name in ((Server, "post"), (streaming, "stream"), (scheduled, "run")):
        monkeypatch.setattr(holder, name, getattr(holder, name))  # put back after this test
    monkeypatch.setattr(Server, "post", lambda *_: [answer(1, 2), answer(), answer(0, 4)])
    monkeypatch.setattr(streaming, "stream", lambda *_: iter([answer(1), answer(1, 1)]))
    recorder = cycle_counts.Recorder(tmp_path / "cycles")
    recorder.install()
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{TEST} (call)")
    Server.post(None, "/generate", {})
    list(streaming.stream(None, {}))
    recorder.write()
    recorder.write()
    [line] = (tmp_path / "cycles").read_text().splitlines()
    assert json.loads(line) == {"test": TEST, "requests": 3, "cycles": 9}


def test_two_records_are_compared(tmp_path, capsys):
    files = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    for file, cycles in zip(files, (7, 8)):
        lines = [(f"{TEST}[a]", 1), (f"{TEST}[a]", 5), (f"{TEST}[b]", cycles)]
        records = [{"test": test, "requests": 2, "cycles": count} for test, count in lines]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert cycle_counts.main([str(files[0]), str(files[0])]) == 0
    assert "| `test_lossless.py` | 2 | 4 | 12 | 12 | 0 |" in capsys.readouterr().out
    assert cycle_counts.main([str(file) for file in files]) == 1
    output = capsys.readouterr().out
    assert "| `test_lossless.py` | 2 | 4 | 12 | 13 | 1 |" in output
    assert f"- `{TEST}[b]`: 7 of 2, 8 of 2" in output
