"""Results file: one record per part, written after each."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import torch
from gpu import page
from gpu.plans import Part
from serving import ROOT

AnyPart = TypeVar("AnyPart", bound=Part)
PACKAGES = ("sglang", "sglang-dflash", "torch", "triton", "flashinfer-python")


class OtherRun(RuntimeError):
    """The results on file were taken on another machine, with other versions or other options."""


class Results:
    """Results in `path`.json, from which the page `path`.md is written.

    setting: {"machine", "versions", "options"}, JSON-ready, equal for all results in one file; None to read
    only. Raises OtherRun if the file has another setting.
    """

    def __init__(self, path: Path, setting: dict | None):
        self._path, self._lock = path, threading.RLock()
        self._source = source_fingerprint()
        setting = setting or {}
        self.data = {**setting, "invocations": [], "planned": [], "parts": {}}
        file = path.with_suffix(".json")
        if file.exists():
            self.data = json.loads(file.read_text())
            then = {key: self.data[key] for key in setting}
            other = [f"{key} {then[key]}, now {now}" for key, now in setting.items() if then[key] != now]
            if other:
                raise OtherRun(f"{file.name} is of another run (use --name or --restart): {'; '.join(other)}")

    def pending(self, parts: Sequence[AnyPart], retry_failed: bool) -> list[AnyPart]:
        """List parts without a result, or with a result from other code of ours."""
        records = self.data["parts"]
        return [
            part
            for part in parts
            if part.name not in records
            or (part.runs_our_code and records[part.name]["source"] != self._source)
            or (retry_failed and problems_of(records[part.name]))
        ]

    def store(self, part: Part, outcome: dict, seconds: float) -> None:
        """Record a part; threads may call it at once.

        outcome: {"result": its return value} or {"error": why it has none}.
        """
        record = {"date": str(date.today()), "seconds": round(seconds, 1), **outcome}
        record["source"] = self._source if part.runs_our_code else None
        if "error" in record:
            record["error"] = without_folders(record["error"])
        elif "problems" in record["result"]:
            record["result"]["problems"] = [without_folders(line) for line in record["result"]["problems"]]
        record["commands"] = [spec.command() for spec in part.servers]
        record["estimated_seconds"] = round(part.seconds, 1)
        with self._lock:
            self.data["parts"][part.name] = record
            self.write([part.name])

    def write(self, names: Sequence[str] = (), invocation: str | None = None) -> None:
        """Write both files. names: of all parts, so that the page lists the missing ones."""
        with self._lock:
            if invocation is not None:
                self.data["invocations"].append(invocation)
            self.data["planned"] = list(dict.fromkeys([*self.data["planned"], *names]))
            self._path.parent.mkdir(parents=True, exist_ok=True)
            texts = {".json": json.dumps(self.data, indent=1) + "\n", ".md": page.markdown(self.data)}
            for suffix, text in texts.items():
                partial = self._path.with_suffix(suffix + ".part")
                partial.write_text(text)
                os.replace(partial, self._path.with_suffix(suffix))


def problems_of(record: dict) -> list[str]:
    return [record["error"]] if "error" in record else record["result"].get("problems", [])


def without_folders(text: str) -> str:
    """Cut absolute paths in `text` to file names, as a machine's folders are private."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.@+-]+/)+", "", text)


def source_fingerprint() -> str:
    """Hash the plugin's source. A machine with a copy of the tree has no git history."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "python").rglob("*.py")):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def machine() -> str | None:
    """Describe the first GPU, if any, from a child process, whose CUDA context ends with it."""
    if not torch.cuda.is_available():
        return None
    ask = "import torch.cuda as c; p = c.get_device_properties(0); print(f'{p.name}, {p.total_memory >> 30}')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    return f"{done.stdout.strip()} GiB, CUDA {torch.version.cuda}"


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "without metadata"  # as in an environment put together by hand
    return found
