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
MOST_BROUGHT = 15 << 20  # bytes of an archive of figures


class Figures:
    """Records {"name", "date", "seconds", "source", "command", "result" or "error"} by name, in a folder.

    Args:
        folder: Of the figures of all machines. Those of a machine and its versions have a folder in it.
        setting: {"machine", "versions"}, equal for all figures.
        bring: Where `figures.tar.xz` and `page.md` are written anew after each figure. None: nowhere.

    Attributes:
        folder: Of this machine.
    """

    def __init__(self, folder: Path, setting: dict, bring: Path | None = None):
        name = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:8]
        self.folder, self.setting, self._bring = folder / name, setting, bring
        if folder.is_dir() and (others := [each.name for each in folder.iterdir() if each.name != name]):
            print(f"{folder} has figures of other machines or versions too: {', '.join(others)}", flush=True)
        write(self.folder / "setting.json", json.dumps(setting, indent=1))
        self._source = source_fingerprint()
        self.records: dict[str, dict] = {}
        for file in (self.folder / "figures").rglob("*.json"):
            record = json.loads(file.read_text())
            self.records[record["name"]] = record

    def adopt(self, archive: Path) -> None:
        """Take the figures of another machine of this kind, but for those that are here and did not fail.

        Raises ValueError if its machine or versions are others.
        """
        with tarfile.open(archive) as packed:
            files = {file.name: packed.extractfile(file).read() for file in packed if file.isfile()}
        setting = json.loads(files.pop("setting.json"))
        if setting != self.setting:
            theirs, ours = (
                ", ".join([s["machine"], *(f"{name} {number}" for name, number in s["versions"].items())])
                for s in (setting, self.setting)
            )
            raise ValueError(
                f"{archive.name} is of {theirs}; this is {ours}: figures of both share no folder and no ratio"
            )
        for name, content in files.items():
            if name.startswith("traces/"):
                write(self.folder / "traces" / Path(name).name, content)
            elif name.endswith(".json"):
                record = json.loads(content)
                if record["name"] not in self.records or self.has_failed(record["name"]):
                    self._store(record)

    def bring(self, page: str) -> None:
        """Write the page, and where files are collected the page and all figures, each as a whole.

        Traces come along while the archive stays below MOST_BROUGHT bytes.
        """
        write(self.folder / "page.md", page)
        if self._bring is None:
            return
        write(self._bring / "page.md", page)
        traces = sorted((self.folder / "traces").glob("*.gz"))
        while len(data := self._packed(traces)) > MOST_BROUGHT and traces:
            traces.pop()
        write(self._bring / "figures.tar.xz", data)

    def _packed(self, traces: list[Path]) -> bytes:
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:xz", preset=1) as out:
            for name in ("setting.json", "figures", *(f"traces/{trace.name}" for trace in traces)):
                if (self.folder / name).exists():
                    out.add(self.folder / name, name)
        return archive.getvalue()

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
        write(self.folder / "figures" / f"{record['name']}.json", json.dumps(record, indent=1) + "\n")


def problems_of(record: dict) -> list[str]:
    return [record["error"]] if "error" in record else record["result"].get("problems", [])


def write(file: Path, content: str | bytes) -> None:
    """Replace a file as a whole: a call may be stopped at any time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(partial, file)


def without_folders(text: str) -> str:
    """Cut absolute paths in `text` to file names, as a machine's folders are private."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.@+-]+/)+", "", text)


def source_fingerprint() -> str:
    """Hash the plugin's source and this program's. A machine with a copy of the tree has no git history."""
    digest = hashlib.sha256()
    for file in sorted([*(ROOT / "python").rglob("*.py"), *(ROOT / "benchmark" / "gpu").rglob("*.py")]):
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
