"""The modules that hold patches of SGLang, by the time when the patches are made.

A patch stands over its function (`srt/patching.py`). What of DFLASH makes each necessary is in
docs/dev/contracts.md. `tools/sglang_diff` compares all with any SGLang (docs/dev/updating-sglang.md).
"""

from sglang_dflash.srt import environ
from sglang_dflash.srt.patching import (
    CPU_ATTENTION,
    DETOKENIZER,
    FALLBACK,
    FRONT_END,
    LOAD,
    WORKER,
    Patch,
    declared_in,
)

# Below `sglang_dflash.srt`.
MODULES: dict[str, tuple[str, ...]] = {
    LOAD: ("arg_groups.options",),
    FRONT_END: ("speculative.request_checks", "plugins.tool_parsers", "plugins.streams"),
    DETOKENIZER: ("plugins.streams",),
    WORKER: (
        "plugins.server_info",
        "observability.traffic",
        "models.quantized_linear",
        "layers.attention.ragged_rows",
        "speculative.targets.kinds",
        "speculative.dflash_info",
        "speculative.kv_pool",
        "speculative.stops",
        "speculative.weight_updates",
        "speculative.acceptance.processors",
        "speculative.request_checks",
    ),
    FALLBACK: ("plugins.server_info",),
    CPU_ATTENTION: (),
}
# Where the CPU's stand-in serves, these too.
CPU_MODULES: dict[str, tuple[str, ...]] = {
    LOAD: ("hardware_backend.cpu.operators", "hardware_backend.cpu.arguments"),
    FRONT_END: ("hardware_backend.cpu.arguments",),
    WORKER: ("hardware_backend.cpu.operators",),
    CPU_ATTENTION: ("hardware_backend.cpu.speedups",),
}


def patches_at(time: str) -> list[Patch]:
    """List the patches of a time on this machine. Their modules are imported."""
    on_cpu = CPU_MODULES.get(time, ()) if environ.serves_on_stand_in() else ()
    return _patches_of((*MODULES[time], *on_cpu), time)


def all_patches() -> list[Patch]:
    """List every patch once, the CPU's too."""
    found = {
        patch.target: patch
        for time, modules in MODULES.items()
        for patch in _patches_of((*modules, *CPU_MODULES.get(time, ())), time)
    }
    return list(found.values())


def _patches_of(modules: tuple[str, ...], time: str) -> list[Patch]:
    return [patch for module in modules for patch in declared_in(f"sglang_dflash.srt.{module}", time)]
