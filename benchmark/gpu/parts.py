"""The list of parts of a GPU run, in the order of need."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu import checks, measure, servers
from gpu.measure import SAMPLED, Session, Sizes
from gpu.servers import (
    BUILT_IN,
    MIXED_ADAPTIVE,
    MIXED_WHOLE,
    NONE,
    OURS,
    PLUGIN,
    SETTINGS,
    USELESS,
    WAIT,
    WAIT_UNDER_DRAFT,
    ServerSpec,
)
from gpu.shapes import QWEN3_06B, QWEN3_4B, QWEN3_8_27B, QWEN3_8B, Pair, shrunk
from serving import DFLASH2_DRAFT, DRAFT, HYBRID_DRAFT, HYBRID_TARGET, PEAGLE_DRAFT, TARGET

# Estimated seconds, from the run of 2026-11-23 on an H100 (benchmark/results/2026-11-23-h100.md), or guessed
# if it did not run there. A start includes the first requests and the end. IMPORTS_S of it are over when the
# server was held.
START_S, SMOKE_START_S, IMPORTS_S = 80, 50, 40
LOAD_S = {1: 4, 4: 5, 16: 5, 48: 11}
UNDRAFTED_S = {1: 16, 4: 16, 16: 19, 48: 25}  # of servers that verify a token a step
LARGE = 3.3  # times that, by the bytes of the weights
MIXED_S, BURST_S, ANSWERS_S, PROFILE_S = 9, 10, 6, 10
# What a machine compiles once, by the figures' names: FlashInfer's attention for a head size, its sampler.
COLD_S = {"triton": 25, "flashinfer-128": 60, "flashinfer-64": 60, "sampler": 120}
LONG_CONTEXT = 24_000  # tokens


@dataclass(frozen=True)
class Step:
    """A figure of a part. run: returns it, JSON-ready; its list "problems", if any, names failures."""

    name: str
    seconds: float
    run: Callable[[Session], dict]


@dataclass(frozen=True)
class Part:
    """A server with its steps, or steps without a server.

    cold: keys of COLD_S. says: what the server's log says on a GPU.
    """

    name: str
    steps: tuple[Step, ...]
    spec: ServerSpec | None = None
    start_seconds: float = 0.0
    cold: frozenset[str] = frozenset()
    says: tuple[str, ...] = ()

    def figure(self, step: Step) -> str:
        return f"{self.name}/{step.name}"

    def figures(self) -> list[str]:
        return [self.figure(step) for step in self.steps]

    def seconds(
        self,
        steps: Sequence[Step] | None = None,
        is_held: bool = False,
        compiled: frozenset[str] = frozenset(),
    ) -> float:
        """Estimate the seconds of steps, None: of all. compiled: keys of COLD_S that are over."""
        start = max(0.0, self.start_seconds - IMPORTS_S * is_held)
        cold = sum(COLD_S[name] for name in self.cold - compiled)
        return start + cold + sum(step.seconds for step in (self.steps if steps is None else steps))


FIRST = Step("start", 0.0, measure.first_requests)  # of every server, before anything is timed


def list_of_parts(sizes: Sizes) -> list[Part]:
    """Return all parts in their order, or the same with small models for a rehearsal on a CPU."""
    speed, smoke = partial(_speed, sizes), partial(_smoke, sizes)
    replay = ("--enable-linear-replayssm-spec", "--linear-replayssm-cache-len", "32")
    drawn = ("--speculative-draft-sample-method", "probabilistic")
    least = 0.0 if sizes.is_rehearsal else 2.9  # the default is adaptive width on a CPU
    like = "load-1", "load-16", "load-48"
    mixed = "mixed-48", "mixed-96", "mixed-16", "mixed-1"
    as_users = "burst-48", "sampled-1", "sampled-48", "long-1"
    return [
        # A first call of nine minutes: ours against the built-in, then FlashInfer's answers and its ratio.
        speed(QWEN3_8B, "fa3", OURS, *like, "profile-1"),
        speed(QWEN3_8B, "fa3", BUILT_IN, *like),
        smoke("flashinfer", "flashinfer", DRAFT, least=2.7),
        smoke("flashinfer-wait-under-draft", "flashinfer", DRAFT, least=2.7, environment=WAIT_UNDER_DRAFT),
        speed(QWEN3_8B, "flashinfer", OURS, *like),
        speed(QWEN3_8B, "flashinfer", WAIT, *like),
        # A second one: lengths by request, where the host is the bound, and what a useless draft costs.
        speed(QWEN3_8B, "flashinfer", BUILT_IN, *like),
        speed(QWEN3_8B, "fa3", MIXED_ADAPTIVE, *mixed),
        speed(QWEN3_8B, "fa3", MIXED_WHOLE, *mixed),
        *(speed(QWEN3_06B, "fa3", setting, "load-1", "load-16") for setting in (OURS, BUILT_IN)),
        *(speed(QWEN3_4B, "fa3", setting, "load-1", "load-16") for setting in (OURS, BUILT_IN)),
        speed(QWEN3_8B, "fa3", NONE, "load-1", "load-48"),
        speed(QWEN3_8B, "fa3", USELESS, "load-48"),
        # A third one: what every user gets.
        speed(QWEN3_8B, "default", OURS, *as_users),
        smoke("dflash2-drawn", "fa3", DFLASH2_DRAFT, *drawn, least=4.2, is_sampled=True),
        _tests("host-transfers", "test/srt/server/test_host_transfers.py", 60),
        speed(QWEN3_8B, "default", BUILT_IN, *as_users),
        # If there is more time.
        smoke("default-flags", "default", DRAFT, least=least, says=("prefill CUDA graph end",)),
        smoke("fa3", "fa3", DRAFT, "--speculative-num-draft-tokens", "16", least=2.7),
        smoke("own-lengths-hybrid", "fa3", HYBRID_DRAFT, servers.ADAPTIVE, says=("DFLASH: made graphs of",)),
        smoke("replay-32", "fa3", HYBRID_DRAFT, *replay, least=2.9),
        smoke("peagle", "fa3", PEAGLE_DRAFT, least=3.0),
        *(speed(QWEN3_8_27B, "fa3", setting, "load-1", "load-4") for setting in (OURS, NONE, BUILT_IN)),
        _tests("unit", "test/srt/unit", 240),
    ]


def schedule(
    parts: Sequence[Part], seconds: float, compiled: frozenset[str] = frozenset()
) -> Iterator[tuple[Part, float]]:
    """Yield the parts that a call of `seconds` starts, each with the second at which it ends.

    By the estimates. The server of each is held before: of the first one before the call.
    """
    now = 0.0
    for part in parts:
        if now + (takes := part.seconds(is_held=True, compiled=compiled)) <= seconds:
            now += takes
            compiled |= part.cold
            yield part, now


def _backend(sizes: Sizes, name: str) -> str | None:
    """Return the attention backend. None: flags have their defaults."""
    if name == "default":
        return None
    return servers.CPU_BACKEND if sizes.is_rehearsal else name


def _cold(sizes: Sizes, backend: str, head_size: int) -> frozenset[str]:
    more = {"flashinfer": [f"flashinfer-{head_size}"], "default": ["sampler"]}.get(backend, [])
    return frozenset() if sizes.is_rehearsal else frozenset({"triton", *more})


def _speed(sizes: Sizes, pair: Pair, backend: str, setting: str, *names: str) -> Part:
    """Plan a server of a shape. names: of steps, each with the number of its requests."""
    kinds = {
        "load": (measure.measure_load, UNDRAFTED_S if setting in (NONE, USELESS) else LOAD_S),
        "sampled": (partial(measure.measure_load, sampling=SAMPLED), LOAD_S),
        "long": (partial(measure.measure_load, context=LONG_CONTEXT), {1: 10}),
        "mixed": (measure.measure_mixed, dict.fromkeys((1, 16, 48, 96), MIXED_S)),
        "burst": (measure.measure_burst, {48: BURST_S}),
        "profile": (measure.profile, {1: PROFILE_S}),
    }
    times, steps, loads = LARGE if pair is QWEN3_8_27B else 1, [FIRST], set()
    for name in names:
        kind, requests = name.split("-")
        run, seconds = kinds[kind]
        steps.append(Step(name, times * seconds[int(requests)], partial(run, requests=int(requests))))
        loads.add(sizes.requests(int(requests)))
    start = START_S + 25 * (pair is QWEN3_8_27B) + 15 * (servers.ADAPTIVE in SETTINGS[setting][1])
    spec = servers.shape_server(
        shrunk(pair) if sizes.is_rehearsal else pair, setting, _backend(sizes, backend), sorted(loads)
    )
    cold = _cold(sizes, backend, pair.target.head_dim)
    return Part(f"speed/{backend}/{pair.name}/{setting}", tuple(steps), spec, start, cold)


def _smoke(
    sizes: Sizes,
    name: str,
    backend: str,
    draft: Path,
    *flags: str,
    least: float = 0.0,
    environment: dict[str, str] | None = None,
    says: tuple[str, ...] = (),
    is_sampled: bool = False,
) -> Part:
    """Plan a server of a bundled pair whose answers are compared with the target's.

    least: the accept length of the texts on a CPU less a tenth, 0 where cycles may draft nothing.
    """
    target = HYBRID_TARGET if draft == HYBRID_DRAFT else TARGET
    settings = PLUGIN | (environment or {})
    spec = servers.bundled_server(target, draft, _backend(sizes, backend), settings, *flags)
    run = partial(checks.check_answers, target=target.name, least=least, is_sampled=is_sampled)
    steps = FIRST, Step("answers", ANSWERS_S, run)
    return Part(f"smoke/{name}", steps, spec, SMOKE_START_S, _cold(sizes, backend, 64), says)


def _tests(name: str, path: str, seconds: float) -> Part:
    """Plan the tests marked gpu in a file or folder."""
    return Part(f"tests/{name}", (Step("run", seconds, partial(checks.run_tests, path=path)),))
