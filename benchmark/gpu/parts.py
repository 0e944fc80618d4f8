"""The list of parts of a GPU run, in the order of need."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu import checks, measure, servers
from gpu.measure import Session, Sizes
from gpu.servers import (
    BOUNDS,
    BUILT_IN_DFLASH,
    DFLASH,
    FP8_HEAD,
    MIXED_ADAPTIVE,
    MIXED_WHOLE,
    NO_SPECULATION,
    USELESS,
    ServerSpec,
)
from gpu.shapes import QWEN3_8_27B, QWEN3_8B, Pair, shrunk
from serving import DFLASH2_DRAFT, DRAFT, HYBRID_DRAFT, HYBRID_TARGET, PEAGLE_DRAFT, ROOT, TARGET

# Estimated seconds, from the run of 2026-11-23 on an H100 (benchmark/results/2026-11-23-h100.md), or guessed
# if it did not run there. A start includes the first requests and the end. IMPORTS_S of it are over when the
# server was held.
START_S, LARGE_START_S, DEFAULT_START_S, SMOKE_START_S, IMPORTS_S = 80, 105, 60, 50, 40
ADAPTIVE_START_S = 15  # more: it captures more graphs, and measures them
LOAD_S = {1: 3, 4: 3, 16: 4, 48: 9}
UNDRAFTED_S = {1: 11, 4: 11, 16: 13, 48: 17}  # of servers that verify a token a step
LARGE = 3.3  # times LOAD_S, by the bytes of the weights
MIXED_S, ANSWERS_S, PROFILE_S, TESTS_S = 12, 6, 12, 60
EVERY_LOAD = Path(__file__).parent / "every_load.json"  # else adaptive width begins at the break-even
FIRST_TESTS = ("test_host_transfers",)


@dataclass(frozen=True)
class Step:
    """A figure of a part. run: returns it, JSON-ready; its list "problems", if any, names failures."""

    name: str
    seconds: float
    run: Callable[[Session], dict]


@dataclass(frozen=True)
class Part:
    """A server with its steps, or steps without a server.

    says: what the server's log says on a GPU.
    """

    name: str
    steps: tuple[Step, ...]
    spec: ServerSpec | None = None
    start_seconds: float = 0.0
    says: tuple[str, ...] = ()

    def figures(self) -> list[str]:
        return [f"{self.name}/{step.name}" for step in self.steps]

    def seconds(self, steps: Sequence[Step] | None = None, is_held: bool = False) -> float:
        start = max(0.0, self.start_seconds - IMPORTS_S * is_held)
        return start + sum(step.seconds for step in (self.steps if steps is None else steps))


FIRST = Step("start", 0.0, measure.first_requests)  # of every server, before anything is timed


def list_of_parts(sizes: Sizes) -> list[Part]:
    """Return all parts in their order, or the same with small models for a rehearsal on a CPU."""
    dense, hybrid = (shrunk(pair) if sizes.is_rehearsal else pair for pair in (QWEN3_8B, QWEN3_8_27B))
    speed, mixed, smoke = (partial(make, sizes) for make in (_speed, _mixed, _smoke))
    replay = ("--enable-linear-replayssm-spec", "--linear-replayssm-cache-len", "32")
    sampled = ("--speculative-draft-sample-method", "probabilistic")
    whole_blocks = 0.0 if sizes.is_rehearsal else 2.9  # the default is adaptive width on a CPU
    row_graphs = ("DFLASH: made graphs of",)
    every_load = servers.ADAPTIVE, "--speculative-adaptive-config", servers.from_root(EVERY_LOAD)
    return [
        # Ours against the built-in, first where a request is alone.
        speed(dense, "fa3", DFLASH, (1, 48), profiled=1),
        speed(dense, "fa3", BUILT_IN_DFLASH, (1, 48)),
        speed(dense, "flashinfer", BOUNDS, (1,)),
        speed(dense, "flashinfer", BUILT_IN_DFLASH, (1,)),
        # Lengths by request against whole blocks.
        mixed(dense, "fa3", MIXED_ADAPTIVE),
        mixed(dense, "fa3", MIXED_WHOLE),
        # Whether speculation pays, and what a useless draft costs.
        speed(dense, "fa3", NO_SPECULATION, (1, 48)),
        speed(dense, "fa3", USELESS, (48,)),
        # What every user gets: is it right?
        smoke("default-flags", None, DRAFT, least=whole_blocks, says=("prefill CUDA graph end",)),
        smoke("context-limit", "fa3", DRAFT, "--speculative-num-draft-tokens", "16", least=2.7),
        # If there is more time.
        speed(dense, "flashinfer", DFLASH, (1,)),
        speed(dense, "fa3", FP8_HEAD, (1,)),
        smoke("own-lengths-hybrid", "fa3", HYBRID_DRAFT, *every_load, says=row_graphs),
        *_tests(FIRST_TESTS),
        smoke("replay-32", "fa3", HYBRID_DRAFT, *replay, least=2.9),
        *(speed(hybrid, "fa3", name, (1, 4)) for name in (DFLASH, NO_SPECULATION, BUILT_IN_DFLASH)),
        smoke("dflash2-sampled", "fa3", DFLASH2_DRAFT, *sampled, least=4.2, is_sampled=True),
        smoke("peagle", "fa3", PEAGLE_DRAFT, least=3.0),
        *_tests(),
    ]


def schedule(parts: Sequence[Part], seconds: float, is_held: bool = True) -> list[tuple[Part, float]]:
    """Return the parts that a call of `seconds` starts, each with the second at which it ends.

    By the estimates. is_held: whether the first one's server is held before; those after it are.
    """
    found, now = [], 0.0
    for part in parts:
        if now + part.seconds(is_held=is_held) <= seconds:
            now += part.seconds(is_held=is_held)
            found.append((part, now))
            is_held = True
    return found


def _backend(sizes: Sizes, name: str) -> str:
    return servers.CPU_BACKEND if sizes.is_rehearsal else name


def _speed(
    sizes: Sizes, pair: Pair, backend: str, variant: str, loads: Iterable[int], profiled: int = 0
) -> Part:
    """Plan loads of like requests, and a profile of `profiled` of them; 0: none."""
    is_large, accepts = pair.name == QWEN3_8_27B.name, variant not in (NO_SPECULATION, USELESS)
    steps = [FIRST]
    for requests in loads:
        seconds = (LOAD_S if accepts else UNDRAFTED_S)[requests] * (LARGE if is_large else 1)
        run = partial(measure.measure_load, requests=requests)
        steps.append(Step(f"load-{requests}", seconds, run))
    if profiled:
        run = partial(measure.profile, requests=profiled)
        steps.append(Step(f"profile-{profiled}", PROFILE_S, run))
    start = (LARGE_START_S if is_large else START_S) + ADAPTIVE_START_S * (variant == USELESS)
    spec = servers.shape_server(pair, variant, _backend(sizes, backend))
    return Part(f"speed/{backend}/{pair.name}/{variant}", tuple(steps), spec, start)


def _mixed(sizes: Sizes, pair: Pair, backend: str, variant: str) -> Part:
    loads = (partial(measure.measure_mixed, requests=requests) for requests in servers.MIXED_SIZES)
    steps = [Step(f"load-{load.keywords['requests']}", MIXED_S, load) for load in loads]
    start = START_S + ADAPTIVE_START_S * (variant == MIXED_ADAPTIVE)
    spec = servers.shape_server(pair, variant, _backend(sizes, backend))
    return Part(f"speed/{backend}/{pair.name}/{variant}", (FIRST, *steps), spec, start)


def _smoke(
    sizes: Sizes,
    name: str,
    backend: str | None,
    draft: Path,
    *flags: str,
    least: float = 0.0,
    says: tuple[str, ...] = (),
    is_sampled: bool = False,
) -> Part:
    """Plan a server of a bundled pair whose answers are compared with the target's.

    backend: None for a server without flags. least: the accept length of the texts on a CPU less a tenth, 0
    where cycles may draft nothing.
    """
    target = HYBRID_TARGET if draft == HYBRID_DRAFT else TARGET
    if backend is None:
        spec, start = servers.default_server(target, draft), DEFAULT_START_S
    else:
        folder = str(draft.relative_to(ROOT))
        spec = servers.bundled_server(target, folder, _backend(sizes, backend), *flags)
        start = SMOKE_START_S
    run = partial(checks.check_answers, target=target.name, least=least, is_sampled=is_sampled)
    return Part(f"smoke/{name}", (FIRST, Step("answers", ANSWERS_S, run)), spec, start, says)


def _tests(first: Sequence[str] = ()) -> list[Part]:
    """Plan the tests marked gpu, a file each: those of `first`, or all others."""
    files = sorted((ROOT / "test" / "srt").rglob("test_*.py"), key=lambda file: file.name)
    marked = [f for f in files if "pytest.mark.gpu" in f.read_text() or "against_twin" in f.read_text()]
    wanted = [f for f in marked if (f.stem in first if first else f.stem not in FIRST_TESTS)]
    runs = {f.stem: Step("run", TESTS_S, partial(checks.run_tests, file=f.relative_to(ROOT))) for f in wanted}
    return [Part(f"tests/{name}", (step,)) for name, step in runs.items()]
