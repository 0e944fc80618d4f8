"""Decides whether our DFLASH can run on the installed SGLang.

The decision is made once, in the process that resolves the arguments, and only if DFLASH is requested. It
compares signatures. On a supported release only targets that are loaded are looked at, as another plugin may
have replaced one of them. That takes milliseconds. On any other SGLang our worker is imported too, and each
target of a scheduler is looked up. `tools/sglang_diff` compares the bodies of targets as well.
"""

import functools
import importlib
import logging
from typing import Any

from sglang_dflash import __version__
from sglang_dflash.srt.arg_groups.fallback import fall_back_on_unsupported_sglang
from sglang_dflash.srt.observability.server_info import Implementation
from sglang_dflash.srt.plugins import patch, patches
from sglang_dflash.srt.plugins.patch import HELP, Mismatch, find_mismatch, installed_version, is_main_process

logger = logging.getLogger(__name__)

SUPPORTED = ("0.5.22", "0.5.23")  # oldest first


@functools.cache
def why_off() -> str | None:
    """Return why our DFLASH cannot run on this SGLang. None: it can.

    If it can on a release that is not a supported one, a warning says so once.
    """
    version = installed_version()
    if version in SUPPORTED:
        return find_mismatch(patches.AT_WORKER, is_loaded_only=True)
    try:
        off = patch.missing_features(patch.relevant(patches.AT_LOAD + patches.AT_WORKER))
    except Mismatch as mismatch:
        return str(mismatch)
    try:
        importlib.import_module("sglang_dflash.srt.speculative.dflash_worker")
    except Exception as error:  # returned, and logged as the reason
        return f"{type(error).__name__}: {error}"
    logger.warning(
        "sglang-dflash was tested with SGLang %s, this is %s. %s %s",
        ", ".join(SUPPORTED),
        version,
        f"Off on this SGLang: {'; '.join(sorted(off))}." if off else "All that we replace is there.",
        HELP,
    )
    return None


def leave_to_sglang(server_args: Any) -> bool:
    """Decide for the built-in if our DFLASH does not fit this SGLang.

    The log says why. Returns whether the built-in serves.

    Raises:
        ValueError: Something was requested that the built-in lacks.
    """
    reason = why_off()
    if reason is None:
        return False
    if not Implementation.from_server_args(server_args).is_builtin:
        what = f"SGLang {installed_version()}, which sglang-dflash {__version__} does not fit"
        fall_back_on_unsupported_sglang(server_args, f"{what} ({reason}; {HELP.rstrip('.')})")
    return True


def switch_off(error: Exception) -> None:
    """Log why the plugin is not installed, and log it again if DFLASH is requested."""
    if not is_main_process():  # the main process has logged it
        logger.debug("sglang-dflash is off", exc_info=error)
        return
    reason = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
    logger.error(
        "sglang-dflash %s is off, because it does not fit SGLang %s. SGLang serves without it. %s. %s",
        __version__,
        installed_version(),
        reason.rstrip("."),
        HELP,
    )
    _log_if_dflash_is_requested()


def _log_if_dflash_is_requested() -> None:
    try:
        from sglang.srt.arg_groups.model_override_base import resolving_view
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        @register_resolution_hook("handle_speculative_decoding")
        def tell(server_args: Any, previous: Any) -> None:
            if (resolving_view(server_args).speculative_algorithm or "").upper() == "DFLASH":
                logger.error(
                    "DFLASH: SGLang's built-in implementation serves this server: sglang-dflash is off."
                )
            previous(server_args)
    except (ImportError, ValueError) as error:
        logger.debug("SGLang %s has no such step: %s", installed_version(), error)
