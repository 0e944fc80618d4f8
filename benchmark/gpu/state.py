"""The figures of a run: a file each in a folder, which the next call goes on with."""

import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
from contextlib import suppress
from datetime import date
from importlib.metadata import distributions
from pathlib import Path

from serving import ROOT

PACKAGES = ("sglang", "sglang-dflash", "torch", "triton", "flashinfer-python")


class Figures:
    """Records {"name", "date", "seconds", "source", "command", "result" or "error"} by name, in a folder.

    Each setting, {"machine", "versions"}, has its folder. `out` gets `page.md`, and all as `figures.tar.xz`.
    """

    def __init__(self, folder: Path, setting: dict, out: Path):
        name = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:8]
        self._folder, self.setting, self._out = folder / name, setting, out
        write(self._folder / "setting.json", json.dumps(setting, indent=1))
        self._source = source_fingerprint()
        self.records: dict[str, dict] = {}
        for file in (self._folder / "figures").rglob("*.json"):
            record = json.loads(file.read_text())
            self.records[record["name"]] = record

    def adopt(self, archive: Path) -> None:
        """Take the figures of another machine of this kind, but for those that are here and did not fail.

        Raises ValueError if its machine or versions are others.
        """
        with tarfile.open(archive) as packed:
            files = {file.name: json.load(packed.extractfile(file)) for file in packed if file.isfile()}
        if (theirs := files.pop("setting.json")) != self.setting:
            who = [f"{each['machine']} with {listed(each['versions'])}" for each in (theirs, self.setting)]
            both = f"{archive.name} is of {who[0]}; this is {who[1]}"
            raise ValueError(f"{both}: figures of both share no folder and no ratio")
        for record in files.values():
            if record["name"] not in self.records or self.has_failed(record["name"]):
                self._store(record)

    def bring(self, page: str) -> None:
        """Write the page, and pack all figures, each file as a whole."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:xz", preset=1) as packed:
            for file in sorted(self._folder.rglob("*.json")):
                packed.add(file, file.relative_to(self._folder))
        write(self._out / "figures.tar.xz", archive.getvalue())
        write(self._out / "page.md", page)

    def keep(self, name: str, outcome: dict, seconds: float, command: str | None) -> list[str]:
        """Write a figure at once, but no error over a result. Returns the outcome's problems.

        outcome: {"result"} or {"error"}.
        """
        if "error" in outcome:
            outcome = {"error": without_folders(outcome["error"])}
        record = {"name": name, "date": str(date.today()), "seconds": round(seconds, 1)}
        record |= {"source": self._source, "command": command, **outcome}
        if "result" in outcome or "result" not in self.records.get(name, {}):
            self._store(record)
        return problems_of(record)

    def is_due(self, name: str) -> bool:
        """Return whether a figure is missing, or failed with another source than today's."""
        return name not in self.records or (
            self.has_failed(name) and self.records[name]["source"] != self._source
        )

    def has_failed(self, name: str) -> bool:
        return name in self.records and bool(problems_of(self.records[name]))

    def _store(self, record: dict) -> None:
        self.records[record["name"]] = record
        write(self._folder / "figures" / f"{record['name']}.json", json.dumps(record, indent=1) + "\n")


def problems_of(record: dict) -> list[str]:
    return [record["error"]] if "error" in record else record["result"]["problems"]


def write(file: Path, content: str | bytes) -> None:
    """Replace a file as a whole: a call may be stopped at any time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(partial, file)


def listed(numbers: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def without_folders(text: str) -> str:
    """Cut absolute paths in `text` to file names, as a machine's folders are private."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.@+-]+/)+", "", text)


def source_fingerprint() -> str:
    """Hash the plugin's source and the benchmarks'. A copy of the tree has no git history."""
    digest = hashlib.sha256()
    for file in sorted(file for room in ("python", "benchmark") for file in (ROOT / room).rglob("*.py")):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def ask_gpu(what: str) -> str | None:
    """Ask nvidia-smi about the first GPU, which takes no memory of it. None: there is no GPU."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader", "--id=0"]
    with suppress(FileNotFoundError):
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None
    return None


def versions() -> dict[str, str]:
    known = {package.name: package.version for package in distributions()}
    # An environment put together by hand may lack metadata.
    return {name: known.get(name, "without metadata") for name in PACKAGES}
