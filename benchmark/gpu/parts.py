"""The list of parts of a GPU run, most valuable first."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu import caches, checks, measure, servers
from gpu.measure import Session, Sizes
from gpu.servers import (
    ADAPTIVE_DFLASH,
    BUILT_IN_DFLASH,
    DFLASH,
    NO_SPECULATION,
    SCRATCH,
    VARIANTS,
    ServerSpec,
)
from gpu.shapes import QWEN3_8_27B, QWEN3_8B, Pair, shrunk
from serving import DFLASH2_DRAFT, DRAFT, HYBRID_DRAFT, HYBRID_TARGET, PEAGLE_DRAFT, ROOT, TARGET

# Estimated seconds, from the run of 2026-11-23 on an H100 (benchmark/results/2026-11-23-h100.md), or guessed
# if it did not run there. A start includes the first requests and the end.
START_S, LARGE_START_S, DEFAULT_START_S, SMOKE_START_S = 80, 105, 60, 36
ADAPTIVE_START_S = 15  # more: it captures more graphs, and measures them
LOAD_S = {
    DFLASH: {1: 3, 4: 3, 16: 4, 48: 9},
    BUILT_IN_DFLASH: {1: 3, 4: 3, 16: 4, 48: 9},
    NO_SPECULATION: {1: 11, 4: 11, 16: 13, 48: 17},
    ADAPTIVE_DFLASH: {1: 14, 4: 15, 16: 17, 48: 24},
}
LARGE = 3.3  # times LOAD_S, by the bytes of the weights
ANSWERS_S, PROFILE_S, CACHES_S, TESTS_S = 4, 12, 20, 60


@dataclass(frozen=True)
class Step:
    """A figure of a part. run: returns it, JSON-ready; its list "problems", if any, names failures."""

    name: str
    seconds: float
    run: Callable[[Session], dict]


@dataclass(frozen=True)
class Part:
    """A server with its steps, or steps without a server.

    says: what the server's log says on a GPU. needs: the figure of another part. prepare: writes the files of
    the server.
    """

    name: str
    steps: tuple[Step, ...]
    spec: ServerSpec | None = None
    start_seconds: float = 0.0
    says: tuple[str, ...] = ()
    needs: str | None = None
    prepare: Callable[[], object] | None = None

    def figures(self) -> list[str]:
        return [f"{self.name}/{step.name}" for step in self.steps]

    def seconds(self, steps: Sequence[Step] | None = None) -> float:
        return self.start_seconds + sum(step.seconds for step in (self.steps if steps is None else steps))


FIRST = Step("start", 0.0, measure.first_requests)  # of every server, before anything is timed


def list_of_parts(sizes: Sizes) -> list[Part]:
    """Return all parts in their order, or the same with small models for a rehearsal on a CPU."""
    dense, hybrid = (shrunk(pair) if sizes.is_rehearsal else pair for pair in (QWEN3_8B, QWEN3_8_27B))
    speed, smoke = partial(_speed, sizes), partial(_smoke, sizes)
    home = SCRATCH if sizes.is_rehearsal else Path.home()
    replay = ("--enable-linear-replayssm-spec", "--linear-replayssm-cache-len", "32")
    sampled = ("--speculative-draft-sample-method", "probabilistic")
    chunks = ("--enable-mixed-chunk", "--chunked-prefill-size", "64")
    whole_blocks = 0.0 if sizes.is_rehearsal else 2.9  # the default is adaptive width on a CPU
    row_graphs, packed = ("DFLASH: made graphs of",), ("run packed",)
    return [
        # What every user gets.
        _answers_of(TARGET),
        smoke("default-flags", None, DRAFT, least=whole_blocks, says=("prefill CUDA graph end",)),
        # Whether speculation pays, and what adaptive width costs where it does not.
        *(speed(dense, "fa3", variant) for variant in VARIANTS),
        Part("caches", (Step("save", CACHES_S, partial(caches.save, home=home)),)),
        *(speed(dense, "flashinfer", variant) for variant in VARIANTS),
        # What has never run on a GPU.
        smoke("own-lengths", "fa3", DRAFT, "--speculative-adaptive", says=row_graphs),
        _answers_of(HYBRID_TARGET),
        smoke("own-lengths-hybrid", "fa3", HYBRID_DRAFT, "--speculative-adaptive", says=row_graphs),
        smoke("context-limit", "fa3", DRAFT, "--speculative-num-draft-tokens", "16", least=2.7),
        smoke("packed-fp8", "fa3", DRAFT, scheme="FP8_DYNAMIC", least=2.9, says=packed),
        smoke("packed-int4", "fa3", DRAFT, scheme="W4A16", least=2.8, says=packed),
        smoke("replay-32", "fa3", HYBRID_DRAFT, *replay, least=2.9),
        smoke("dflash2-sampled", "fa3", DFLASH2_DRAFT, *sampled, least=4.2, is_sampled=True),
        # The shape that people run.
        *(speed(hybrid, "fa3", variant, loads=(1, 4)) for variant in (DFLASH, NO_SPECULATION)),
        _profile(sizes, dense, "fa3"),
        *_tests(),
        # What ran before, if there is time.
        smoke("peagle", "fa3", PEAGLE_DRAFT, least=3.0),
        smoke("triton", "triton", DRAFT, least=2.9),
        smoke("mixed-chunks", "flashinfer", DRAFT, *chunks, least=2.9),
        speed(hybrid, "fa3", BUILT_IN_DFLASH, loads=(1, 4)),
    ]


def fitting(parts: Sequence[Part], seconds: float) -> list[Part]:
    """Return the parts that a call of so many seconds starts, by their estimates."""
    found = []
    for part in parts:
        if part.seconds() <= seconds:
            seconds -= part.seconds()
            found.append(part)
    return found


def _backend(sizes: Sizes, name: str) -> str:
    return servers.CPU_BACKEND if sizes.is_rehearsal else name


def _speed(
    sizes: Sizes, pair: Pair, backend: str, variant: str, loads: Sequence[int] = (1, 4, 16, 48)
) -> Part:
    is_large = pair.name == QWEN3_8_27B.name
    steps = [FIRST]
    for requests in loads:
        seconds = LOAD_S[variant][requests] * (LARGE if is_large else 1)
        run = partial(measure.measure_load, requests=requests)
        steps.append(Step(f"load-{requests}", seconds, run))
    start = (LARGE_START_S if is_large else START_S) + ADAPTIVE_START_S * (variant == ADAPTIVE_DFLASH)
    spec = servers.shape_server(pair, variant, _backend(sizes, backend))
    return Part(f"speed/{backend}/{pair.name}/{variant}", tuple(steps), spec, start)


def _profile(sizes: Sizes, pair: Pair, backend: str) -> Part:
    steps = [Step(f"profile-{n}", PROFILE_S, partial(measure.profile, requests=n)) for n in (1, 16)]
    spec = servers.shape_server(pair, DFLASH, _backend(sizes, backend))
    return Part(f"profile/{backend}/{pair.name}/{DFLASH}", (FIRST, *steps), spec, START_S)


def _answers_of(target: Path) -> Part:
    step = Step("answers", ANSWERS_S, checks.record_answers)
    return Part(f"target/{target.name}", (FIRST, step), servers.default_server(target), DEFAULT_START_S)


def _smoke(
    sizes: Sizes,
    name: str,
    backend: str | None,
    draft: Path,
    *flags: str,
    least: float = 0.0,
    says: tuple[str, ...] = (),
    scheme: str = "",
    is_sampled: bool = False,
) -> Part:
    """Plan a server of a bundled pair whose answers are compared with the target's.

    backend: None for a server without flags. least: the accept length of the texts on a CPU less a tenth, 0
    where cycles may draft nothing. scheme: the draft is a copy with quantized layers.
    """
    target = HYBRID_TARGET if draft == HYBRID_DRAFT else TARGET
    if backend is None:
        spec, start = servers.default_server(target, draft), DEFAULT_START_S
    else:
        folder = SCRATCH / f"{draft.name}-{scheme}" if scheme else draft.relative_to(ROOT)
        spec = servers.bundled_server(target, str(folder), _backend(sizes, backend), *flags)
        start = SMOKE_START_S
    known = _answers_of(target).figures()[-1]
    run = partial(checks.check_answers, target=known, least=least, is_sampled=is_sampled)
    prepare = partial(_quantize, draft, folder, scheme) if scheme else None
    return Part(f"smoke/{name}", (FIRST, Step("answers", ANSWERS_S, run)), spec, start, says, known, prepare)


def _quantize(draft: Path, folder: Path, scheme: str) -> None:
    sys.path.append(str(ROOT / "test" / "srt"))
    from support.packed_drafts import write_packed

    write_packed(folder, draft, scheme)


def _tests() -> list[Part]:
    files = sorted((ROOT / "test" / "srt").rglob("test_*.py"), key=lambda file: file.name)
    marked = [f for f in files if "pytest.mark.gpu" in f.read_text() or "against_twin" in f.read_text()]
    runs = {f.stem: Step("run", TESTS_S, partial(checks.run_tests, file=f.relative_to(ROOT))) for f in marked}
    return [Part(f"tests/{name}", (step,)) for name, step in runs.items()]
