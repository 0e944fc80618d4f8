"""The files of a record: whole lines, whatever happens to the disk or to the process."""

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_dflash.srt.observability import record
from sglang_dflash.srt.observability.record import RecordWriter, describe_target

TARGET = {"vocab_size": 100, "tokenizer": "a", "chat_template": "b"}
ROW = {"input_ids": [5] * 40, "loss_mask": [0] * 20 + [1] * 20}
LIMIT = 2 * record.FILE_BYTES
WRITES_FOR_EVER = """
import sys
from sglang_dflash.srt.observability.record import RecordWriter
writer = RecordWriter(sys.argv[1], 10**9, {})
for number in range(10**9):
    writer.add({"input_ids": [number] * (number % 3000), "loss_mask": [1] * (number % 3000)})
    if number % 100 == 0:
        writer.rows.join()
"""


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.open()]


def test_killed_at_any_time_all_lines_but_the_last_read(tmp_path):
    dice, found = random.Random(3), []
    for run in range(20):
        folder = tmp_path / str(run)
        folder.mkdir()
        process = subprocess.Popen([sys.executable, "-c", WRITES_FOR_EVER, str(folder)])
        while not any(file.stat().st_size for file in folder.glob("*")):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(dice.random() / 4)
        process.send_signal(signal.SIGKILL)
        process.wait()
        *whole, _ = b"".join(file.read_bytes() for file in sorted(folder.glob("*.jsonl"))).split(b"\n")
        rows = [json.loads(line) for line in whole]
        assert all(len(row["input_ids"]) == len(row["loss_mask"]) for row in rows)
        found.append(len(rows))
    assert min(found) > 0 and len(set(found)) > 10, "the runs ended at the same line"


def test_a_file_is_its_owners_and_names_the_target_once(tmp_path):
    writer = RecordWriter(str(tmp_path), LIMIT, TARGET, "dp1-tp2")
    for _ in range(3):
        writer.add(ROW)
    writer.rows.join()
    [file] = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert f"dp1-tp2-{os.getpid()}" in file.name
    assert lines(tmp_path) == [{**ROW, "target": TARGET}, ROW, ROW]
    assert writer.counts["bytes"] == file.stat().st_size
    file.unlink()  # a user deletes what was recorded
    writer.add(ROW)
    writer.rows.join()
    assert lines(tmp_path) == [{**ROW, "target": TARGET}]


def test_the_oldest_files_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "FILE_BYTES", 1000)
    for name in ("notes.txt", "mine.jsonl", "2024-mine-1.jsonl"):  # not part of the record
        (tmp_path / name).write_text("x" * 5000)
    writer = RecordWriter(str(tmp_path), 3000, TARGET)
    for number in range(60):
        writer.add({**ROW, "number": number})
        writer.rows.join()
        assert sum(file.stat().st_size for file in tmp_path.glob("*.jsonl")) <= 3000 + 2 * 5000
    for name in ("mine.jsonl", "2024-mine-1.jsonl"):
        (tmp_path / name).unlink()
    numbers = [row["number"] for row in lines(tmp_path)]
    assert numbers == [*range(numbers[0], 60)] and 5 < len(numbers) < 30
    assert writer.counts["requests"] == 60 and (tmp_path / "notes.txt").exists()
    writer.add({"input_ids": [7] * 400, "loss_mask": [1] * 400})  # longer than half a file
    writer.rows.join()
    assert writer.counts["dropped"] == 1 and len(lines(tmp_path)) == len(numbers)


def test_ranks_share_a_folder(tmp_path, monkeypatch):
    """With the limit that each rank gets, all files fit, and no rank removes another's open file."""
    monkeypatch.setattr(record, "FILE_BYTES", 1000)
    writers = [RecordWriter(str(tmp_path), 5000 - 2 * 1000, TARGET, f"dp{rank}") for rank in range(3)]
    for number in range(60):
        time.sleep(0.01)  # the clock of file systems ticks every 4 ms
        writer = writers[number % 3]
        writer.add({**ROW, "number": number})
        writer.rows.join()
        assert sum(file.stat().st_size for file in tmp_path.glob("*.jsonl")) <= 5000
        assert all(os.fstat(each._file).st_nlink for each in writers if each._file >= 0)
    assert {*range(54, 60)} <= {row["number"] for row in lines(tmp_path)}
    shutil.rmtree(tmp_path)
    writers[0].add(ROW)
    writers[0].rows.join()
    assert len(lines(tmp_path)) == 1 and not writers[0].counts["dropped"]


def test_another_rank_removes_a_file_at_the_same_time(tmp_path, monkeypatch):
    gone, look = tmp_path / f"{time.time_ns()}-other-1.jsonl", Path.stat
    gone.write_text("{}")

    def stat_of(path: Path, **options: bool) -> os.stat_result:
        if path == gone:
            gone.unlink(missing_ok=True)
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", stat_of)
    writer = RecordWriter(str(tmp_path), LIMIT, TARGET)
    writer.add(ROW)
    writer.rows.join()
    assert writer.counts["requests"] == 1 and not writer.counts["dropped"]


def test_the_reader_of_speculators_takes_all_files(tmp_path, monkeypatch):
    """`speculators prepare-data` loads a folder so. A column or a type that comes later ends it."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(record, "FILE_BYTES", 1000)
    writer = RecordWriter(str(tmp_path), 10**6, TARGET)
    for number in range(40):
        adapter = "sql" if number > 20 else ""
        writer.add({**ROW, "accept_lens": [3], "constrained": number > 30, "lora": adapter})
        writer.rows.join()
    files = sorted(map(str, tmp_path.glob("*.jsonl")))
    rows = datasets.load_dataset("json", data_files=files, split="train", cache_dir=str(tmp_path / "cache"))
    assert len(files) > 5 and len(rows) == 40
    assert all({name: row[name] for name in ROW} == ROW for row in rows)
    assert rows[0]["target"] == TARGET and rows[1]["target"] is None and rows[39]["lora"] == "sql"


@pytest.mark.parametrize("fault", ["full", "part", "gone"])
def test_what_cannot_be_written_is_dropped_with_one_warning(tmp_path, monkeypatch, caplog, fault):
    counted: list[int] = []
    writer = RecordWriter(str(tmp_path / "record"), LIMIT, TARGET, on_count=counted.append)
    write = os.write

    def fail(file: int, data: bytes) -> int:
        if fault == "full":
            raise OSError(28, "No space left on device")
        return write(file, data[:9])

    if fault == "gone":
        (tmp_path / "record").write_text("a file in the folder's place")
    else:
        writer.add(ROW)
        writer.rows.join()
        monkeypatch.setattr(record.os, "write", fail)
    for _ in range(3):
        writer.add(ROW)
        writer.rows.join()
    monkeypatch.setattr(record.os, "write", write)
    if fault == "gone":
        (tmp_path / "record").unlink()
    writer.add(ROW)
    writer.rows.join()
    written = 1 if fault == "gone" else 2
    assert len(lines(tmp_path / "record")) == written == writer.counts["requests"]
    assert writer.counts["dropped"] == counted.count(0) == 3
    assert sum(counted) == writer.counts["tokens"] == 40 * written
    assert len(caplog.records) == 1 and str(tmp_path) in caplog.text


def test_a_slow_disk_holds_nobody_up(tmp_path, monkeypatch, caplog):
    goes_on, write = threading.Event(), os.write
    monkeypatch.setattr(record.os, "write", lambda *args: goes_on.wait() and write(*args))
    writer = RecordWriter(str(tmp_path), LIMIT, TARGET)
    for _ in range(record.QUEUED_ROWS + 10):
        writer.add(ROW)
    assert writer.counts["dropped"] >= 9 and len(caplog.records) == 1
    goes_on.set()
    writer.rows.join()
    assert len(lines(tmp_path)) + writer.counts["dropped"] == record.QUEUED_ROWS + 10


def test_a_target_is_named_by_vocabulary_and_template():
    def tokenizer(template=None, **vocabulary):
        return SimpleNamespace(get_vocab=lambda: vocabulary, chat_template=template)

    described = [
        describe_target(2, tokenizer("x", a=0, b=1)),
        describe_target(2, tokenizer("y", a=0, b=1)),
        describe_target(2, tokenizer("x", a=1, b=0)),
        describe_target(3, tokenizer("x", a=0, b=1)),
        describe_target(2, None),
    ]
    assert len({json.dumps(one) for one in described}) == len(described)
    assert describe_target(2, tokenizer("x", b=1, a=0)) == described[0]
