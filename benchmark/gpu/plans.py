"""What is run: every server with its flags and environment, and the parts that use them."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from serving import DRAFT, ROOT, SPECULATORS_DRAFT, TARGET, dflash_arguments

from gpu import work
from gpu.shapes import PAIRS, QWEN3_8B, Pair

SCRATCH = Path("build/gpu")  # below the repository's root, where the servers run; ignored by git
CONCURRENCIES = (1, 4, 16, 48)
PROFILED_CONCURRENCIES = (1, 16)
ACCEPT_LENGTH = 6.5

# What a DFLASH server is forced to accept. "fixed" puts one token id everywhere; the other mode,
# "real-draft-token", would keep what the draft said, and pay for it.
SIMULATION = {
    "SGLANG_SIMULATE_ACC_LEN": str(ACCEPT_LENGTH),
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "fixed",
}
# SGLang loads only the plugins this names, and no plugin is called "none".
OURS, BUILT_IN = {"SGLANG_PLUGINS": "dflash"}, {"SGLANG_PLUGINS": "none"}

NO_SPECULATION, DFLASH, BUILT_IN_DFLASH = "no-speculation", "ours", "built-in"
VARIANTS = (NO_SPECULATION, BUILT_IN_DFLASH, DFLASH)


@dataclass(frozen=True)
class Plan:
    """One server: what follows `python -m sglang.launch_server`, and what it adds to the environment.

    variant: one of VARIANTS; held against the server's log when it runs.
    """

    variant: str
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def command(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, "python", "-m", "sglang.launch_server", shlex.join(self.arguments)])


@dataclass(frozen=True)
class Part:
    """What is done in one go and recorded as one result.

    run: called with limit=TimeLimit; returns the result, JSON-ready. Its list "problems", if any, says what
        is wrong.
    seconds: how long it may well take, servers included; it is not begun with less than that left.
    """

    name: str
    servers: tuple[Plan, ...]
    run: Callable[[Any], dict]
    seconds: int

    @property
    def runs_our_code(self) -> bool:
        return not self.servers or any(plan.variant == DFLASH for plan in self.servers)


def all_parts(backend: str) -> list[Part]:
    """In order of what one would like to know first."""
    parts = [
        Part(f"tests/{file.stem}", (), partial(work.run_tests, file.relative_to(ROOT)), 120)
        for file in sorted((ROOT / "test" / "srt").glob("test_*.py"))
        if "pytest.mark.gpu" in file.read_text()
    ]
    for graphs in ("graphs", "eager"):
        plans = bundled_servers(backend, graphs == "graphs")
        parts.append(Part(f"lossless/{graphs}", plans, partial(work.check_lossless, plans), 200))
    for pair in PAIRS:
        for variant in VARIANTS:
            plan = shape_server(pair, variant, backend)
            accept_length = None if variant == NO_SPECULATION else ACCEPT_LENGTH
            run = partial(work.measure_speed, plan, CONCURRENCIES, accept_length)
            parts.append(Part(f"speed/{pair.name}/{variant}", (plan,), run, 240))
        if pair is QWEN3_8B:
            for variant in (DFLASH, BUILT_IN_DFLASH):
                plan = shape_server(pair, variant, backend)
                run = partial(work.profile, plan, PROFILED_CONCURRENCIES, SCRATCH / "traces")
                parts.append(Part(f"profile/{pair.name}/{variant}", (plan,), run, 200))
    return parts


def shape_server(pair: Pair, variant: str, backend: str) -> Plan:
    """A server of dummy weights in a real model's shape."""
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
    switch = OURS if variant == DFLASH else BUILT_IN
    return Plan(variant, tuple(arguments), switch | SIMULATION)


def bundled_servers(backend: str, graphs: bool) -> tuple[Plan, ...]:
    """The bundled target alone, then with each bundled draft: bf16, as shipped."""
    arguments = ["--model-path", _from_root(TARGET), "--dtype", "bfloat16", "--attention-backend", backend]
    arguments += ["--max-total-tokens", "65536", "--max-running-requests", "16"]
    arguments += ["--cuda-graph-max-bs-decode", "16"] if graphs else ["--disable-decode-cuda-graph"]
    arguments += ["--disable-prefill-cuda-graph"]
    drafts = [_dflash(_from_root(draft), backend) for draft in (DRAFT, SPECULATORS_DRAFT)]
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
