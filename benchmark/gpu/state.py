"""The figures of a run: a file each in a folder, which the next call goes on with."""

import hashlib
import json
import os
import re
import subprocess
import sys
from datetime import date
from importlib.metadata import distributions
from pathlib import Path

import torch
from serving import ROOT

PACKAGES = ("sglang", "sglang-dflash", "torch", "triton", "flashinfer-python")


class OtherRun(RuntimeError):
    """The figures in a folder were taken on another machine or with other versions."""


class Figures:
    """Records {"date", "seconds", "source", "command", "result" or "error"} by name, in `folder`.

    setting: {"machine", "versions"}, equal for all figures. Raises OtherRun if the folder has another one.
    """

    def __init__(self, folder: Path, setting: dict):
        self.folder, self.setting = folder, setting
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "setting.json"
        if file.exists() and (known := json.loads(file.read_text())) != setting:
            raise OtherRun(f"{folder} has figures of {known}, not of {setting}: give another --state")
        write(file, json.dumps(setting, indent=1))
        self._source = source_fingerprint()
        found = sorted((folder / "figures").rglob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        texts = {path: path.read_text() for path in found}
        self.records = {json.loads(text)["name"]: json.loads(text) for text in texts.values()}

    def result(self, name: str) -> dict:
        return self.records[name]["result"]

    def keep(self, name: str, outcome: dict, seconds: float, command: str | None) -> list[str]:
        """Write a figure at once. outcome: {"result"} or {"error"}. Returns its problems."""
        if "error" in outcome:
            outcome = {"error": without_folders(outcome["error"])}
        record = {"name": name, "date": str(date.today()), "seconds": round(seconds, 1)}
        record |= {"source": self._source, "command": command, **outcome}
        self.records[name] = record
        write(self.folder / "figures" / f"{name}.json", json.dumps(record, indent=1) + "\n")
        return problems_of(record)


def problems_of(record: dict) -> list[str]:
    return [record["error"]] if "error" in record else record["result"].get("problems", [])


def write(file: Path, text: str) -> None:
    """Replace a file as a whole: a call may be stopped at any time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".part")
    partial.write_text(text)
    os.replace(partial, file)


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
    known = {package.name: package.version for package in distributions()}
    # An environment put together by hand may lack metadata.
    return {name: known.get(name, "without metadata") for name in PACKAGES}
