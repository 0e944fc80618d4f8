"""Decides whether our DFLASH can run on the installed SGLang.

The process that resolves the arguments decides once, if DFLASH is requested, by signatures. On a supported
release required targets are looked up, as another plugin may have replaced one. On any other SGLang all are,
and what `reaches.py` names, and our worker is imported. `tools/sglang_diff` compares bodies as well.
"""

import functools
import importlib
import logging
from typing import Any

from sglang_dflash import __version__
from sglang_dflash.srt import patching
from sglang_dflash.srt.arg_groups.fallback import fall_back
from sglang_dflash.srt.arg_groups.implementation import Implementation
from sglang_dflash.srt.configs.unsupported import Unsupported
from sglang_dflash.srt.patching import HELP, LOAD, WORKER, Mismatch, installed_version
from sglang_dflash.srt.plugins.patches import patches_at
from sglang_dflash.srt.reaches import missing_name

logger = logging.getLogger(__name__)

SUPPORTED = ("0.5.22", "0.5.23")  # oldest first


@functools.cache
def why_off() -> str | None:
    """Return why our DFLASH cannot run on this SGLang, or None.

    Warns once if the release is untested but every patch fits.
    """
    version = installed_version()
    is_supported = version in SUPPORTED
    try:
        table = patching.relevant(patches_at(LOAD) + patches_at(WORKER))
        off = patching.missing_features([each for each in table if not (is_supported and each.feature)])
        if is_supported:
            return None
        if reason := missing_name(None):
            return reason
        importlib.import_module("sglang_dflash.srt.speculative.dflash_worker")
    except Mismatch as mismatch:
        return str(mismatch)
    except Exception as error:  # a file of ours that cannot be imported; logged as the reason
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
    """Decide for the built-in if our DFLASH does not fit this SGLang, and log why.

    Returns whether the built-in serves. Raises ValueError if something was requested that it lacks.
    """
    reason = why_off()
    if reason is None:
        return False
    if not Implementation.from_server_args(server_args).is_builtin:
        what = f"SGLang {installed_version()}, which sglang-dflash {__version__} does not fit"
        fall_back(server_args, [Unsupported(f"{what} ({reason}; {HELP.rstrip('.')})", True)])
    return True
