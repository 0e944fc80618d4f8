"""A server that has imported everything and waits, held before it touches the GPU.

Most of a server's start is imports. They take no GPU, so they run while another server is measured, or
between two commands. A file names the server that is held, so that the next call of the program finds it.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpu.servers import SCRATCH, ServerSpec
from gpu.state import write
from serving import ROOT, Server, free_port, importing, start_cold

FOLDER = SCRATCH / "held"
LAUNCHER = ("-m", "sglang.launch_server")


@dataclass
class Adopted:
    """A server's process that another call of the program started: what `serving` needs of a Popen."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return None while the process runs. Its exit status is unknown, and reported as 1."""
        with suppress(ProcessLookupError):
            if _state(self.pid) != "Z":
                return None
        self.returncode = 1
        return 1

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a held server", timeout or 0.0)
            time.sleep(0.05)
        return 1


def hold(spec: ServerSpec) -> None:
    """Start a server that waits. One that is held already, and is another one, ends."""
    if is_held(spec):
        return
    drop()
    FOLDER.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log, release = _log(port), _release(port)
    release.unlink(missing_ok=True)
    environment = {**spec.environment, "GPU_BENCHMARK_RELEASE": str(release.absolute())}
    environment |= importing(ROOT / "benchmark" / "gpu" / "hold")
    with open(log, "wb") as out:
        process = start_cold([*LAUNCHER, "--port", str(port), *spec.arguments], environment, out)
    write(_record(), json.dumps({"command": spec.command(), "pid": process.pid, "port": port}))


def take(spec: ServerSpec) -> Server | None:
    """Release the server that is held, if it is this one; it is not held any more. None: there is none."""
    known = _known(spec)
    if known is None:
        return None
    _record().unlink()
    _release(known["port"]).touch()
    return Server(f"http://127.0.0.1:{known['port']}", Adopted(known["pid"]), _log(known["port"]))


def is_held(spec: ServerSpec) -> bool:
    return _known(spec) is not None


def drop() -> None:
    """End the server that is held, if any."""
    _end(_record())


@contextmanager
def running(pid: int) -> Iterator[None]:
    """Note that a server is measured, for `end_unfinished` of another call."""
    write(_unfinished(), json.dumps({"pid": pid}))
    try:
        yield
    finally:
        _unfinished().unlink(missing_ok=True)


def end_unfinished() -> None:
    """End the server that a killed call was measuring, if any."""
    _end(_unfinished())


def _end(record: Path) -> None:
    if record.exists():
        with suppress(ProcessLookupError):
            os.killpg(json.loads(record.read_text())["pid"], signal.SIGKILL)
        record.unlink()


def _known(spec: ServerSpec) -> Mapping | None:
    """Return the record of the server that is held, if it is this one and alive."""
    if not _record().exists():
        return None
    known = json.loads(_record().read_text())
    is_ours = known["command"] == spec.command() and Adopted(known["pid"]).poll() is None
    return known if is_ours else None


def _record() -> Path:
    return FOLDER / "server.json"


def _log(port: int) -> Path:
    return FOLDER / f"{port}.log"


def _unfinished() -> Path:
    return FOLDER / "measured.json"


def _release(port: int) -> Path:
    return FOLDER / f"{port}.release"


def _state(pid: int) -> str:
    """Return a process's state letter. Raises ProcessLookupError if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError as error:
        raise ProcessLookupError(pid) from error
