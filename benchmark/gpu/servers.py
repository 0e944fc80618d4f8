"""Servers: the settings that are compared, and the commands that start them."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from serving import WHOLE_BLOCKS, dflash_arguments
from shapes import Pair

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
DEFAULT = "default"  # in the place of a backend: the server has no flags but the draft's
ADAPTIVE = "--speculative-adaptive"

# Name of a setting in the names of figures -> its environment, and its flags beside those of a draft.
SETTINGS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "no-speculation": (PLUGIN, ()),
    "built-in": (NO_PLUGIN | SIMULATION, ()),
    "ours": (PLUGIN | SIMULATION, ()),
    "ours-wait-under-draft": (PLUGIN | SIMULATION | WAIT_UNDER_DRAFT, ()),
    "useless-draft": (PLUGIN, (ADAPTIVE,)),  # dummy weights: nothing is accepted
    "mixed-whole-blocks": (PLUGIN | MIXED_LENGTHS, ()),
    "mixed-adaptive": (PLUGIN | MIXED_LENGTHS, (ADAPTIVE,)),
}
# The same limits for all settings of a shape. Every request of every load fits, so none is retracted: 96
# requests, a quarter of which reach 4,000 tokens, and the slots that they reserve ahead. Prefill graphs would
# only lengthen the start. Greedy requests need no FlashInfer sampler, which would be compiled.
SHAPE_LIMITS = (
    "--dtype bfloat16 --sampling-backend pytorch --mem-fraction-static 0.85 --max-total-tokens 240000 "
    "--schedule-conservativeness 0.3 --disable-prefill-cuda-graph --skip-server-warmup"
)
# Of bundled pairs, which start soon. The context is so short that answers run into its end.
CONTEXT_LENGTH = 256
BUNDLED_LIMITS = (
    "--mem-fraction-static 0.6 --max-total-tokens 65536 --max-running-requests 16 "
    f"--context-length {CONTEXT_LENGTH} --disable-prefill-cuda-graph --cuda-graph-max-bs-decode 16"
)


@dataclass(frozen=True)
class ServerSpec:
    """A server's `sglang.launch_server` arguments and its additions to the environment."""

    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        drafts = "--speculative-algorithm" in self.arguments
        return drafts and self.environment.get("SGLANG_PLUGINS", "dflash") == "dflash"

    def command(self) -> str:
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return " ".join([*variables, "python", "-m", "sglang.launch_server", shlex.join(self.arguments)])


def server(
    target: str,
    draft: str | None,
    backend: str,
    limits: str,
    environment: dict[str, str],
    flags: Sequence[str] = (),
) -> ServerSpec:
    """Describe a server.

    `target` may have more arguments after its path. DEFAULT as the backend leaves `limits` out. `flags` are
    of a draft.
    """
    arguments = ["--model-path", *target.split()]
    if backend != DEFAULT:
        arguments += ["--attention-backend", backend, *limits.split()]
    if draft is not None:
        arguments += dflash_arguments(draft)
        if backend != DEFAULT:  # a draft on FA3 needs no lengths on the host
            waits = WAIT_UNDER_DRAFT.items() <= environment.items()
            arguments += ["--speculative-draft-attention-backend", "fa3" if waits else backend]
        arguments += flags
    return ServerSpec(tuple(arguments), environment)


def on_cpu(spec: ServerSpec) -> ServerSpec:
    """Return the server of a rehearsal: ours, which chooses attention itself, for what only a GPU has."""
    environment = {name: value for name, value in spec.environment.items() if name not in WAIT_UNDER_DRAFT}
    arguments = list(spec.arguments)
    for flag in ("--attention-backend", "--speculative-draft-attention-backend"):
        if flag in arguments:
            at = arguments.index(flag)
            del arguments[at : at + 2]
    if "--max-total-tokens" in arguments:
        arguments += ["--max-total-tokens", "8192"]  # the last one counts
    if "--speculative-algorithm" in arguments and ADAPTIVE not in arguments:
        arguments.append(WHOLE_BLOCKS)
    return ServerSpec(tuple(arguments), environment | PLUGIN)


def shrunk(pair: Pair) -> Pair:
    """Return a pair of the same kind that a CPU runs: narrow, few layers.

    Vocabulary, block and config fields stay, so that requests and checks are the same.
    """
    small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = replace(pair.target, **small, num_hidden_layers=4, head_dim=32)
    draft = replace(pair.draft, **small, num_hidden_layers=1, head_dim=32)
    return replace(pair, target=target, draft=draft, target_layer_ids=(1, 2))
