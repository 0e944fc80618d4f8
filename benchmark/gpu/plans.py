"""Servers with their flags and environment, and the parts that use them."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from acceptance import EXPECTED
from gpu import work
from gpu.shapes import PAIRS, Pair
from serving import (
    DFLASH2_DRAFT,
    DRAFT,
    HYBRID_DRAFT,
    HYBRID_TARGET,
    PEAGLE_DRAFT,
    ROOT,
    SPECULATORS_DRAFT,
    TARGET,
    dflash_arguments,
)

SCRATCH = Path("build/gpu")  # below the repository's root, where the servers run; ignored by git
CONCURRENCIES = (1, 4, 16, 48)
PROFILED_CONCURRENCIES = (1, 16)
ACCEPT_LENGTH = 6.5

# Simulated acceptance of a DFLASH server. "fixed" puts one token id everywhere; the other mode,
# "real-draft-token", would accept the draft's own tokens at their cost.
SIMULATION = {
    "SGLANG_SIMULATE_ACC_LEN": str(ACCEPT_LENGTH),
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "fixed",
}
# SGLang loads only the plugins this names, and no plugin is called "none".
OURS, BUILT_IN = {"SGLANG_PLUGINS": "dflash"}, {"SGLANG_PLUGINS": "none"}

NO_SPECULATION, DFLASH, BUILT_IN_DFLASH = "no-speculation", "ours", "built-in"
VARIANTS = (NO_SPECULATION, BUILT_IN_DFLASH, DFLASH)
# Its draft has dummy weights and nothing is accepted: it shows the least cost of speculation.
ADAPTIVE_DFLASH = "adaptive"

# The configurations that tests rehearse on CPU tensors (docs/rehearsal.md), here with the real kernels:
# attention backend, draft, further arguments. FA3 last, as not every machine has its kernels.
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
        "flashinfer",
        DRAFT,
        "--enable-mixed-chunk",
        "--chunked-prefill-size",
        "64",
        "--max-total-tokens",
        "2048",
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
class Plan:
    """One server: its `sglang.launch_server` arguments and its additions to the environment.

    variant: one of VARIANTS or ADAPTIVE_DFLASH; compared with the server's log when it runs.
    """

    variant: str
    arguments: tuple[str, ...]
    environment: dict[str, str]

    @property
    def is_ours(self) -> bool:
        return self.variant in (DFLASH, ADAPTIVE_DFLASH)

    def command(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, "python", "-m", "sglang.launch_server", shlex.join(self.arguments)])


@dataclass(frozen=True)
class Part:
    """A unit of work with one recorded result.

    run: called with limit=TimeLimit; returns the result, JSON-ready. Its list "problems", if any, names the
        failures.
    seconds: how long it may well take, servers included; it is not begun with less than that left.
    """

    name: str
    servers: tuple[Plan, ...]
    run: Callable[[Any], dict]
    seconds: int

    @property
    def runs_our_code(self) -> bool:
        return not self.servers or any(plan.is_ours for plan in self.servers)


def all_parts(backend: str) -> list[Part]:
    """List the parts by importance: correctness, speed, profiles, then the rest."""
    first, *others = PAIRS
    return [
        *rehearsed_parts(backend),
        *speed_parts(first, backend),
        *profile_parts(first, backend),
        *test_parts(),
        *(part for pair in others for part in speed_parts(pair, backend)),
        *lossless_parts(backend),
    ]


def rehearsed_parts(backend: str) -> list[Part]:
    """List the rehearsed parts. backend: torch_native replaces every other, for trials."""
    expected = {
        Path(profile["server_args"][-1]).name: profile["sets"]["heldout"]["accept_length"]
        for profile in json.loads(EXPECTED.read_text()).values()
        if "heldout" in profile["sets"]
    }
    parts = []
    for name, (own, draft, *more) in REHEARSED.items():
        chosen = backend if backend == "torch_native" else own
        target = HYBRID_TARGET if draft == HYBRID_DRAFT else TARGET
        reference = Plan(
            NO_SPECULATION,
            tuple(_bundled_target("flashinfer" if chosen == own else backend, target)),
            dict(OURS),
        )
        arguments = *_bundled_target(chosen, target), *_dflash(_from_root(draft), chosen), *more
        plans = reference, Plan(DFLASH, arguments, dict(OURS))
        accept_length = None if name in OTHER_ACCEPTANCE else expected[draft.name]
        run = partial(work.check_rehearsed, *plans, SCRATCH / f"{target.name}.json", accept_length)
        parts.append(Part(f"rehearsed/{name}", plans, run, 150))
    return parts


def speed_parts(pair: Pair, backend: str) -> list[Part]:
    parts = []
    for variant in (*VARIANTS, ADAPTIVE_DFLASH):
        plan = shape_server(pair, variant, backend)
        accept_length = ACCEPT_LENGTH if variant in (DFLASH, BUILT_IN_DFLASH) else None
        run = partial(work.measure_speed, plan, CONCURRENCIES, accept_length)
        parts.append(Part(f"speed/{pair.name}/{variant}", (plan,), run, 240))
    return parts


def profile_parts(pair: Pair, backend: str) -> list[Part]:
    parts = []
    for variant in (DFLASH, BUILT_IN_DFLASH):
        plan = shape_server(pair, variant, backend)
        run = partial(work.profile, plan, PROFILED_CONCURRENCIES, SCRATCH / "traces")
        parts.append(Part(f"profile/{pair.name}/{variant}", (plan,), run, 200))
    return parts


def test_parts() -> list[Part]:
    return [
        Part(f"tests/{file.stem}", (), partial(work.run_tests, file.relative_to(ROOT)), 120)
        for file in sorted((ROOT / "test" / "srt").glob("test_*.py"))
        if "pytest.mark.gpu" in file.read_text() or "against_twin" in file.read_text()
    ]


def lossless_parts(backend: str) -> list[Part]:
    """Check losslessness without graphs; `rehearsed_parts` does it with graphs."""
    plans = bundled_servers(backend)
    return [Part("lossless/eager", plans, partial(work.check_lossless, plans), 200)]


def shape_server(pair: Pair, variant: str, backend: str) -> Plan:
    """Plan a server with dummy weights in a real model's shape."""
    folder = SCRATCH / pair.name
    arguments = ["--model-path", str(folder / "target"), "--load-format", "dummy", "--skip-tokenizer-init"]
    arguments += ["--dtype", "bfloat16", "--attention-backend", backend]
    # The same limits for all: every request of every part fits, so none is retracted. Prefill graphs would
    # only lengthen the start.
    arguments += ["--max-running-requests", "48", "--max-total-tokens", "131072"]
    arguments += ["--cuda-graph-max-bs-decode", "48", "--disable-prefill-cuda-graph"]
    if variant == NO_SPECULATION:
        return Plan(variant, tuple(arguments), dict(OURS))
    arguments += _dflash(folder / "draft", backend)
    if variant == ADAPTIVE_DFLASH:
        return Plan(variant, (*arguments, "--speculative-adaptive"), dict(OURS))
    switch = OURS if variant == DFLASH else BUILT_IN
    return Plan(variant, tuple(arguments), switch | SIMULATION)


def _bundled_target(backend: str, target: Path = TARGET, graphs: bool = True) -> list[str]:
    arguments = ["--model-path", _from_root(target), "--dtype", "bfloat16", "--attention-backend", backend]
    arguments += [
        "--max-total-tokens",
        "65536",
        "--max-running-requests",
        "16",
        "--disable-prefill-cuda-graph",
    ]
    # No longer than the bundled drafts' windows: every backend counts them alike then.
    arguments += ["--context-length", "1024"]
    # A small model in a JSON grammar otherwise goes on with white space for ever.
    arguments += ["--constrained-json-disable-any-whitespace"]
    return arguments + (["--cuda-graph-max-bs-decode", "16"] if graphs else ["--disable-decode-cuda-graph"])


def bundled_servers(backend: str) -> tuple[Plan, ...]:
    """Plan the bundled target alone, then with each bundled draft: bf16, no graphs."""
    arguments = _bundled_target(backend, graphs=False)
    drafts = [_dflash(_from_root(draft), backend) for draft in (DRAFT, SPECULATORS_DRAFT, PEAGLE_DRAFT)]
    return (
        Plan(NO_SPECULATION, tuple(arguments), dict(OURS)),
        *(Plan(DFLASH, tuple(arguments + draft), dict(OURS)) for draft in drafts),
    )


def _dflash(draft: str | Path, backend: str) -> list[str]:
    # On a CPU there is no choice, and the plugin refuses the flag's other values.
    choice = [] if backend == "torch_native" else ["--speculative-draft-attention-backend", backend]
    return [*dflash_arguments(draft), *choice]


def _from_root(path: Path) -> str:
    return str(path.relative_to(ROOT))
