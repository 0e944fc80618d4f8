"""Decides whether our DFLASH can run on the installed SGLang.

The decision is made once, in the process that resolves the arguments, and only if DFLASH is requested. It
reads SGLang's files (`static_check.py`). On an unchanged supported release it compares the hashes of some
files, and targets that are loaded, which takes milliseconds. On any other SGLang it also imports our worker,
and checks each target of a scheduler. So a scheduler finds no mismatch that this process could have found.
"""

import functools
import importlib
import logging
from typing import Any

from sglang_dflash.srt.arg_groups.hand_over import leave_to_unsupported_sglang
from sglang_dflash.srt.hardware_backend.cpu import runtime
from sglang_dflash.srt.plugins import ledger, static_check
from sglang_dflash.srt.plugins.change import CPU
from sglang_dflash.srt.plugins.install import Mismatch, find_mismatch, is_main_process
from sglang_dflash.srt.plugins.source_tree import SourceTree, installed_version
from sglang_dflash.srt.plugins.static_check import BROKEN, CHANGED, Row
from sglang_dflash.srt.speculative.implementation import Implementation

logger = logging.getLogger(__name__)

HELP = "`python -m sglang_dflash.ledger` lists all differences."
# What a scheduler that runs our DFLASH changes.
_IN_SCHEDULERS = ledger.AT_WORKER + ledger.AT_DISAGGREGATION


@functools.cache
def why_off() -> str | None:
    """Return why our DFLASH cannot run on this SGLang. None: it can.

    Logs one warning if it can, and something that we change or replace differs from every supported release.
    """
    tree = SourceTree.installed()
    if static_check.is_as_recorded(tree):
        return find_mismatch(_IN_SCHEDULERS, is_loaded_only=True)
    baseline = static_check.baseline_for(tree.version)
    rows = static_check.compare(tree, baseline)
    missing = [row for row in rows if row.is_fatal or _is_needed_here(row)]
    if missing:
        first = missing[0]
        return f"{first.detail or first.state}: {first.label}" + _and_more(len(missing) - 1)
    if reason := find_mismatch(_IN_SCHEDULERS) or _why_worker_fails():
        return reason
    changed = [row for row in rows if row.change is not None and row.state in (CHANGED, *BROKEN)]
    names = ", ".join(f"{row.change.name} ({row.where or 'gone'})" for row in changed if row.change)
    off = sorted(
        {row.change.feature for row in changed if row.change and row.change.feature and row.is_broken}
    )
    known = tree.version in static_check.supported_versions()
    logger.warning(
        "sglang-dflash was tested with SGLang %s, this is %s%s. %s%s %s",
        ", ".join(static_check.supported_versions()),
        tree.version,
        ", with changed files" if known else "",
        f"It differs in what we replace: {names}." if changed else "Nothing that we replace differs.",
        f" Off on this SGLang: {'; '.join(off)}." if off else "",
        HELP,
    )
    return None


def leave_to_sglang(server_args: Any) -> bool:
    """Tell whether ours does not fit this SGLang, whose own DFLASH then serves; log why, once.

    Raises ValueError if something was requested that only ours has.
    """
    reason = why_off()
    if reason is None:
        return False
    if not Implementation.of(server_args).is_builtin:
        what = f"SGLang {installed_version()}, which sglang-dflash {_our_version()} does not fit"
        leave_to_unsupported_sglang(server_args, f"{what} ({reason}; {HELP.rstrip('.')})")
    return True


def switch_off(error: Exception) -> None:
    """Say why nothing of ours is installed; if DFLASH is requested, say so again then."""
    if not is_main_process():  # the main process has said it
        logger.debug("sglang-dflash is off", exc_info=error)
        return
    reason = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
    logger.error(
        "sglang-dflash %s is off, because it does not fit SGLang %s. SGLang serves without it. %s. %s",
        _our_version(),
        installed_version(),
        reason.rstrip("."),
        HELP,
    )
    _tell_if_dflash_is_requested()


def _tell_if_dflash_is_requested() -> None:
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


def _why_worker_fails() -> str | None:
    """Import what a scheduler runs, and return why that fails. None: it does not."""
    try:
        importlib.import_module("sglang_dflash.srt.speculative.dflash_worker")
    except Exception as error:  # returned, and logged as the reason
        return f"{type(error).__name__}: {error}"
    return None


def _is_needed_here(row: Row) -> bool:
    """Tell whether a missing target is needed because this server runs on a CPU."""
    is_cpu_row = row.change is not None and row.change.feature == CPU
    return is_cpu_row and row.state in BROKEN and runtime.is_active()


def _and_more(number: int) -> str:
    return f", and {number} more" if number else ""


def _our_version() -> str:
    from sglang_dflash import __version__

    return __version__
