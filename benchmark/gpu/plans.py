"""Plans of a GPU run: servers with their steps, and checks for the time in which they start."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from acceptance import EXPECTED
from gpu import checks, estimates, measure
from gpu.estimates import check_s, load_s
from gpu.measure import GPU_SIZES, Running, Sizes
from gpu.servers import (
    ADAPTIVE_DFLASH,
    BUILT_IN_DFLASH,
    CPU_BACKEND,
    DFLASH,
    NO_SPECULATION,
    OURS,
    SCRATCH,
    ServerSpec,
    bundled_servers,
    bundled_target,
    draft_arguments,
    from_root,
    shape_server,
)
from gpu.shapes import LLAMA_3_1_8B, QWEN3_8_27B, QWEN3_8B, Pair
from serving import (
    DFLASH2_DRAFT,
    DRAFT,
    HYBRID_DRAFT,
    HYBRID_TARGET,
    PEAGLE_DRAFT,
    ROOT,
    SPECULATORS_DRAFT,
    TARGET,
)

from sglang_dflash.srt.environ import DFlashOptions

# Ends a server whose plan does not hold for the device's lengths.
CHECK_PLANS = "SGLANG_DFLASH_CHECK_PLANS"
# An FP8 copy of the head for drafting.
FP8_OPTIONS = (DFlashOptions.DRAFT_HEAD_DTYPE,)
CONTEXT = 1024  # tokens of a prompt, if a load names no other number
LONG_CONTEXTS = ((1, 8192), (4, 8192), (1, 24_576), (4, 24_576))

# The configurations that tests rehearse on CPU tensors (docs/rehearsal.md), here with the real kernels:
# attention backend, draft, further arguments.
REHEARSED = {
    "flashinfer-dflash": ("flashinfer", DRAFT),
    "flashinfer-peagle": ("flashinfer", PEAGLE_DRAFT),
    "flashinfer-speculators": ("flashinfer", SPECULATORS_DRAFT),
    "triton-dflash": ("triton", DRAFT),
    "triton-peagle": ("triton", PEAGLE_DRAFT),
    "probabilistic": ("flashinfer", DRAFT, "--speculative-draft-sample-method", "probabilistic"),
    "widths": ("flashinfer", DRAFT, "--speculative-adaptive"),
    "pages": ("flashinfer", PEAGLE_DRAFT, "--page-size", "16"),
    "mixed-chunks": (
        *("flashinfer", DRAFT, "--enable-mixed-chunk"),
        *("--chunked-prefill-size", "64", "--max-total-tokens", "2048"),
    ),
    "window": ("flashinfer", DRAFT, "--speculative-draft-window-size", "64"),
    "dflash2": ("flashinfer", DFLASH2_DRAFT),
    "hybrid": ("flashinfer", HYBRID_DRAFT),
    "fa3-dflash": ("fa3", DRAFT),
    "fa3-peagle": ("fa3", PEAGLE_DRAFT),
}
# Of these the acceptance is another: by a window, by cycles that draft nothing.
OTHER_ACCEPTANCE = ("widths", "window")


@dataclass(frozen=True)
class Part:
    """A unit of work with one recorded result.

    seconds: its estimated time on a GPU, without the start of a step's server.
    """

    name: str
    servers: tuple[ServerSpec, ...]
    seconds: float

    @property
    def runs_our_code(self) -> bool:
        return not self.servers or any(spec.is_ours for spec in self.servers)


@dataclass(frozen=True)
class Step(Part):
    """A measurement on a running server.

    run: returns the result, JSON-ready. Its list "problems", if any, names the failures.
    """

    run: Callable[[Running], dict]


@dataclass(frozen=True)
class Check(Part):
    """Work with servers of its own, or with none. run: as a step's, called with limit=TimeLimit."""

    run: Callable[[Any], dict]


@dataclass(frozen=True)
class Visit:
    """One server and its steps. start_seconds: its estimated start and end."""

    name: str
    spec: ServerSpec
    steps: tuple[Step, ...]
    start_seconds: float

    @property
    def seconds(self) -> float:
        return self.start_seconds + sum(step.seconds for step in self.steps)


@dataclass(frozen=True)
class Plan:
    """What one call does, most valuable first.

    seconds: its time limit. A machine lends ten minutes a call, and the call's end takes a few seconds.
    """

    name: str
    visits: tuple[Visit, ...]
    checks: tuple[Check, ...]
    seconds: int | None

    @property
    def measured_seconds(self) -> float:
        return sum(visit.seconds for visit in self.visits)


class Builder:
    """Makes the plans for a GPU, or for a rehearsal on a CPU with small models of the same kind."""

    def __init__(self, sizes: Sizes = GPU_SIZES):
        self._sizes = sizes

    def plans(self) -> tuple[Plan, ...]:
        return self.plan_a(), self.plan_b(), self.plan_c(), self.rest()

    def plan_a(self) -> Plan:
        """FA3, SGLang's default on Hopper, against the built-in and no speculation."""
        visit = partial(self._visit, QWEN3_8B, "fa3")
        visits = (
            visit(DFLASH, (1, 4, 16, 48, 96), LONG_CONTEXTS, profiles=(1, 16)),
            visit(BUILT_IN_DFLASH, (1, 4, 16, 48, 96), LONG_CONTEXTS, profiles=(1,)),
            visit(ADAPTIVE_DFLASH, (1, 16, 48)),
            visit(NO_SPECULATION, (1, 16, 48), ((1, 24_576),)),
        )
        names = ("tests/test_host_transfers", "tests/test_selector_walk", "tests/test_kernels")
        names += ("rehearsed/fa3-dflash", "rehearsed/widths", "rehearsed/dflash2")
        names += ("rehearsed/pages", "rehearsed/mixed-chunks")
        return Plan("A", visits, self._checks(names), 565)

    def plan_b(self) -> Plan:
        """FlashInfer, with its plans checked, and adaptive width with a useless and a good draft."""
        visit = partial(self._visit, QWEN3_8B, "flashinfer")
        known = {option.variable for name, option in vars(DFlashOptions).items() if name.isupper()}
        checked = (
            (visit(DFLASH, (1, 16, 48), name="ours-checked", environment={CHECK_PLANS: "1"}, repeats=1),)
            if CHECK_PLANS in known
            else ()
        )
        visits = (
            visit(DFLASH, (1, 4, 16, 48, 96), LONG_CONTEXTS[:1], profiles=(1,)),
            visit(BUILT_IN_DFLASH, (1, 16, 48)),
            visit(ADAPTIVE_DFLASH, (1, 16, 48)),
            *checked,
            self._good_draft(),
        )
        names = ("rehearsed/flashinfer-dflash", "rehearsed/flashinfer-peagle", "rehearsed/hybrid")
        names += ("rehearsed/probabilistic", "rehearsed/triton-dflash")
        names += ("tests/test_block_conv", "tests/test_copy_ahead")
        return Plan("B", visits, self._checks(names), 545)

    def plan_c(self) -> Plan:
        """FP8 copies for drafting, against plan A's `ours`, then the hybrid target with a DFlash2 draft."""
        large = partial(self._visit, QWEN3_8_27B, "fa3", start_s=estimates.LARGE_START_S)
        visits = (
            self._fp8("ours-fp8", FP8_OPTIONS, profiles=(1,)),
            large(DFLASH, (1, 4)),
            large(NO_SPECULATION, (1, 4), repeats=1),
        )
        return Plan("C", visits, self._checks(("rehearsed/fa3-peagle", "lossless/eager")), 360)

    def rest(self) -> Plan:
        """Everything else, without a time limit of its own."""
        llama = partial(self._visit, LLAMA_3_1_8B, "fa3")
        variants = (DFLASH, BUILT_IN_DFLASH, NO_SPECULATION)
        compiled = self._visit(
            *(QWEN3_8B, "fa3", DFLASH, (1,)),
            name="ours-compiled",
            more=("--enable-torch-compile",),
            start_s=estimates.COMPILED_START_S,
        )
        visits = (
            compiled,
            *(llama(variant, (1, 16, 48)) for variant in variants),
            self._visit(QWEN3_8_27B, "fa3", BUILT_IN_DFLASH, (1, 4), start_s=estimates.LARGE_START_S),
            *(self._visit(QWEN3_8B, "triton", variant, (1, 16, 48)) for variant in variants),
            self._visit(QWEN3_8B, "flashinfer", NO_SPECULATION, (1, 16, 48)),
        )
        planned = {
            check.name for plan in (self.plan_a(), self.plan_b(), self.plan_c()) for check in plan.checks
        }
        others = tuple(check for check in self.all_checks() if check.name not in planned)
        return Plan("rest", visits, others, None)

    def all_checks(self) -> list[Check]:
        return [*self._rehearsed(), *self._tests(), self._lossless()]

    def _checks(self, names: Sequence[str]) -> tuple[Check, ...]:
        by_name = {check.name: check for check in self.all_checks()}
        return tuple(by_name[name] for name in names)

    def _backend(self, backend: str) -> str:
        return CPU_BACKEND if self._sizes.is_rehearsal else backend

    def _visit(
        self,
        pair: Pair,
        backend: str,
        variant: str,
        loads: Sequence[int],
        contexts: Sequence[tuple[int, int]] = (),
        profiles: Sequence[int] = (),
        *,
        name: str | None = None,
        more: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        repeats: int | None = None,
        start_s: float | None = None,
    ) -> Visit:
        """Plan a server of a shape.

        loads: requests at CONTEXT tokens. contexts: further loads, (requests, tokens). profiles: requests.
        """
        spec = shape_server(
            pair, variant, self._backend(backend), *(() if self._sizes.is_rehearsal else more)
        )
        spec = ServerSpec(spec.variant, spec.arguments, spec.environment | (environment or {}))
        prefix = f"speed/{backend}/{pair.name}/{name or variant}"
        steps = [Step(f"{prefix}/start", (spec,), 0.0, measure.start_up)]
        scale = estimates.LARGE if pair is QWEN3_8_27B else 1.0
        for requests, context in [*((load, CONTEXT) for load in loads), *contexts]:
            times = repeats or (3 if requests <= 4 else 2)
            seconds = load_s(variant, requests, context, self._sizes.new_tokens, times, scale)
            run = partial(measure.measure_load, requests=requests, context=context, repeats=times)
            at = "" if context == CONTEXT else f"-{context // 1024}k"
            steps.append(Step(f"{prefix}/load-{requests}{at}", (spec,), seconds, run))
        for requests in profiles:
            run = partial(measure.profile, requests=requests, context=CONTEXT)
            steps.append(Step(f"{prefix}/profile-{requests}", (spec,), estimates.PROFILE_S, run))
        usual = estimates.ADAPTIVE_START_S if variant == ADAPTIVE_DFLASH else estimates.START_S
        return Visit(prefix, spec, tuple(steps), (start_s or usual) + estimates.STOP_S)

    def _fp8(self, name: str, options: Sequence[Any], profiles: Sequence[int] = ()) -> Visit:
        """Plan plan A's first server with these options at "fp8"."""
        environment = {option.variable: "fp8" for option in options}
        visit = partial(self._visit, name=name, environment=environment)
        return visit(QWEN3_8B, "fa3", DFLASH, (1, 48), profiles=profiles)

    def _good_draft(self) -> Visit:
        """Plan adaptive width with the bundled pair: simulated acceptance excludes it."""
        backend = self._backend("flashinfer")
        arguments = *bundled_target(backend), *draft_arguments(from_root(DRAFT), backend)
        spec = ServerSpec(ADAPTIVE_DFLASH, (*arguments, "--speculative-adaptive"), dict(OURS))
        prefix = "speed/flashinfer/bundled/adaptive"
        steps = [Step(f"{prefix}/start", (spec,), 0.0, measure.start_up)]
        for concurrency in (1, 16):
            run = partial(measure.measure_texts, concurrency=concurrency)
            seconds = estimates.TEXTS_S if concurrency == 1 else estimates.TEXTS_S / 5
            steps.append(Step(f"{prefix}/texts-{concurrency}", (spec,), seconds, run))
        return Visit(prefix, spec, tuple(steps), estimates.BUNDLED_START_S + estimates.STOP_S)

    def _rehearsed(self) -> list[Check]:
        expected = {
            Path(profile["server_args"][-1]).name: profile["sets"]["heldout"]["accept_length"]
            for profile in json.loads(EXPECTED.read_text()).values()
            if "heldout" in profile["sets"]
        }
        found = []
        for name, (own, draft, *more) in REHEARSED.items():
            backend = self._backend(own)
            target = HYBRID_TARGET if draft == HYBRID_DRAFT else TARGET
            reference = ServerSpec(
                NO_SPECULATION, tuple(bundled_target(self._backend("flashinfer"), target)), dict(OURS)
            )
            arguments = *bundled_target(backend, target), *draft_arguments(from_root(draft), backend), *more
            specs = reference, ServerSpec(DFLASH, arguments, OURS)
            accept_length = None if name in OTHER_ACCEPTANCE else expected[draft.name]
            if self._sizes.is_rehearsal:
                accept_length = None  # of a few texts it is another
            known = SCRATCH / f"{target.name}.json"
            run = partial(checks.check_rehearsed, *specs, known, accept_length, self._sizes)
            found.append(Check(f"rehearsed/{name}", specs, check_s(f"rehearsed/{name}"), run))
        return found

    def _tests(self) -> list[Check]:
        return [
            Check(
                *(f"tests/{file.stem}", (), check_s(f"tests/{file.stem}")),
                partial(checks.run_tests, file.relative_to(ROOT)),
            )
            for file in sorted((ROOT / "test" / "srt").glob("test_*.py"))
            if "pytest.mark.gpu" in file.read_text() or "against_twin" in file.read_text()
        ]

    def _lossless(self) -> Check:
        """Check losslessness without graphs; the rehearsed configurations do it with graphs."""
        specs = bundled_servers(self._backend("flashinfer"))
        run = partial(checks.check_lossless, specs, self._sizes)
        return Check("lossless/eager", specs, check_s("lossless/eager"), run)


def estimate_table(plans: Sequence[Plan]) -> str:
    """Tabulate the estimated seconds of the plans that have a time limit."""
    lines, total = [], float(estimates.PREPARATION_S)
    lines.append(f"{estimates.PREPARATION_S:6.0f} s  machine, transfers, unpacking, smoke test")
    for plan in plans:
        if plan.seconds is None:
            continue
        total += plan.measured_seconds
        lines.append(f"{plan.measured_seconds:6.0f} s  plan {plan.name}, stops at {plan.seconds} s")
        for visit in plan.visits:
            parts = ", ".join(f"{step.name.rsplit('/', 1)[1]} {step.seconds:.0f}" for step in visit.steps[1:])
            lines.append(f"{visit.seconds:6.0f} s    {visit.name}: start {visit.start_seconds:.0f}, {parts}")
        starts = sum(visit.start_seconds for visit in plan.visits)
        wanted = sum(check.seconds for check in plan.checks)
        lines.append(
            f"            in the background: {wanted:.0f} s of {len(plan.checks)} checks, "
            f"several at a time, in {starts:.0f} s of starts"
        )
    lines.append(f"{total:6.0f} s  in all, {total / 60:.1f} minutes")
    return "\n".join(lines)
