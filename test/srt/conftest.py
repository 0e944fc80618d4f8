"""Servers shared by the server tests, and the plain target every output is held against.

Servers are forked from a process that has SGLang imported (warm_start.py). At most one tested server lives at
a time, and it is kept until a test asks for another configuration: tests that share one stand next to each
other. The reference lives beside it, asleep."""

import contextlib
import functools
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from serving import TARGET, WHOLE_BLOCKS, Server, Start, importing, serve, start_cold, stop
from support.warm_start import Nursery

from sglang_dflash.srt.hardware_backend.cpu import runtime

# One PyTorch thread, as two servers share the machine. The scheduler counts its KV slots after every step,
# and a leak or a double free ends the server instead of a log line.
ENVIRONMENT = {
    **WHOLE_BLOCKS,
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # a second of waiting; the warm-up request has gone through by then
}
# For servers that say much, or have the default pool, and for stock SGLang: sorting such a pool twice takes
# as long as a step.
UNCOUNTED = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "0", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "0"}
# A small model in a JSON grammar otherwise goes on with white space for ever.
PLAIN_FLOAT32 = ("--dtype", "float32", "--constrained-json-disable-any-whitespace", "--sleep-on-idle")
# A log line per step, as one test counts them; a pool that need not be counted for long after every step.
FLOAT32 = (*PLAIN_FLOAT32, "--random-seed", "7", "--max-total-tokens", "16384", "--decode-log-interval", "1")

# The verify width changes from cycle to cycle, with a pause longer than what P-EAGLE leaves pending.
WIDTHS_CHANGE = (
    "--speculative-adaptive",
    "--speculative-adaptive-config",
    str(Path(__file__).parent / "golden" / "widths-change.json"),
)

# Files that take minutes, the longest first: the two workers of `make test` take files in this order.
LONGEST = (
    "test_lossless.py",
    "test_acceptance_profiles.py",
    "test_sampled_requests.py",
    "test_seeds.py",
    "test_dflash.py",
    "test_sampled_sequences.py",
    "test_disaggregation.py",
    "test_lossless_hybrid.py",
    "test_penalties.py",
    "test_target_families.py",
    "test_ranks.py",
    "test_startup_errors.py",
    "test_rehearsal.py",
    "test_stock_sglang.py",
    "test_doctor.py",
    "test_copy_ahead_scheduled.py",
)

# One logit computed in two batch shapes differs by about 1e-6 in float32, and two of them by twice that.
FLOAT32_TIE = 1e-5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order they are best begun in: long ones, others with servers, the rest."""
    with_servers = {item.path for item in items if item.get_closest_marker("server")}

    def rank(item: pytest.Item) -> tuple[int, bool]:
        name = item.path.name
        return LONGEST.index(name) if name in LONGEST else len(LONGEST), item.path not in with_servers

    items.sort(key=rank)


@functools.cache
def nursery() -> Nursery:
    # Only our plugin: another one that SGLang brings hooks a flag, for which SGLang walks all that is loaded
    # in every fork.
    return Nursery.start({**ENVIRONMENT, "SGLANG_PLUGINS": "dflash"})


def warm_start() -> Start | None:
    """`serve`'s way to start a server: from the nursery, or cold where there is a GPU, as CUDA does not
    survive a fork."""
    if not runtime.needs_stand_in():
        return None
    return nursery().run_main


@dataclass(frozen=True)
class Ended:
    """How a process ended; code -9 where it had to be killed."""

    code: int
    output: str


def run_to_end(
    *argv: object, environment: dict[str, str] | None = None, is_cold: bool = False, timeout: float = 300
) -> Ended:
    """`python ARGV`, from the nursery unless `is_cold`."""
    start = start_cold if is_cold else warm_start() or start_cold
    with tempfile.NamedTemporaryFile("w+b") as log:
        process = start([str(argument) for argument in argv], environment or {}, log)
        deadline = time.monotonic() + timeout
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        stop(process)
        log.seek(0)
        return Ended(process.returncode, log.read().decode(errors="replace"))


def patched(name: str) -> dict[str, str]:
    """The environment of a server with a change of server_patches/ made to it."""
    folder = Path(__file__).parent / "support" / "server_patches"
    return {"SERVER_PATCH": name, **importing(folder)}


class Reference:
    """The bundled target served without speculation, by stock SGLang code. Remembers its answers."""

    def __init__(self, server: Server):
        self.server = server
        self._answers: dict[str, Any] = {}

    def answers(self, requests: Sequence[dict], concurrency: int = 48) -> list[dict]:
        """One answer per request, with the target's two best log probabilities at every position."""
        keys = [json.dumps(request, sort_keys=True) for request in requests]
        missing = [key for key in dict.fromkeys(keys) if key not in self._answers]
        asked = [{"return_logprob": True, "top_logprobs_num": 2, **json.loads(key)} for key in missing]
        self._answers.update(zip(missing, self.server.generate_many(asked, concurrency)))
        return [self._answers[key] for key in keys]

    def answer(self, request: dict) -> dict:
        return self.answers([request])[0]


class Servers:
    """Starts the server a test asks for; the one of the test before is kept if it is the same."""

    def __init__(self):
        self._stack = contextlib.ExitStack()
        self._wanted: tuple | None = None
        self._server: Server | None = None

    def get(
        self, *arguments: object, environment: dict[str, str] | None = None, is_cold: bool = False
    ) -> Server:
        """is_cold: in an interpreter of its own, where the test is about the server's processes."""
        wanted = tuple(map(str, arguments)), environment, is_cold
        if self._wanted != wanted or self._server.process.poll() is not None:
            self.close()
            env = {**ENVIRONMENT, **(environment or {})}
            self._server = self._stack.enter_context(
                serve("--model-path", TARGET, *wanted[0], env=env, start=None if is_cold else warm_start())
            )
            self._wanted = wanted
        return self._server

    def close(self) -> None:
        self._wanted = None
        self._stack.close()


@contextlib.contextmanager
def plain_target(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Reference]:
    env = {**ENVIRONMENT, **UNCOUNTED, **(environment or {})}
    with serve("--model-path", TARGET, *arguments, env=env, start=warm_start()) as server:
        yield Reference(server)


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    """The target alone, float32."""
    with plain_target(*PLAIN_FLOAT32, "--max-total-tokens", "32768") as reference:
        yield reference


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


def near_tie(reference_answer: dict, position: int) -> float:
    """How far, in log probability, the target's best token at this output position is ahead of its second."""
    top = reference_answer["meta_info"]["output_top_logprobs"][position] or []
    values = [value for value, *_ in top if value is not None]
    return values[0] - values[1] if len(values) > 1 else math.inf


def undecided_from(reference_answer: dict) -> int | None:
    """The first output position where float32 cannot tell the target's best two tokens apart: from there on
    the target has no one answer, it depends on the order of its additions. Known before any tested server
    answers."""
    count = len(reference_answer["meta_info"]["output_top_logprobs"])
    return next((i for i in range(count) if near_tie(reference_answer, i) < FLOAT32_TIE), None)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first differing entry, or None where both are equal."""
    for index, (a, b) in enumerate(zip(left, right)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def differences(requests: Sequence[dict], answers: Sequence[dict], expected: Sequence[dict]) -> list[dict]:
    """Every request whose output ids, text or reason to finish are not the reference's. What follows an
    undecided position is not compared."""
    found = []
    for request, got, want in zip(requests, answers, expected, strict=True):
        position = first_difference(got["output_ids"], want["output_ids"])
        reasons = [answer["meta_info"]["finish_reason"] for answer in (got, want)]
        if position is None and got["text"] == want["text"] and reasons[0] == reasons[1]:
            continue
        undecided = undecided_from(want)
        if position is not None and undecided is not None and position >= undecided:
            continue
        inside = position is not None and position < len(want["output_ids"])
        found.append(
            {
                "position": position,
                "gap": near_tie(want, position) if inside else None,
                "request": request,
                "got": (got["output_ids"], got["text"], reasons[0]),
                "want": (want["output_ids"], want["text"], reasons[1]),
            }
        )
    return found


def assert_same(requests: Sequence[dict], answers: Sequence[dict], expected: Sequence[dict]) -> None:
    """The lossless claim: not one token, character or reason to finish differs from the target's own."""
    found = differences(requests, answers, expected)
    lines = [
        f"first difference at output position {d['position']}, the target's best two tokens {d['gap']} apart there\n"
        f"    request {json.dumps(d['request'])[:600]}\n    got     {d['got']}\n    wanted  {d['want']}"
        for d in found
    ]
    assert not found, f"{len(found)} of {len(requests)} answers are not the target's:\n" + "\n".join(
        lines[:5]
    )
