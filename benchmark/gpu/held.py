"""Servers that this program starts: held until they have imported everything, then measured.

Most of a server's start is imports. They take no GPU, so they run while another server is measured, or
between two calls. A file names the server that is held and one the server that is measured, so that the next
call of the program finds the first and ends the second.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpu.servers import SCRATCH, ServerSpec
from gpu.state import write
from serving import ROOT, Server, free_port, importing, start_cold, stop

FOLDER = SCRATCH / "held"
HELD, MEASURED = "held.json", "measured.json"  # in FOLDER


@dataclass
class Adopted:
    """A server's process, maybe of another call of the program: what `serving` needs of a Popen."""

    pid: int

    def poll(self) -> int | None:
        """Return None while the process runs, then 1: its exit status is unknown."""
        with suppress(OSError):
            if Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                return None
        return 1

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.05)


def hold(spec: ServerSpec) -> None:
    """Start a server that waits. One that is held already, and is another one, ends."""
    if is_held(spec):
        return
    drop()
    FOLDER.mkdir(parents=True, exist_ok=True)
    port = free_port()
    _release(port).unlink(missing_ok=True)
    environment = {**spec.environment, "GPU_BENCHMARK_RELEASE": str(_release(port).absolute())}
    environment |= importing(ROOT / "benchmark" / "gpu" / "hold")
    command = ["-m", "sglang.launch_server", "--port", str(port), *spec.arguments]
    with open(_log(port), "wb") as out:
        process = start_cold(command, environment, out)
    write(FOLDER / HELD, json.dumps({"command": spec.command(), "pid": process.pid, "port": port}))


def take(spec: ServerSpec) -> Server:
    """Release the server, which is started if it is not held; it is measured from now on."""
    hold(spec)
    known = json.loads((FOLDER / HELD).read_text())
    os.replace(FOLDER / HELD, FOLDER / MEASURED)
    _release(known["port"]).touch()
    return Server(f"http://127.0.0.1:{known['port']}", Adopted(known["pid"]), _log(known["port"]))


def is_held(spec: ServerSpec) -> bool:
    """Return whether this server is held and alive."""
    if not (FOLDER / HELD).exists():
        return False
    known = json.loads((FOLDER / HELD).read_text())
    return known["command"] == spec.command() and Adopted(known["pid"]).poll() is None


def drop() -> None:
    """End the server that is held, if any."""
    _end(FOLDER / HELD)


def end_measured() -> None:
    """End the server that is measured, if any: of a killed call, or at a time limit."""
    _end(FOLDER / MEASURED)


def _end(record: Path) -> None:
    """End the server of a record, unless its number is another process's by now."""
    if not record.exists():
        return
    known = json.loads(record.read_text())
    environment = ""
    with suppress(OSError):
        environment = Path(f"/proc/{known['pid']}/environ").read_text(errors="replace")
    if not environment or str(_release(known["port"])) in environment:  # nothing is read of a dead leader
        stop(Adopted(known["pid"]))
    record.unlink(missing_ok=True)


def _log(port: int) -> Path:
    return FOLDER / f"{port}.log"


def _release(port: int) -> Path:
    return FOLDER / f"{port}.release"
