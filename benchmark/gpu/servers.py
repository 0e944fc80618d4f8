"""Servers with their flags and environment."""

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from gpu.shapes import Pair
from serving import DRAFT, PEAGLE_DRAFT, ROOT, SPECULATORS_DRAFT, TARGET, dflash_arguments

SCRATCH = Path("build/gpu")  # below the repository's root, where the servers run; ignored by git
PHASES = SCRATCH / "phases.json"  # written by our servers, a file for all: one is measured at a time
ACCEPT_LENGTH = 6.5

# Simulated acceptance of a DFLASH server. "fixed" puts one token id everywhere; the other mode,
# "real-draft-token", would accept the draft's own tokens at their cost.
SIMULATION = {
    "SGLANG_SIMULATE_ACC_LEN": str(ACCEPT_LENGTH),
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "fixed",
}
# Host time per phase of a cycle (benchmark/phase_clock.py).
PHASE_CLOCK = {
    "PYTHONPATH": "benchmark",
    "SGLANG_DFLASH_OBSERVERS": "phase_clock:PhaseClock",
    "PHASE_TIMES": str(PHASES),
}
# SGLang loads only the plugins this names, and no plugin is called "none".
OURS, BUILT_IN = {"SGLANG_PLUGINS": "dflash"}, {"SGLANG_PLUGINS": "none"}

NO_SPECULATION, DFLASH, BUILT_IN_DFLASH = "no-speculation", "ours", "built-in"
VARIANTS = (NO_SPECULATION, BUILT_IN_DFLASH, DFLASH)
# Its draft has dummy weights and nothing is accepted: it shows the least cost of speculation.
ADAPTIVE_DFLASH = "adaptive"
CPU_BACKEND = "torch_native"

# Decode graphs of these sizes only: each one costs start-up time.
GRAPH_SIZES = ("1", "4", "16", "48", "96")


@dataclass(frozen=True)
class ServerSpec:
    """One server: its `sglang.launch_server` arguments and its additions to the environment.

    variant: one of VARIANTS or ADAPTIVE_DFLASH; compared with the server's log when it runs.
    """

    variant: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        drafts = "--speculative-algorithm" in self.arguments
        return drafts and self.environment.get("SGLANG_PLUGINS") == "dflash"

    def command(self) -> str:
        shown = {**self.environment}
        if "PYTHONPATH" in shown:
            shown["PYTHONPATH"] += ":$PYTHONPATH"
        variables = [f"{name}={value}" for name, value in shown.items()]
        return " ".join([*variables, "python", "-m", "sglang.launch_server", shlex.join(self.arguments)])

    def full_environment(self) -> dict[str, str]:
        """Return the additions, PYTHONPATH joined with this process's own."""
        if "PYTHONPATH" not in self.environment:
            return dict(self.environment)
        folders = [self.environment["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]
        return {**self.environment, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def shape_server(pair: Pair, variant: str, backend: str, *more: str) -> ServerSpec:
    """Describe a server with dummy weights in a real model's shape. more: further arguments."""
    folder = SCRATCH / pair.name
    arguments = ["--model-path", str(folder / "target"), "--load-format", "dummy", "--skip-tokenizer-init"]
    arguments += ["--dtype", "bfloat16", "--attention-backend", backend]
    # The same limits for all: every request of every load fits, so none is retracted. Prefill graphs would
    # only lengthen the start, and every load warms up by itself.
    arguments += [*pair.limits, "--disable-prefill-cuda-graph", "--skip-server-warmup"]
    if "--max-running-requests" in pair.limits:
        most = int(pair.limits[pair.limits.index("--max-running-requests") + 1])
        arguments += ["--cuda-graph-bs-decode", *(size for size in GRAPH_SIZES if int(size) <= most)]
    if variant != NO_SPECULATION:
        arguments += draft_arguments(folder / "draft", backend)
    if variant == ADAPTIVE_DFLASH:
        arguments += ["--speculative-adaptive"]
    arguments += more
    environment = {
        NO_SPECULATION: OURS,
        BUILT_IN_DFLASH: BUILT_IN | SIMULATION,
        DFLASH: OURS | SIMULATION | PHASE_CLOCK,
        ADAPTIVE_DFLASH: OURS | PHASE_CLOCK,
    }[variant]
    if backend == CPU_BACKEND and variant == BUILT_IN_DFLASH:
        environment = OURS | SIMULATION  # the built-in refuses a CPU: ours stands in for it
    return ServerSpec(variant, tuple(arguments), dict(environment))


def bundled_target(backend: str, target: Path = TARGET, graphs: bool = True) -> list[str]:
    """Return the arguments of a server of a bundled target."""
    arguments = ["--model-path", from_root(target), "--dtype", "bfloat16", "--attention-backend", backend]
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


def bundled_servers(backend: str) -> tuple[ServerSpec, ...]:
    """Describe the bundled target alone, then with each bundled draft: bf16, no graphs."""
    arguments = bundled_target(backend, graphs=False)
    drafts = [
        draft_arguments(from_root(draft), backend) for draft in (DRAFT, SPECULATORS_DRAFT, PEAGLE_DRAFT)
    ]
    return (
        ServerSpec(NO_SPECULATION, tuple(arguments), dict(OURS)),
        *(ServerSpec(DFLASH, tuple(arguments + draft), dict(OURS)) for draft in drafts),
    )


def draft_arguments(draft: str | Path, backend: str) -> list[str]:
    # On a CPU there is no choice, and the plugin refuses the flag's other values.
    choice = [] if backend == CPU_BACKEND else ["--speculative-draft-attention-backend", backend]
    return [*dflash_arguments(draft), *choice]


def from_root(path: Path) -> str:
    return str(path.relative_to(ROOT))
