"""Metrics on a disk that fills up.

prometheus_client keeps a process's values in memory-mapped files under PROMETHEUS_MULTIPROC_DIR, sparse ones.
Where the disk has no room for a page of such a file, writing to it ends the process (SIGBUS). Here a file's
blocks are reserved when it gets its size; where that fails, the values go to memory, unseen by /metrics, and
the log says so once."""

import contextlib
import functools
import logging
import mmap
import os
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
_said: list[bool] = []
# Set for the processes that a server starts: each of them reserves from its first value on.
MARK = "SGLANG_DFLASH_RESERVE_METRICS"
ENTRY_BYTES = 20  # of a value beside its key: the key's length, the value, its time


def reserving_at_set_up() -> Callable[[], None]:
    """In the place of SGLang's `set_prometheus_multiproc_dir`, after which prometheus_client may be
    imported."""
    from sglang.srt.utils.common import set_prometheus_multiproc_dir

    @functools.wraps(set_prometheus_multiproc_dir)
    def set_up():
        from sglang_dflash.srt.plugins.install import install_at_metrics

        set_prometheus_multiproc_dir()
        os.environ[MARK] = "1"
        install_at_metrics()

    return set_up


def reserving_init() -> Callable:
    """In the place of `MmapedDict.__init__`."""
    from prometheus_client import mmap_dict

    original = mmap_dict.MmapedDict.__init__

    @functools.wraps(original)
    def __init__(self, filename, read_mode=False):
        if not read_mode:
            try:
                with open(filename, "ab") as file:
                    _reserve(file, max(file.tell(), mmap_dict._INITIAL_MMAP_SIZE))
            except OSError as error:
                _say_once(error)
                with contextlib.suppress(OSError):
                    os.unlink(filename)  # empty, which is nothing that can be read
                memory = os.memfd_create("metrics")
                original(self, f"/proc/self/fd/{memory}", read_mode)
                os.close(memory)
                return
        original(self, filename, read_mode)

    return __init__


def reserving_values() -> Callable:
    """In the place of `MmapedDict._init_value`, which doubles the file where it is full."""
    from prometheus_client.mmap_dict import MmapedDict

    original = MmapedDict._init_value

    @functools.wraps(original)
    def _init_value(self, key):
        length, capacity = len(key.encode()), self._capacity
        needed = self._used + length + 8 - (length + 4) % 8 + ENTRY_BYTES
        while needed > capacity:
            capacity *= 2
        if capacity > self._capacity:
            try:
                _reserve(self._f, capacity)
            except OSError as error:
                _say_once(error)
                _move_to_memory(self)
        original(self, key)

    return _init_value


def _reserve(file: Any, size: int) -> None:
    os.posix_fallocate(file.fileno(), 0, size)


def _move_to_memory(values: Any) -> None:
    """The file stays where it is, with what was counted so far."""
    memory = os.fdopen(os.memfd_create("metrics"), "w+b")
    memory.write(values._m[:])
    memory.flush()
    values._f.close()
    values._f, values._m = memory, mmap.mmap(memory.fileno(), values._capacity)


def _say_once(error: OSError) -> None:
    if not _said:
        _said.append(True)
        logger.warning(
            "Metrics: no room for them in %s (%s). What this process counts from here on may be missing in /metrics.",
            os.environ.get(DIRECTORY),
            error.strerror or error,
        )
