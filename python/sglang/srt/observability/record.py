"""A record of finished requests: whole JSON lines, to train a draft on a server's traffic.

A line is a row of `speculators prepare-data`, `input_ids` and `loss_mask`, with more columns that it ignores.
Each line has the same columns of the same types: that reader takes those of the first block for all files.
The first line of a file also names the target.
"""

import contextlib
import hashlib
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FILE_BYTES = 8 * 2**20  # about a million tokens
QUEUED_ROWS = 256


def describe_target(vocab_size: int, tokenizer: Any) -> dict[str, Any]:
    """Return what names a target in a record: its vocabulary, and its chat template's hash.

    Args:
        vocab_size: of the model.
        tokenizer: as transformers loads it. None leaves both hashes empty.
    """
    content: list[Any] = []
    if tokenizer is not None:
        content = [sorted(tokenizer.get_vocab().items()), getattr(tokenizer, "chat_template", None)]
    hashes = [hashlib.sha256(json.dumps(one).encode()).hexdigest()[:16] for one in content] or ["", ""]
    return {"vocab_size": vocab_size, "tokenizer": hashes[0], "chat_template": hashes[1]}


class RecordWriter:
    """Writes rows in a thread, to files of one process.

    A line is written by one call, and taken back if it did not fit. A slow or a full disk never stops the
    caller: rows that cannot be written are dropped, with one warning.

    Args:
        folder: of the record. Its oldest files are removed for new ones.
        limit: bytes of all its files.
        target: as of `describe_target`.
        name: part of the files' names, beside the process: its rank.
        on_count: called with the tokens of each row that was written, and 0 for one that was dropped.

    Attributes:
        counts: what was recorded and dropped, for `/server_info`.
        rows: that wait to be written.
    """

    def __init__(
        self,
        folder: str,
        limit: int,
        target: dict[str, Any],
        name: str = "",
        on_count: Callable[[int], None] = lambda tokens: None,
    ):
        self.counts: dict[str, Any] = {"folder": folder, "requests": 0, "tokens": 0, "bytes": 0, "dropped": 0}
        self._folder, self._limit, self._target = Path(folder), limit, target
        self._name, self._on_count = f"{name}-{os.getpid()}", on_count
        self.rows: queue.Queue[dict[str, Any]] = queue.Queue(QUEUED_ROWS)
        self._file, self._size = -1, 0
        threading.Thread(target=self._run, name="record", daemon=True).start()

    def add(self, row: dict[str, Any]) -> None:
        """Hand a row to the thread. It is dropped if the disk is too slow."""
        try:
            self.rows.put_nowait(row)
        except queue.Full:
            self._drop("the disk is too slow")

    def _run(self) -> None:
        while True:
            row = self.rows.get()
            try:
                num_tokens = len(row["input_ids"])
                for name, more in (("bytes", self._write(row)), ("requests", 1), ("tokens", num_tokens)):
                    self.counts[name] += more
                self._on_count(num_tokens)
            except OSError as error:
                self._drop(str(error))
            self.rows.task_done()

    def _drop(self, reason: str) -> None:
        if not self.counts["dropped"]:
            logger.warning("DFLASH: not recorded in %s: %s. Others are counted.", self._folder, reason)
        self.counts["dropped"] += 1
        self._on_count(0)

    def _write(self, row: dict[str, Any]) -> int:
        """Write a row, and return its bytes. Raises OSError, and nothing of the row stays."""
        line = _encode(row)
        if len(line) > FILE_BYTES // 2:
            raise OSError(f"a request takes {len(line)} bytes, more than half a file")
        is_there = self._file >= 0 and os.fstat(self._file).st_nlink
        if not is_there or self._size + len(line) > FILE_BYTES:
            self._begin_file()
        if not self._size:
            line = _encode({**row, "target": self._target})
        if (written := os.write(self._file, line)) < len(line):
            os.ftruncate(self._file, self._size)
            raise OSError(f"{written} of {len(line)} bytes fit")
        self._size += len(line)
        return len(line)

    def _begin_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # somebody may have removed it
        found = {}
        for path in filter(_is_ours, self._folder.glob("*.jsonl")):
            with contextlib.suppress(FileNotFoundError):  # another rank has just removed it
                found[path] = path.stat()
        total = sum(one.st_size for one in found.values())
        for path, one in sorted(found.items(), key=lambda item: item[1].st_mtime_ns):
            if total + FILE_BYTES > self._limit:
                total -= one.st_size
                path.unlink(missing_ok=True)
        path = self._folder / f"{time.time_ns()}-{self._name}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._size = 0


def _is_ours(path: Path) -> bool:
    """Return whether `_begin_file` has named a file. Others are the user's."""
    return re.fullmatch(r"\d{19}-.*-\d+\.jsonl", path.name) is not None


def _encode(row: dict[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"
