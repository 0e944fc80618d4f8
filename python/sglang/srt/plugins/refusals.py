"""Starts that end: with the message alone, and where the plugin's own activation failed.

SGLang's loader logs a plugin that fails, and a server that asks for DFLASH would run without it. This file
imports no module whose import may have failed.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from sglang_dflash import __version__
from sglang_dflash.srt.patching import HELP, Mismatch, installed_version, is_main_process

logger = logging.getLogger(__name__)

# Values of --speculative-algorithm that mean our DFLASH.
ALGORITHMS = ("DFLASH", "PEAGLE")
# Steps of SGLang's argument pipeline that name the algorithm: the first of all, and speculation's own.
STEPS = ("handle_deprecated_dp_attention", "handle_speculative_decoding")
# Why the activation failed in this process.
_failures: list[str] = []


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Let a refused command end with the message alone. Python callers get the exception."""
    try:
        yield
    except (ValueError, OSError) as error:
        logger.debug("A start is refused.", exc_info=True)
        refusal, otherwise = error, sys.excepthook

        def report(kind: Any, error: Any, trace: Any) -> None:
            if error is refusal:
                print(f"Error: {error}", file=sys.stderr)
            else:
                otherwise(kind, error, trace)

        sys.excepthook = report
        raise


def fail_activation(error: Exception) -> None:
    """Log why the plugin is off, and refuse DFLASH with this reason from then on.

    Raises SystemExit if the command line asks for DFLASH, and SGLang has no step to refuse it in.
    """
    reason = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {error}"
    text = (
        f"sglang-dflash {__version__} is off, because it does not fit SGLang {installed_version()}. "
        f"{reason.rstrip('.')}. {HELP}"
    )
    _failures.append(text)
    logger.debug("The activation failed.", exc_info=error)
    if is_main_process():
        logger.warning("%s Servers without DFLASH start as ever.", text)
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        for step in STEPS:
            register_resolution_hook(step)(refuse_dflash)
    except (ImportError, ValueError):
        given = {word.rpartition("=")[2].upper() for word in sys.argv}
        if given.intersection(ALGORITHMS):
            raise SystemExit(f"Error: {text}") from error


def refuse_dflash(server_args: Any, previous: Any) -> None:
    """Wrap a step of the arguments after a failed activation: refuse DFLASH."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    if (resolving_view(server_args).speculative_algorithm or "").upper() in ALGORITHMS:
        with refusing():
            check_activation()
    previous(server_args)


def check_activation() -> None:
    """Raise ValueError with the reason if the activation failed in this process."""
    if _failures:
        raise ValueError(_failures[0])
