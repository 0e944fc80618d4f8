"""The decision who serves: our DFLASH, SGLang's built-in DFLASH as the fallback, or none.

The launcher decides once, before it declares anything. If our DFLASH does not serve a server and the built-in
does, the built-in runs the server unchanged. So installing the plugin never ends a server that worked. There
is no fallback if a feature was requested that only our DFLASH has, or with `--speculative-dflash-strict`.
"""

import copy
import logging
from importlib.metadata import version
from typing import Any

from sglang_dflash.srt.arg_groups.implementation import Implementation
from sglang_dflash.srt.arg_groups.support import (
    chose_attention,
    dp_attention_findings,
    draft_findings,
    flag_findings,
    target_attention_findings,
)
from sglang_dflash.srt.configs.checkpoint import read_config
from sglang_dflash.srt.configs.speculators_format import is_speculators_config
from sglang_dflash.srt.configs.unsupported import Unsupported
from sglang_dflash.srt.environ import DFlashOptions

logger = logging.getLogger(__name__)

# Features that the built-in lacks.
BUILTIN_LACKS = (
    "adaptive width",
    "copies",
    "sampled drafts",
    "penalties at every position of a block",
    "exact logit processors and caps per request",
    "speculators and P-EAGLE drafts",
)


def find_unsupported(server_args: Any) -> list[Unsupported]:
    """List everything in these arguments that our DFLASH does not serve."""
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolved_view, resolving_view

    args = resolving_view(server_args)
    prefill_backend, decode_backend = attention_backends_of(resolved_view(server_args))
    verify_backend = decode_backend if args.speculative_attention_mode == "decode" else prefill_backend
    return [
        *flag_findings(args),
        *dp_attention_findings(args),
        *target_attention_findings(args.device, verify_backend, chose_attention(server_args)),
        *draft_findings(args),
    ]


def fall_back_if_unsupported(server_args: Any, found: list[Unsupported]) -> bool:
    """Decide for the built-in if anything was found. Return whether it was.

    Raises:
        ValueError: The built-in does not serve what was found either, or a request forbids the fallback.
    """
    if not found:
        return False
    if reasons := _reasons_to_refuse(server_args, found):
        listed = "\n  - ".join(finding.what for finding in found)
        raise ValueError(
            f"DFLASH does not support:\n  - {listed}\n"
            f"SGLang's built-in implementation does not serve instead: {'; '.join(reasons)}."
        )
    _decide_for_builtin(server_args, found)
    return True


def fall_back_on_unsupported_sglang(server_args: Any, what: str) -> None:
    """Decide for the built-in of an SGLang that the plugin does not fit.

    Raises:
        ValueError: Something was requested that the built-in lacks.
    """
    if reasons := _forbidding_options():
        raise ValueError(f"{what}. SGLang's built-in DFLASH does not serve instead: {'; '.join(reasons)}.")
    _decide_for_builtin(server_args, [Unsupported(what, True)], logging.ERROR)


def _decide_for_builtin(server_args: Any, found: list[Unsupported], level: int = logging.WARNING) -> None:
    lost = (*BUILTIN_LACKS, *(finding.drawback for finding in found if finding.drawback))
    because = tuple(finding.what for finding in found)
    Implementation("sglang", version("sglang"), because, lost).decide(server_args)
    DFlashOptions.FALLBACK.set(1)
    DFlashOptions.ADAPTIVE.clear()
    logger.log(
        level,
        "DFLASH: SGLang's built-in implementation serves this server, because ours does not support %s. "
        "Lost: %s. --speculative-dflash-strict (%s=1) refuses instead.",
        "; ".join(because),
        ", ".join(lost),
        DFlashOptions.STRICT.variable,
    )


def _reasons_to_refuse(server_args: Any, found: list[Unsupported]) -> list[str]:
    from sglang.srt.arg_groups.model_override_base import resolving_view

    reasons = _forbidding_options()
    if DFlashOptions.STRICT.get():
        return reasons
    args = resolving_view(server_args)
    config = read_config(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    if config is not None and is_speculators_config(config):
        reasons.append("it lacks a reader of speculators checkpoints, which was requested")
    if any(not finding.builtin_supports for finding in found):
        reasons.append("it does not support all of this either")
    if refusal := builtin_refusal(server_args):
        reasons.append(f"its own refusal is: {refusal}")
    return reasons


def _forbidding_options() -> list[str]:
    """Name the requested options that forbid the fallback. A strict server names one."""
    if DFlashOptions.STRICT.get():
        return ["--speculative-dflash-strict forbids it"]
    options = (
        ("--speculative-copy-ahead", DFlashOptions.COPY_AHEAD),
        ("--speculative-draft-sample-method", DFlashOptions.DRAFT_SAMPLE_METHOD),
        ("--speculative-draft-head-dtype", DFlashOptions.DRAFT_HEAD_DTYPE),
        ("--speculative-plans-within-bounds", DFlashOptions.PLANS_WITHIN_BOUNDS),
        (DFlashOptions.SIMULATE_ACC_LENS.variable, DFlashOptions.SIMULATE_ACC_LENS),
    )
    return [
        f"it lacks {flag}, which was requested"
        for flag, option in options
        if option.get() not in (option.default, "greedy")  # which the built-in drafts, too
    ]


def builtin_refusal(server_args: Any) -> str | None:
    """Return the built-in's own refusal of these arguments, or None.

    The built-in's validation runs on a copy of the record, and its parser on the draft's config.
    """
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    trial = copy.copy(server_args)
    trial._resolved_overrides = list(getattr(server_args, "_resolved_overrides", None) or ())
    was_disabled, speculative_hook.logger.disabled = speculative_hook.logger.disabled, True
    try:
        speculative_hook._handle_dflash(trial)
        draft = server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision
        config = read_config(*draft)
        if config is not None and not is_speculators_config(config):
            parse_dflash_draft_config(draft_hf_config=config)
    except (ValueError, TypeError) as error:
        return " ".join(str(error).split()).rstrip(".")
    finally:
        speculative_hook.logger.disabled = was_disabled
    return None
