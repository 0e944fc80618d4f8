"""Servers with their flags and environment."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from gpu.shapes import Pair
from serving import ROOT, WHOLE_BLOCKS, dflash_arguments

SCRATCH = Path("build/gpu")  # below the repository's root, where the servers run; ignored by git
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
# FlashInfer is planned with bounds of the lengths; the head is a copy in FP8.
BOUNDS, FP8_HEAD = "ours-bounds", "ours-fp8-head"
# Its draft has dummy weights and nothing is accepted: it shows the least cost of speculation.
USELESS = "useless-draft"
# Requests accept differently, a quarter of them at each of the mean accept lengths.
MIXED_WHOLE, MIXED_ADAPTIVE = "mixed-whole-blocks", "mixed-adaptive"
MIXED_LENGTHS = {"SGLANG_DFLASH_SIMULATE_ACC_LENS": "8.2,4.2,1.8,1.05"}
CPU_BACKEND, ADAPTIVE = "torch_native", "--speculative-adaptive"


@dataclass(frozen=True)
class Variant:
    """A way to serve a shape. flags: of a server with a draft. simulates: how acceptance is simulated."""

    plugins: dict[str, str]
    flags: tuple[str, ...] = ()
    simulates: dict[str, str] = field(default_factory=dict)


VARIANTS = {
    NO_SPECULATION: Variant(OURS),
    BUILT_IN_DFLASH: Variant(BUILT_IN, simulates=SIMULATION),
    DFLASH: Variant(OURS, simulates=SIMULATION),
    BOUNDS: Variant(OURS, ("--speculative-plans-within-bounds",), SIMULATION),
    FP8_HEAD: Variant(OURS, ("--speculative-draft-head-dtype", "fp8"), SIMULATION),
    USELESS: Variant(OURS, (ADAPTIVE,)),
    MIXED_WHOLE: Variant(OURS, simulates=MIXED_LENGTHS),
    MIXED_ADAPTIVE: Variant(OURS, (ADAPTIVE,), MIXED_LENGTHS),
}
# Decode graphs of these sizes only: each one costs start-up time.
GRAPH_SIZES, MIXED_SIZES = (1, 4, 16, 48), (48, 96)
# Tokens of a bundled server's request, so short that answers run into the limit.
CONTEXT_LENGTH = 256


@dataclass(frozen=True)
class ServerSpec:
    """One server: its `sglang.launch_server` arguments and its additions to the environment.

    variant: one of VARIANTS; compared with the server's log when it runs.
    """

    variant: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        drafts = "--speculative-algorithm" in self.arguments
        return drafts and self.environment.get("SGLANG_PLUGINS", "dflash") == "dflash"

    def models(self) -> list[str]:
        """Return the bundled models that the server reads, as paths from the repository's root."""
        return [word for word in self.arguments if word.startswith("models/")]

    def command(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environment.items() if value]
        return " ".join([*variables, "python", "-m", "sglang.launch_server", shlex.join(self.arguments)])


def shape_server(pair: Pair, name: str, backend: str) -> ServerSpec:
    """Describe a server with dummy weights in a real model's shape. name: a key of VARIANTS."""
    folder, variant, is_mixed = SCRATCH / pair.name, VARIANTS[name], name in (MIXED_WHOLE, MIXED_ADAPTIVE)
    arguments = ["--model-path", str(folder / "target"), "--load-format", "dummy", "--skip-tokenizer-init"]
    arguments += ["--dtype", "bfloat16", "--attention-backend", backend]
    # The same limits for all: every request of every load fits, so none is retracted. Prefill graphs would
    # only lengthen the start, and every load warms up by itself. Greedy requests need no FlashInfer sampler,
    # which would be compiled.
    arguments += [*(pair.mixed_limits if is_mixed else pair.limits), "--disable-prefill-cuda-graph"]
    arguments += ["--skip-server-warmup", "--sampling-backend", "pytorch"]
    most = int(arguments[arguments.index("--max-running-requests") + 1])
    sizes = [size for size in (MIXED_SIZES if is_mixed else GRAPH_SIZES) if size <= most] or [most]
    arguments += ["--cuda-graph-bs-decode", *map(str, sizes)]
    if name != NO_SPECULATION:
        arguments += draft_arguments(folder / "draft", backend, ADAPTIVE in variant.flags)
        arguments += [flag for flag in variant.flags if flag != ADAPTIVE]
    environment = variant.plugins | variant.simulates
    if backend == CPU_BACKEND and name == BUILT_IN_DFLASH:
        environment = OURS | variant.simulates  # the built-in refuses a CPU: ours stands in for it
    return ServerSpec(name, tuple(arguments), environment)


def default_server(target: Path, draft: Path | None = None) -> ServerSpec:
    """Describe a server as a user starts it: with no flag but its models."""
    arguments = ["--model-path", from_root(target)]
    arguments += dflash_arguments(from_root(draft)) if draft else []
    return ServerSpec(DFLASH if draft else NO_SPECULATION, tuple(arguments))


def bundled_server(target: Path, draft: str, backend: str, *more: str) -> ServerSpec:
    """Describe a small server of a bundled target that starts soon. more: further arguments."""
    arguments = ["--model-path", from_root(target), "--attention-backend", backend]
    arguments += ["--mem-fraction-static", "0.6", "--max-total-tokens", "65536"]
    arguments += ["--max-running-requests", "16", "--context-length", str(CONTEXT_LENGTH)]
    arguments += ["--cuda-graph-max-bs-decode", "16", "--disable-prefill-cuda-graph"]
    others = [flag for flag in more if flag != ADAPTIVE]
    arguments += [*draft_arguments(draft, backend, ADAPTIVE in more), *others]
    return ServerSpec(DFLASH, tuple(arguments), dict(OURS))


def draft_arguments(draft: str | Path, backend: str, is_adaptive: bool) -> list[str]:
    adaptive = [ADAPTIVE] if is_adaptive else []
    if backend == CPU_BACKEND:  # the plugin refuses a choice of backend there, and adapts widths by default
        return [*dflash_arguments(draft), *(adaptive or [WHOLE_BLOCKS])]
    return [*dflash_arguments(draft), "--speculative-draft-attention-backend", backend, *adaptive]


def from_root(path: Path) -> str:
    return str(path.relative_to(ROOT))
