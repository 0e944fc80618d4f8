"""Metric files where the disk has room, where it has none, and where it runs out of it."""

import errno
import os

import pytest
from prometheus_client import mmap_dict
from prometheus_client.mmap_dict import MmapedDict

from sglang_dflash.srt.observability import metrics_files

KEYS = [f"a rather long name of a value, number {number}" for number in range(4000)]


@pytest.fixture(autouse=True)
def reserving(monkeypatch, tmp_path):
    monkeypatch.setenv(metrics_files.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(metrics_files, "_said", [])
    init, values = metrics_files.reserving_init(), metrics_files.reserving_values()
    monkeypatch.setattr(MmapedDict, "__init__", init)
    monkeypatch.setattr(MmapedDict, "_init_value", values)


def room_for(size: int, monkeypatch) -> None:
    reserve = os.posix_fallocate

    def fail(fd, offset, length):
        if length > size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fail)


def write_and_read(values: MmapedDict) -> None:
    for number, key in enumerate(KEYS):
        values.write_value(key, float(number), 0.0)
    assert [values.read_value(key)[0] for key in KEYS] == list(range(len(KEYS)))


def test_blocks_are_reserved_as_a_file_grows(tmp_path):
    path = tmp_path / "counter_1.db"
    values = MmapedDict(str(path))
    assert path.stat().st_blocks * 512 >= mmap_dict._INITIAL_MMAP_SIZE
    write_and_read(values)
    assert path.stat().st_blocks * 512 >= path.stat().st_size > mmap_dict._INITIAL_MMAP_SIZE
    assert sum(1 for _ in MmapedDict.read_all_values_from_file(str(path))) == len(KEYS)
    values.close()
    assert MmapedDict(str(path)).read_value(KEYS[-1])[0] == len(KEYS) - 1, "an old file keeps its values"


def test_no_room_at_all(tmp_path, monkeypatch, caplog):
    room_for(0, monkeypatch)
    path = tmp_path / "counter_1.db"
    write_and_read(MmapedDict(str(path)))
    write_and_read(MmapedDict(str(tmp_path / "gauge_1.db")))
    assert list(tmp_path.iterdir()) == [], "what cannot be read would spoil /metrics"
    assert [record.message.count("No space left") for record in caplog.records] == [1]


def test_no_room_to_grow(tmp_path, monkeypatch, caplog):
    """What is in the file stays there to be read."""
    room_for(2 * mmap_dict._INITIAL_MMAP_SIZE, monkeypatch)
    path = tmp_path / "counter_1.db"
    write_and_read(MmapedDict(str(path)))
    assert 0 < sum(1 for _ in MmapedDict.read_all_values_from_file(str(path))) < len(KEYS)
    assert len(caplog.records) == 1
