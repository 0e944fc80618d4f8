"""Servers: the settings that are compared, and the commands that start them."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu.shapes import Pair
from serving import ROOT, WHOLE_BLOCKS, dflash_arguments

SCRATCH = Path("build/gpu")  # below the repository's root, where the servers run; ignored by git
# A whole number, so that every block is kept alike: ratios do not depend on drawn lengths.
ACCEPT_LENGTH = 7
# Simulated acceptance of a DFLASH server. "fixed" puts one token id everywhere; the other mode,
# "real-draft-token", would accept the draft's own tokens at their cost.
SIMULATION = {
    "SGLANG_SIMULATE_ACC_LEN": str(ACCEPT_LENGTH),
    "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "fixed",
}
# Requests accept differently, a quarter of them at each of the mean accept lengths.
MIXED_LENGTHS = {"SGLANG_DFLASH_SIMULATE_ACC_LENS": "8.2,4.2,1.8,1.05"}
# SGLang loads only the plugins this names, and no plugin is called "none".
PLUGIN, NO_PLUGIN = {"SGLANG_PLUGINS": "dflash"}, {"SGLANG_PLUGINS": "none"}
WAIT_UNDER_DRAFT = {"SGLANG_DFLASH_WAIT_UNDER_DRAFT": "1"}
CPU_BACKEND, ADAPTIVE = "torch_native", "--speculative-adaptive"

# Names of settings, as they stand in the names of figures.
NONE, BUILT_IN, OURS, WAIT = "no-speculation", "built-in", "ours", "ours-wait-under-draft"
USELESS = "useless-draft"  # dummy weights, nothing is accepted: the least cost of speculation
MIXED_WHOLE, MIXED_ADAPTIVE = "mixed-whole-blocks", "mixed-adaptive"
# The environment of a setting, and its flags beside those of a draft.
SETTINGS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    NONE: (PLUGIN, ()),
    BUILT_IN: (NO_PLUGIN | SIMULATION, ()),
    OURS: (PLUGIN | SIMULATION, ()),
    WAIT: (PLUGIN | SIMULATION | WAIT_UNDER_DRAFT, ()),
    USELESS: (PLUGIN, (ADAPTIVE,)),
    MIXED_WHOLE: (PLUGIN | MIXED_LENGTHS, ()),
    MIXED_ADAPTIVE: (PLUGIN | MIXED_LENGTHS, (ADAPTIVE,)),
}
# Tokens of a bundled server's request, so short that answers run into the limit.
CONTEXT_LENGTH = 256


@dataclass(frozen=True)
class ServerSpec:
    """A server's `sglang.launch_server` arguments and its additions to the environment."""

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


def shape_server(pair: Pair, setting: str, backend: str | None, loads: Sequence[int]) -> ServerSpec:
    """Describe a server with dummy weights in a real model's shape.

    Args:
        pair: The shape, whose files are in SCRATCH.
        setting: A key of SETTINGS.
        backend: Of attention. None: every other flag has its default, too.
        loads: Numbers of requests, which get decode graphs.
    """
    folder, (environment, flags) = SCRATCH / pair.name, SETTINGS[setting]
    arguments = ["--model-path", str(folder / "target"), "--load-format", "dummy", "--skip-tokenizer-init"]
    if backend is not None:
        # The same limits for all settings: every request of every load fits, so none is retracted. Prefill
        # graphs would only lengthen the start. Greedy requests need no FlashInfer sampler, which would be
        # compiled.
        arguments += ["--dtype", "bfloat16", "--attention-backend", backend, *pair.limits(max(loads))]
        arguments += ["--disable-prefill-cuda-graph", "--skip-server-warmup", "--sampling-backend", "pytorch"]
        arguments += ["--cuda-graph-bs-decode", *map(str, sorted(loads))]
    if setting != NONE:
        arguments += draft_arguments(folder / "draft", backend, environment, flags)
    return ServerSpec(tuple(arguments), on_backend(environment, backend))


def bundled_server(
    target: Path, draft: Path, backend: str | None, environment: dict[str, str], *flags: str
) -> ServerSpec:
    """Describe a small server of a bundled pair that starts soon. backend None: as a user starts it."""
    arguments = ["--model-path", from_root(target)]
    if backend is not None:
        arguments += ["--attention-backend", backend, "--mem-fraction-static", "0.6"]
        arguments += ["--max-total-tokens", "65536", "--max-running-requests", "16"]
        arguments += ["--context-length", str(CONTEXT_LENGTH), "--cuda-graph-max-bs-decode", "16"]
        arguments += ["--disable-prefill-cuda-graph"]
    arguments += draft_arguments(from_root(draft), backend, environment, flags)
    return ServerSpec(tuple(arguments), on_backend(environment, backend))


def draft_arguments(
    draft: str | Path, backend: str | None, environment: dict[str, str], flags: Sequence[str]
) -> list[str]:
    if backend is None:
        return [*dflash_arguments(draft), *flags]
    if backend == CPU_BACKEND:  # the plugin refuses a choice of backend there, and adapts widths by default
        return [*dflash_arguments(draft), *(() if ADAPTIVE in flags else (WHOLE_BLOCKS,)), *flags]
    # A draft on FA3 needs no lengths on the host.
    of_draft = "fa3" if WAIT_UNDER_DRAFT.items() <= environment.items() else backend
    return [*dflash_arguments(draft), "--speculative-draft-attention-backend", of_draft, *flags]


def on_backend(environment: dict[str, str], backend: str | None) -> dict[str, str]:
    """Return the environment of a setting. On a CPU ours stands in for what only a GPU has."""
    if backend != CPU_BACKEND:
        return environment
    left = {name: value for name, value in environment.items() if name not in WAIT_UNDER_DRAFT}
    return left | (PLUGIN if "SGLANG_PLUGINS" in left else {})


def from_root(path: Path) -> str:
    return str(path.relative_to(ROOT))
