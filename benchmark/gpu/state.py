"""The figures of a run: a file each in a folder, which the next call goes on with."""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from datetime import date
from importlib.metadata import distributions
from pathlib import Path

import torch
from serving import ROOT

PACKAGES = ("sglang", "sglang-dflash", "torch", "triton", "flashinfer-python")


MOST_BROUGHT = 15 << 20  # bytes of an archive of figures


class Figures:
    """Records {"date", "seconds", "source", "command", "result" or "error"} by name, in a folder.

    Args:
        folder: of the figures of all machines. Those of a machine and its versions have a folder in it.
        setting: {"machine", "versions"}, equal for all figures.
        bring: where `figures.tar.xz` and `page.md` are written anew after each figure. None: nowhere.

    Attributes:
        planned: names of all figures of the run, so that the page lists the missing ones.
    """

    def __init__(self, folder: Path, setting: dict, bring: Path | None = None):
        name = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:8]
        self.folder, self.setting, self._bring = folder / name, setting, bring
        if folder.is_dir() and (others := [each.name for each in folder.iterdir() if each.name != name]):
            print(f"{folder} has figures of other machines or versions too: {', '.join(others)}", flush=True)
        write(self.folder / "setting.json", json.dumps(setting, indent=1))
        self._source = source_fingerprint()
        self.planned: list[str] = []
        found = sorted((self.folder / "figures").rglob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        texts = {path: path.read_text() for path in found}
        self.records = {json.loads(text)["name"]: json.loads(text) for text in texts.values()}

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
            for name in ("setting.json", "figures"):
                if (self.folder / name).exists():
                    out.add(self.folder / name, name)
            for trace in traces:
                out.add(trace, f"traces/{trace.name}")
        return archive.getvalue()

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
