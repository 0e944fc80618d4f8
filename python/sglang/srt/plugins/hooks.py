"""Wrappers of SGLang's argument steps and flags, and the CPU's attention.

Each function imports what it needs when it is called.
"""

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Let a command that is refused end with the message alone.

    To a caller in Python, as with `sglang.Engine`, a refusal is the exception that it is. Its traceback is
    logged at level debug.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        logger.debug("A start is refused.", exc_info=True)
        sys.excepthook = functools.partial(_print_refusal, error, sys.excepthook)
        raise


def _print_refusal(refusal: Exception, otherwise: Any, kind: Any, error: Any, trace: Any) -> None:
    """Print an uncaught exception, without its traceback if it is this refusal."""
    if error is refusal:
        print(f"Error: {error}", file=sys.stderr)
    else:
        otherwise(kind, error, trace)


def detect_speculators_model(server_args: Any, previous: Any) -> None:
    """Wrap the first step: find a speculators checkpoint; PEAGLE becomes DFLASH."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    from sglang_dflash.srt.arg_groups import checkpoint_detection
    from sglang_dflash.srt.plugins import compatibility

    given = resolving_view(server_args).speculative_algorithm

    def check_plugin(server_args):
        is_ours_alone = resolving_view(server_args).speculative_algorithm != given
        if is_ours_alone and (reason := compatibility.why_off()):
            raise ValueError(
                "SGLang's built-in DFLASH reads no speculators checkpoint and no P-EAGLE draft, and "
                f"sglang-dflash does not fit this SGLang ({reason}). {compatibility.HELP}"
            )

    with refusing():
        checkpoint_detection.detect_speculators_model(server_args, check_plugin)
    previous(server_args)


def resolve_speculative_decoding(server_args: Any, previous: Any) -> None:
    """Wrap the step that resolves speculative decoding: DFLASH's arguments follow our rules."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    from sglang_dflash.srt.configs.quantization import PACKED
    from sglang_dflash.srt.environ import DFlashOptions

    DFlashOptions.FALLBACK.clear()
    args = resolving_view(server_args)
    is_dflash = (args.speculative_algorithm or "").upper() == "DFLASH"
    with refusing():
        if not is_dflash and args.speculative_draft_model_quantization == PACKED:
            raise ValueError(f"--speculative-draft-model-quantization {PACKED} is for DFLASH alone.")
        if is_dflash:
            return _resolve_dflash(server_args, previous)
    previous(server_args)


def _resolve_dflash(server_args: Any, previous: Any) -> None:
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    from sglang_dflash.srt.arg_groups import dflash_args
    from sglang_dflash.srt.plugins import algorithm, compatibility, doors, install, ledger

    if compatibility.leave_to_sglang(server_args) or not dflash_args.prepare(server_args):
        return previous(server_args)
    args = resolving_view(server_args)
    # SGLang's checks of these flags are for the algorithms that it knows; ours come after.
    unseen = {
        "speculative_draft_window_size": None,
        "speculative_draft_sink_size": None,
        "speculative_use_block_verification": False,
    }
    given = {name: getattr(args, name) for name in unseen}
    declare_resolution(server_args, dflash_args.SOURCE, speculative_algorithm=algorithm.NAME, **unseen)
    previous(server_args)
    served = algorithm.ServedName("DFLASH")
    declare_resolution(server_args, dflash_args.SOURCE, speculative_algorithm=served, **given)
    dflash_args.resolve_dflash_args(server_args)
    install.install(ledger.AT_FRONT_END)
    doors.open_in_front_end()


def adjust_to_cpu(server_args: Any, previous: Any) -> None:
    """Wrap `handle_model_specific_adjustments` on a CPU: refuse what does not run there."""
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view

    from sglang_dflash.srt.arg_groups import dflash_args
    from sglang_dflash.srt.hardware_backend.cpu.limits import check_runs_on_cpu

    args = resolving_view(server_args)
    if args.device == "cpu":
        with refusing():
            check_runs_on_cpu(args, model_config_of(server_args))
    dflash_args.pass_backend_lists_on_cpu(server_args, previous)


def add_cli_args():
    """Build the change of `ServerArgs.add_cli_args`."""
    from sglang_dflash.srt.arg_groups.dflash_flags import add_flags

    def add(original, parser):
        original(parser)
        add_flags(parser)

    return add


def cpu_attention(runner: Any) -> Any:
    """Create the attention backend that a CPU calls torch_native.

    SGLang's lacks TARGET_VERIFY, non-causal blocks, sinks, soft caps, MLA and padded batches, and reads
    windowed layers at the wrong slots. Ours is built if needed. The engine keys on the name, so it stays.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    from sglang_dflash.srt.layers.attention import torch_native_spec
    from sglang_dflash.srt.plugins import install, ledger

    if not torch_native_spec.is_needed(runner):
        return torch_native_spec.TorchNativeAttnBackend(runner)
    install.install(ledger.AT_CPU_ATTENTION)
    # The method that SGLang takes for want of one, Triton's, reads latents as keys.
    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
    return torch_native_spec.TorchNativeSpecAttnBackend(runner)


def cpu_pin_memory():
    return lambda tensor, device=None: tensor


def cpu_snapshot_support():
    return lambda: True
