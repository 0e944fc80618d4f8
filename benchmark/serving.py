"""Start SGLang servers and talk to them. Shared by the benchmarks and the tests."""

import argparse
import concurrent.futures
import contextlib
import functools
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "models" / "tiny-qwen3-code"
DRAFT = ROOT / "models" / "tiny-qwen3-code-dflash"
SPECULATORS_DRAFT = ROOT / "models" / "tiny-qwen3-code-dflash-speculators"
PEAGLE_DRAFT = ROOT / "models" / "tiny-qwen3-code-peagle"
DFLASH2_DRAFT = ROOT / "models" / "tiny-qwen3-code-dflash2"
HYBRID_TARGET = ROOT / "models" / "tiny-qwen3_5-code"
HYBRID_DRAFT = ROOT / "models" / "tiny-qwen3_5-code-dflash"
HYBRID_PEAGLE_DRAFT = ROOT / "models" / "tiny-qwen3_5-code-peagle"
HYBRID_DFLASH2_DRAFT = ROOT / "models" / "tiny-qwen3_5-code-dflash2"
# Not in the repository: `make model` fetches it.
CHAT_TARGET = ROOT / "models" / "smollm2-135m-instruct"
CHAT_DRAFT = ROOT / "models" / "smollm2-135m-instruct-dflash2"
HELDOUT_PROMPTS = ROOT / "benchmark" / "prompts" / "heldout.jsonl"
START_TIMEOUT_S = 240
# As pages name them, with the flag in /proc/cpuinfo.
INSTRUCTIONS = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX512-BF16": "avx512_bf16", "AMX": "amx_tile"}
_SERVER_PORTS = (*range(20_000, 22_000), *range(30_000, 32_000))

# The flag with which every cycle verifies whole blocks, on a CPU too. Then no count depends on a clock.
WHOLE_BLOCKS = "--no-speculative-adaptive"

# (command, environment, log) -> a process with `pid`, `poll`, `wait` and `returncode`
Start = Callable[[Sequence[str], dict[str, str], BinaryIO], Any]


def describe_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's model, which of `INSTRUCTIONS` it has, and its number of cores.

    Without a model and flags in `cpuinfo`, the architecture stands for both.
    """
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    cpu = platform.machine()
    if {"model name", "flags"} <= facts.keys():
        flags = facts["flags"].split()
        has = [f"{name} {'yes' if flag in flags else 'no'}" for name, flag in INSTRUCTIONS.items()]
        cpu = f"{facts['model name']} ({', '.join(has)})"
    return f"{cpu}, {os.cpu_count()} CPU cores"


def answer_many(
    answer: Callable[[dict], Any], requests: Sequence[dict], concurrency: int, due: Sequence[float] = ()
) -> list[Any]:
    """Answer all requests, at most `concurrency` at a time.

    Args:
        answer: Sends one request and returns its answer.
        requests: In the order in which they begin.
        concurrency: The most requests in flight.
        due: Seconds from now before which each request does not begin, ascending. Empty: all are due at once.
            The answer of a request that was due, a dictionary, then has "seconds" since it was.

    Returns:
        The answers, in the order of their requests.
    """
    start = time.perf_counter()

    def answer_when_due(request: dict, at: float) -> Any:
        time.sleep(max(0.0, start + at - time.perf_counter()))
        return {**answer(request), "seconds": time.perf_counter() - start - at}

    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(answer_when_due, requests, due) if due else pool.map(answer, requests))


class ServerDied(RuntimeError):
    """The process ended before it was ready; the message ends with its output."""


def verdict_or_2(main: Callable[[], int | None]) -> Callable[[], int]:
    """Let a program whose status 1 is a verdict end with 2 if it cannot reach one.

    Bad input, a file or server that is not there, and a server or step that fails are said in one line.
    """

    def say(error: Exception) -> None:
        said = ": ".join((str(error), *getattr(error, "__notes__", ())))
        print(f"{Path(sys.argv[0]).stem}: {said}", file=sys.stderr)

    @functools.wraps(main)
    def run() -> int:
        try:
            return main() or 0
        except (ImportError, OSError, ServerDied, subprocess.CalledProcessError) as error:
            say(error)
        except Exception as error:
            from sglang_dflash.srt.doctor.pair import BadInput  # here: a GPU's list needs no plugin

            # Of a bug the traceback is shown. Python would exit with 1.
            say(error) if isinstance(error, BadInput) else traceback.print_exc()
        return 2

    return run


def documented(text: str) -> argparse.ArgumentParser:
    """Return a parser whose help begins with a program's docstring."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


@dataclass
class Server:
    """A running server. `generate` speaks SGLang's native API; use `url` for anything else.

    `process` and `log_path` are None if somebody else started it.
    """

    url: str
    process: subprocess.Popen | None
    log_path: Path | None

    def generate(self, **request: Any) -> Any:
        """POST /generate; returns the decoded answer, or raises urllib.error.HTTPError."""
        return self.post("/generate", request)

    def generate_many(
        self, requests: Sequence[dict], concurrency: int, due: Sequence[float] = ()
    ) -> list[Any]:
        """POST all requests as `answer_many` does; return the answers in their order."""
        return answer_many(lambda request: self.generate(**request), requests, concurrency, due)

    def post(self, path: str, body: dict, timeout: float = 600) -> Any:
        request = urllib.request.Request(
            self.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        answer = self._read(request, timeout)
        try:
            return json.loads(answer)
        except json.JSONDecodeError:
            return answer.decode()

    def get(self, path: str, timeout: float = 60) -> Any:
        answer = self._read(self.url + path, timeout).decode()
        return json.loads(answer) if answer.startswith(("{", "[")) else answer

    def _read(self, request: str | urllib.request.Request, timeout: float) -> bytes:
        """Return the body of a response. An error names the URL, or quotes the end of our server's log."""
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.read()
        except OSError as error:
            is_answer = isinstance(error, urllib.error.HTTPError)
            error.add_note(self.url if is_answer or self.process is None else self.ending())
            raise

    def flush_cache(self) -> None:
        """Empty the prefix cache.

        SGLang refuses (HTTP 400) while a request is running, as the last one may be for a step after its
        answer.
        """
        for attempt in range(50):
            try:
                self.post("/flush_cache", {})
                return
            except urllib.error.HTTPError as error:
                if error.code != 400 or attempt == 49:
                    raise
            time.sleep(0.1)

    def log(self) -> str:
        """Everything the server and its children have printed."""
        return self.log_path.read_text(errors="replace")

    def ending(self) -> str:
        """Return the exit code, None of a process that lives, and the end of the log, for a message."""
        return f"exit code {self.process.poll()}; its output ends:\n{self.log()[-4000:]}"


@contextlib.contextmanager
def serve(
    *arguments: str | Path,
    env: dict[str, str] | None = None,
    python: str = sys.executable,
    launcher: Sequence[str] = ("-m", "sglang.launch_server"),
    timeout: float = START_TIMEOUT_S,
    start: Start | None = None,
) -> Iterator[Server]:
    """Run `PYTHON LAUNCHER ARGUMENTS` until the block ends.

    `start` is another way to start LAUNCHER ARGUMENTS with these settings and this log, in a separate
    session. Raises ServerDied if the server never gets ready.
    """
    port = free_port()
    command = [*launcher, "--port", str(port), *map(str, arguments)]
    with tempfile.NamedTemporaryFile("wb", suffix=".log", prefix="sglang-", delete=False) as log:
        process = (start or functools.partial(start_cold, python=python))(command, env or {}, log)
    with ready(
        Server(url=f"http://127.0.0.1:{port}", process=process, log_path=Path(log.name)), timeout
    ) as server:
        yield server


@contextlib.contextmanager
def ready(server: Server, timeout: float = START_TIMEOUT_S) -> Iterator[Server]:
    """Wait until a started server answers; end it, and delete its log, when the block ends.

    Raises ServerDied if the server never gets ready.
    """
    try:
        _wait_until_ready(server, timeout)
        yield server
    finally:
        stop(server.process)
        server.log_path.unlink()


def start_cold(
    command: Sequence[str], env: dict[str, str], log: BinaryIO, python: str = sys.executable
) -> subprocess.Popen:
    """Start an interpreter that runs COMMAND in a separate session."""
    env = {**os.environ, **env}
    return subprocess.Popen(
        [python, *command], stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
    )


def dflash_arguments(draft: str | Path = DRAFT) -> list[str]:
    """Return the flags that turn DFLASH on."""
    return ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(draft)]


def importing(folder: Path) -> dict[str, str]:
    """Return an environment in which Python imports this folder's sitecustomize.py."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def stop(process: subprocess.Popen) -> None:
    """End a server and all its children, and wait until they have given their memory back.

    Raises TimeoutError if one of them lives on for a minute.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while group_is_alive(process.pid):
        if time.monotonic() > deadline:
            raise TimeoutError(f"a process of group {process.pid} lives on")
        time.sleep(0.02)


def group_is_alive(group: int) -> bool:
    """Return whether a process group has a process that is no zombie."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def heldout_prompts() -> list[dict]:
    """Return prompts {"id", "text", "num_tokens", ...} that no bundled model was trained on."""
    with open(HELDOUT_PROMPTS) as lines:
        return [json.loads(line) for line in lines]


def text_prompts() -> list[dict]:
    """Return the held-out prompts for benchmarks: plain text, no chats, of 16 to 512 tokens."""
    return [p for p in heldout_prompts() if not p.get("chat") and 16 <= p["num_tokens"] <= 512]


def _wait_until_ready(server: Server, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerDied(f"the server ended with {server.ending()}")
        # /health answers 503 until the warm-up request has gone through.
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(f"{server.url}/health", timeout=5),
        ):
            return
        time.sleep(0.1)
    raise ServerDied(f"the server is not ready after {timeout} s; {server.ending()}")


def free_port() -> int:
    """Find a free port that no outgoing connection takes while the server starts.

    Linux gives such connections the ports from 32768 on, unless told otherwise. SGLang's ranks meet on 22000
    to 29999.
    """
    draw = random.SystemRandom()  # a test may have seeded the shared generator
    while True:
        port = draw.choice(_SERVER_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
