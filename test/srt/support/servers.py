"""SGLang servers for the tests, and the plain target that every output is compared with.

Servers are forked from a process that has SGLang imported (warm_start.py).
"""

import contextlib
import functools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving import TARGET, Server, Start, importing, serve, start_cold, stop
from support.warm_start import ForkServer

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.hardware_backend.cpu import runtime


def patched(*names: str) -> dict[str, str]:
    """Return the environment of a server with patches of server_patches/ and those of every test server."""
    folder = Path(__file__).parent / "server_patches"
    return {"SERVER_PATCH": " ".join(("known_costs", "scheduled_lengths", *names)), **importing(folder)}


# Verify lengths are chosen by costs that are given: measuring takes longer than all else at start-up.
KNOWN_COSTS = patched()
MEASURED_COSTS = {"SERVER_PATCH": "scheduled_lengths"}
# The wait for lengths stands under the draft, as on a GPU whose target plans with lengths on the host.
LATE_LENGTHS = {DFlashOptions.WAIT_UNDER_DRAFT.variable: "1", **patched("late_lengths")}

# One PyTorch thread, as two servers share the machine. The scheduler counts its KV slots after every step,
# and a leak or a double free ends the server.
COUNTED = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    # It would wait a second; the warm-up request has gone through by then.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
ENVIRONMENT = {**COUNTED, **KNOWN_COSTS}
# For servers with a long log or the default pool, and for stock SGLang: sorting such a pool twice takes as
# long as a step.
UNCOUNTED = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "0"}
# A small model under a JSON grammar otherwise writes white space for ever.
PLAIN_FLOAT32 = ("--dtype", "float32", "--constrained-json-disable-any-whitespace", "--sleep-on-idle")
# One test counts a log line per step; a small pool is counted quickly after every step.
FLOAT32 = (*PLAIN_FLOAT32, "--random-seed", "7", "--max-total-tokens", "16384", "--decode-log-interval", "1")

COPIES = ("--speculative-copy-ahead",)

# The verify width changes from cycle to cycle, with a pause longer than P-EAGLE leaves states pending.
WIDTHS_CHANGE = (
    "--speculative-adaptive",
    "--speculative-adaptive-config",
    str(Path(__file__).parents[1] / "golden" / "widths-change.json"),
)


@functools.cache
def fork_server() -> ForkServer:
    """Return the process that servers are forked from, started at the first call.

    Only our plugin is loaded: another one, which SGLang brings, hooks a flag, and SGLang then walks all
    loaded modules in every fork.
    """
    return ForkServer.start({**COUNTED, "SGLANG_PLUGINS": "dflash"})


def warm_start() -> Start | None:
    """Return `serve`'s way to start a server by a fork, or None on a GPU.

    CUDA does not survive a fork.
    """
    if not runtime.needs_stand_in():
        return None
    return fork_server().run_main


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a process; the code is -9 if it had to be killed."""

    code: int
    output: str


def run_to_end(
    *argv: object, environment: dict[str, str] | None = None, is_cold: bool = False, timeout: float = 300
) -> Ended:
    """Run `python ARGV`, forked from the fork server unless `is_cold`."""
    start = start_cold if is_cold else warm_start() or start_cold
    with tempfile.NamedTemporaryFile("w+b") as log:
        process = start([str(argument) for argument in argv], environment or {}, log)
        deadline = time.monotonic() + timeout
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        stop(process)
        log.seek(0)
        return Ended(process.returncode, log.read().decode(errors="replace"))


def wait_for_end(server: Server) -> int | None:
    """Return a server's exit code, or None if it is alive after a minute."""
    deadline = time.monotonic() + 60
    while server.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return server.process.poll()


class Reference:
    """The bundled target served by stock SGLang without speculation. It remembers its answers."""

    def __init__(self, server: Server):
        self.server = server
        self._answers: dict[str, Any] = {}

    def answers(self, requests: Sequence[dict], concurrency: int = 48) -> list[dict]:
        """Return an answer per request, with two top log probabilities at every position."""
        keys = [json.dumps(request, sort_keys=True) for request in requests]
        missing = [key for key in dict.fromkeys(keys) if key not in self._answers]
        new = [{"return_logprob": True, "top_logprobs_num": 2, **json.loads(key)} for key in missing]
        self._answers.update(zip(missing, self.server.generate_many(new, concurrency)))
        return [self._answers[key] for key in keys]

    def answer(self, request: dict) -> dict:
        return self.answers([request])[0]


class Servers:
    """Starts the requested server, or reuses the last one if it is configured the same."""

    def __init__(self):
        self._stack = contextlib.ExitStack()
        self._configuration: tuple | None = None
        self._server: Server | None = None

    def get(
        self, *arguments: object, environment: dict[str, str] | None = None, is_cold: bool = False
    ) -> Server:
        """Return a running server.

        Args:
            *arguments: The server's command line, without --model-path.
            environment: Variables on top of ENVIRONMENT.
            is_cold: Start it in a separate interpreter, if the test is about the server's processes.
        """
        wanted = tuple(map(str, arguments)), environment, is_cold
        if self._configuration != wanted or self._server.process.poll() is not None:
            self.close()
            env = {**ENVIRONMENT, **(environment or {})}
            self._server = self._stack.enter_context(
                serve("--model-path", TARGET, *wanted[0], env=env, start=None if is_cold else warm_start())
            )
            self._configuration = wanted
        return self._server

    def close(self) -> None:
        self._configuration = None
        self._stack.close()


@contextlib.contextmanager
def plain_target(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Reference]:
    """Serve the target alone."""
    env = {**ENVIRONMENT, **UNCOUNTED, **(environment or {})}
    pool = "--max-total-tokens", "32768"  # the default pool takes seconds to fill with zeros
    with serve("--model-path", TARGET, *pool, *arguments, env=env, start=warm_start()) as server:
        yield Reference(server)
