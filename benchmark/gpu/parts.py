"""The list of parts of a GPU run, in the order of need."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu import checks, measure, servers
from gpu.measure import SAMPLED, Session
from gpu.servers import ADAPTIVE, DEFAULT, ServerSpec
from serving import DFLASH2_DRAFT, DRAFT, PEAGLE_DRAFT, ROOT, TARGET
from shapes import QWEN3_06B, QWEN3_4B, QWEN3_8B, Pair

# Estimated seconds, from the run of 2026-11-23 on an H100 (benchmark/results/2026-11-23-h100.md), or guessed
# if it did not run there. A start includes the first request and the end. IMPORTS_S of it are over when the
# server was held.
START_S, ADAPTIVE_START_S, SMOKE_START_S, IMPORTS_S = 80, 95, 50, 40
LOAD_S, LONG_LOAD_S, ANSWERS_S = 8, 11, 6
# What a machine compiles once, by the figures' names: FlashInfer's attention for a head size, its sampler.
COLD_S = {"triton": 25, "flashinfer-128": 60, "flashinfer-64": 60, "sampler": 120}
LONG_CONTEXT = 24_000  # tokens


@dataclass(frozen=True)
class Step:
    """A figure, PART/NAME. run: returns it, JSON-ready; its list "problems" names failures."""

    name: str
    seconds: float
    run: Callable[[Session], dict]


@dataclass(frozen=True)
class Part:
    """A server with its steps, or steps without a server. cold: keys of COLD_S."""

    name: str
    steps: list[Step]
    spec: ServerSpec | None = None
    start_seconds: float = 0.0
    cold: frozenset[str] = frozenset()

    def seconds(self, steps: Sequence[Step], is_held: bool, compiled: frozenset[str]) -> float:
        """Estimate the seconds of steps. compiled: keys of COLD_S that are over."""
        start = max(0.0, self.start_seconds - IMPORTS_S * is_held)
        cold = sum(COLD_S[name] for name in self.cold - compiled)
        return start + cold + sum(step.seconds for step in steps)


def list_of_parts() -> list[Part]:
    """Return all parts in their order."""
    drawn = ("--speculative-draft-sample-method", "probabilistic")
    like = "load-1", "load-16", "load-48"
    mixed = "mixed-48", "mixed-96", "mixed-16", "mixed-1"
    as_users = "sampled-48", "sampled-1", "long-1"
    return [
        # A first call of nine minutes: ours against the built-in, then FlashInfer's answers and its ratio.
        _speed(QWEN3_8B, "fa3", "ours", *like),
        _speed(QWEN3_8B, "fa3", "built-in", *like),
        _smoke("flashinfer", "flashinfer", DRAFT, least=2.7),
        _smoke("flashinfer-wait-under-draft", "flashinfer", DRAFT, waits=True, least=2.7),
        _speed(QWEN3_8B, "flashinfer", "ours", *like),
        _speed(QWEN3_8B, "flashinfer", "ours-wait-under-draft", *like),
        # A second one: lengths by request, where the host is the bound, and what a useless draft costs.
        _speed(QWEN3_8B, "flashinfer", "built-in", *like),
        _speed(QWEN3_8B, "fa3", "mixed-adaptive", *mixed),
        _speed(QWEN3_8B, "fa3", "mixed-whole-blocks", *mixed),
        *(_speed(QWEN3_06B, "fa3", setting, "load-1", "load-16") for setting in ("ours", "built-in")),
        *(_speed(QWEN3_4B, "fa3", setting, "load-1", "load-16") for setting in ("ours", "built-in")),
        _speed(QWEN3_8B, "fa3", "no-speculation", "load-1", "load-48"),
        _speed(QWEN3_8B, "fa3", "useless-draft", "load-48"),
        # A third one: what every user gets.
        _speed(QWEN3_8B, DEFAULT, "ours", *as_users),
        _smoke("dflash2-drawn", "fa3", DFLASH2_DRAFT, *drawn, least=4.2, is_sampled=True),
        _tests("host-transfers", "test/srt/server/test_host_transfers.py", 60),
        _speed(QWEN3_8B, DEFAULT, "built-in", *as_users),
        # If there is more time.
        _smoke("default-flags", DEFAULT, DRAFT),
        _smoke("peagle", "fa3", PEAGLE_DRAFT, least=3.0),
        _tests("unit", "test/srt/unit", 240),
    ]


def rehearsed(part: Part) -> Part:
    """Return the part that a CPU takes in its place. Nothing is compiled there."""
    return replace(part, spec=part.spec and servers.on_cpu(part.spec), cold=frozenset())


def _speed(pair: Pair, backend: str, setting: str, *names: str) -> Part:
    """Plan a server of a shape. names: of steps, each with the number of its requests."""
    part, (environment, flags) = f"speed/{backend}/{pair.name}/{setting}", servers.SETTINGS[setting]
    kinds = {"sampled": {"sampling": SAMPLED}, "long": {"context": LONG_CONTEXT}}
    loads, steps = set(), [_start(part)]
    for name in names:
        kind, requests = name.split("-")
        run = partial(measure.measure, requests=int(requests), **kinds.get(kind, {}))
        steps.append(Step(f"{part}/{name}", LONG_LOAD_S if kind == "long" else LOAD_S, run))
        loads.add(int(requests))
    folder, sizes = servers.SCRATCH / pair.name, " ".join(map(str, sorted(loads)))
    spec = servers.server(
        target=f"{folder}/target --load-format dummy --skip-tokenizer-init",
        draft=None if setting == "no-speculation" else f"{folder}/draft",
        backend=backend,
        limits=f"{servers.SHAPE_LIMITS} --max-running-requests {max(loads)} --cuda-graph-bs-decode {sizes}",
        environment=environment,
        flags=flags,
    )
    start = ADAPTIVE_START_S if ADAPTIVE in flags else START_S
    return Part(part, steps, spec, start, _cold(backend, 128))


def _smoke(name: str, backend: str, draft: Path, *flags: str, waits: bool = False, **checked: Any) -> Part:
    """Plan a server of a bundled pair. checked: arguments of `check_answers`."""
    paths = (str(model.relative_to(ROOT)) for model in (TARGET, draft))
    environment = servers.PLUGIN | (servers.WAIT_UNDER_DRAFT if waits else {})
    spec = servers.server(*paths, backend, servers.BUNDLED_LIMITS, environment, flags)
    part = f"smoke/{name}"
    steps = [_start(part), Step(f"{part}/answers", ANSWERS_S, partial(checks.check_answers, **checked))]
    return Part(part, steps, spec, SMOKE_START_S, _cold(backend, 64))


def _start(part: str) -> Step:
    return Step(f"{part}/start", 0.0, measure.first_request)  # before anything is timed


def _cold(backend: str, head_size: int) -> frozenset[str]:
    more = {"flashinfer": {f"flashinfer-{head_size}"}, DEFAULT: {"sampler"}}
    return frozenset({"triton"} | more.get(backend, set()))


def _tests(name: str, path: str, seconds: float) -> Part:
    """Plan the tests marked gpu in a file or folder."""
    return Part(f"tests/{name}", [Step(f"tests/{name}/run", seconds, partial(checks.run_tests, path=path))])
