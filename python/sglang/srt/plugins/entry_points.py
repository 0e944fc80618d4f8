"""The functions that SGLang calls: entry points, argument steps, and a CPU's attention.

Both entry points are named `dflash`, so SGLANG_PLUGINS switches both. SGLang imports this file inside
`import sglang`, so each function imports what it needs when it is called.
"""

import logging
from typing import Any

from sglang_dflash.srt import environ, patching
from sglang_dflash.srt.environ import SOURCE, DFlashOptions
from sglang_dflash.srt.hardware_backend.cpu import runtime
from sglang_dflash.srt.patching import CPU_ATTENTION, FALLBACK, FRONT_END, LOAD
from sglang_dflash.srt.plugins.refusals import STEPS, fail_activation, refusing

# Further steps of SGLang's argument pipeline that are wrapped on a CPU.
CPU_STEPS = ("handle_cpu_backends", "handle_model_specific_adjustments")


def prepare_platform() -> None:
    """Activate the CPU runtime if needed, inside `import sglang` and before any kernel.

    SGLang calls it as group `sglang.srt.platforms`. The result None leaves the choice of platform to SGLang.
    """
    if runtime.needs_stand_in():
        runtime.activate()


def install() -> None:
    """Install the plugin: runs in the main process and again in every child.

    SGLang calls it as group `sglang.srt.plugins`. If it fails, a server that asks for DFLASH ends with the
    reason. Other servers start without the plugin, after one warning.
    """
    try:
        patch_at_load()
        register_at_load()
    except Exception as error:
        fail_activation(error)


def patch_at_load() -> None:
    """Patch what every process needs, also in modules that imported a replaced name before."""
    from sglang_dflash.srt.plugins.patches import patches_at

    patching.rebind_importers(patching.install(patches_at(LOAD)))
    if DFlashOptions.FALLBACK.get():
        patching.install(patches_at(FALLBACK))


def register_at_load() -> None:
    """Register what every process needs: algorithm, parser, argument steps, CPU attention."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.configs.model_config_parser_registry import register_model_config_parser
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
    from sglang_dflash.srt.hardware_backend.cpu.arguments import set_defaults
    from sglang_dflash.srt.plugins import algorithm

    algorithm.register()
    wrappers = dict(zip(STEPS, (detect_speculators_model, resolve_speculative_decoding), strict=True))
    if environ.serves_on_stand_in():
        wrappers |= zip(CPU_STEPS, (set_defaults, adjust_to_cpu), strict=True)
        register_attention_backend("torch_native")(cpu_attention)
    for step, wrapper in wrappers.items():
        register_resolution_hook(step)(wrapper)
    registry_logger = logging.getLogger(register_model_config_parser.__module__)
    registry_logger.disabled = True  # it would warn in every process that its own parser is replaced
    try:
        register_model_config_parser("hf")(DraftConfigParser)
    finally:
        registry_logger.disabled = False


def detect_speculators_model(server_args: Any, previous: Any) -> None:
    """Wrap the first step: find a speculators checkpoint, and turn PEAGLE into DFLASH."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    from sglang_dflash.srt.arg_groups import checkpoint_detection
    from sglang_dflash.srt.plugins import compatibility

    given = resolving_view(server_args).speculative_algorithm
    with refusing():
        checkpoint_detection.detect_speculators_model(server_args)
        is_ours_alone = resolving_view(server_args).speculative_algorithm != given
        if is_ours_alone and (reason := compatibility.why_off()):
            raise ValueError(
                "SGLang's built-in DFLASH reads no speculators checkpoint and no P-EAGLE draft, and "
                f"sglang-dflash does not fit this SGLang ({reason}). {patching.HELP}"
            )
    previous(server_args)


def resolve_speculative_decoding(server_args: Any, previous: Any) -> None:
    """Wrap the step that resolves speculative decoding, and apply our rules to DFLASH."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    DFlashOptions.FALLBACK.clear()
    if (resolving_view(server_args).speculative_algorithm or "").upper() == "DFLASH":
        with refusing():
            return _resolve_dflash(server_args, previous)
    if DFlashOptions.RECORD.get() is not None:
        with refusing():
            raise ValueError("--speculative-record needs --speculative-algorithm DFLASH, which records.")
    previous(server_args)


def _resolve_dflash(server_args: Any, previous: Any) -> None:
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    from sglang_dflash.srt.arg_groups import resolve
    from sglang_dflash.srt.plugins import algorithm, compatibility
    from sglang_dflash.srt.plugins.patches import patches_at

    configs = None if compatibility.leave_to_sglang(server_args) else resolve.prepare(server_args)
    if configs is None:
        return previous(server_args)
    args = resolving_view(server_args)
    # SGLang's checks of these flags are for the algorithms that it knows. Our checks follow in `resolve`.
    # Its adaptive widths are EAGLE's, from which it would size its buffers. Ours never exceed a block.
    is_adaptive = args.speculative_adaptive
    unseen = {
        "speculative_draft_window_size": None,
        "speculative_draft_sink_size": None,
        "speculative_use_block_verification": False,
    }
    given = {name: getattr(args, name) for name in unseen}
    declare_resolution(
        server_args,
        source=SOURCE,
        speculative_algorithm=algorithm.NAME,
        speculative_adaptive=False,
        **unseen,
    )
    previous(server_args)
    served = algorithm.ServedName("DFLASH")
    declare_resolution(server_args, SOURCE, speculative_algorithm=served, **given)
    resolve.resolve_arguments(server_args, configs, is_adaptive)
    patching.install(patches_at(FRONT_END))
    algorithm.register_in_front_end()


def adjust_to_cpu(server_args: Any, previous: Any) -> None:
    """Wrap `handle_model_specific_adjustments` on a CPU: refuse what does not run there."""
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view

    from sglang_dflash.srt.hardware_backend.cpu.arguments import check_runs_on_cpu, pass_backend_lists

    args = resolving_view(server_args)
    if args.device == "cpu":
        with refusing():
            check_runs_on_cpu(args, model_config_of(server_args))
    pass_backend_lists(server_args, previous)


def cpu_attention(runner: Any) -> Any:
    """Create the attention backend that a CPU calls torch_native.

    SGLang's backend lacks TARGET_VERIFY, non-causal blocks, sinks, soft caps, MLA and padded batches. It also
    reads windowed layers at the wrong slots. If a server needs one of these, our backend is built under the
    same name, because SGLang's CPU engine depends on the name.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    from sglang_dflash.srt.hardware_backend.cpu import attention, dense_forward, reordering
    from sglang_dflash.srt.plugins.patches import patches_at
    from sglang_dflash.srt.reaches import ON_CPU, require

    if not attention.is_needed(runner):
        return attention.TorchNativeAttnBackend(runner)
    require(ON_CPU)
    patching.install(patches_at(CPU_ATTENTION))
    reordering.reorder(runner.model)
    dense_forward.install(runner.model)
    # Without a method for this name SGLang takes Triton's, which reads latents as keys.
    AttentionBackendRegistry.register("torch_native", lambda layer, forward_batch: AttnForwardMethod.MLA)
    return attention.TorchNativeSpecAttnBackend(runner)
