"""The decision who serves: ours, SGLang's built-in DFLASH, or neither.

Taken once, in the launcher, before anything of ours is declared. If ours does not serve a server and the
built-in does, the built-in runs it unchanged. Installing the plugin never ends a server that worked.
What was requested of ours by name is refused instead, as is everything with `--speculative-dflash-strict`.
"""

import copy
import logging
from typing import Any

from sglang_dflash.srt.arg_groups.not_served import (
    chose_attention,
    dp_attention_findings,
    draft_findings,
    flag_findings,
    target_attention_findings,
)
from sglang_dflash.srt.configs.checkpoint import read_config
from sglang_dflash.srt.configs.quantization import PACKED
from sglang_dflash.srt.configs.speculators_format import is_speculators_config
from sglang_dflash.srt.configs.unsupported import NotServed
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.speculative.implementation import Implementation

logger = logging.getLogger(__name__)

LOST = (
    "adaptive width",
    "copies",
    "sampled drafts",
    "penalties at every position of a block",
    "exact logit processors and caps per request",
    "speculators and P-EAGLE drafts",
)


def find_not_served(server_args: Any) -> list[NotServed]:
    """List everything in these arguments that ours does not serve."""
    from sglang.srt.arg_groups.model_override_base import (
        attention_backends_of,
        resolved_view,
        resolving_view,
    )

    args = resolving_view(server_args)
    prefill_backend, decode_backend = attention_backends_of(resolved_view(server_args))
    verify_backend = decode_backend if args.speculative_attention_mode == "decode" else prefill_backend
    return [
        *flag_findings(args),
        *dp_attention_findings(args),
        *target_attention_findings(args.device, verify_backend, chose_attention(server_args)),
        *draft_findings(args),
    ]


def hand_over_if_not_served(server_args: Any, found: list[NotServed]) -> bool:
    """Decide for the built-in if ours does not serve what was found, and return True.

    Returns False if nothing was found. Raises ValueError naming everything if the built-in does not serve it
    either, or may not.
    """
    if not found:
        return False
    reasons = _reasons_to_refuse(server_args, found)
    if reasons:
        listed = "\n  - ".join(finding.what for finding in found)
        raise ValueError(
            f"DFLASH does not support:\n  - {listed}\n"
            f"SGLang's built-in implementation does not serve instead: {'; '.join(reasons)}."
        )
    _decide_for_builtin(server_args, found)
    return True


def leave_to_unsupported_sglang(server_args: Any, what: str) -> None:
    """Decide for the built-in on a SGLang that ours does not fit.

    Raises ValueError if something was requested that only ours has.
    """
    if reasons := _reasons_of_options():
        raise ValueError(f"{what}. SGLang's built-in DFLASH does not serve instead: {'; '.join(reasons)}.")
    _decide_for_builtin(server_args, [NotServed(what, True)], logging.ERROR)


def _decide_for_builtin(server_args: Any, found: list[NotServed], level: int = logging.WARNING) -> None:
    lost = (*LOST, *(finding.lost for finding in found if finding.lost))
    decision = Implementation.builtin(tuple(finding.what for finding in found), lost)
    decision.decide(server_args)
    DFlashOptions.FALLBACK.set(1)
    DFlashOptions.ADAPTIVE.clear()
    logger.log(
        level,
        "DFLASH: SGLang's built-in implementation serves this server, because ours does not support %s. "
        "Lost: %s. --speculative-dflash-strict (%s=1) refuses instead.",
        "; ".join(decision.because),
        ", ".join(decision.lost),
        DFlashOptions.STRICT.variable,
    )


def _reasons_to_refuse(server_args: Any, found: list[NotServed]) -> list[str]:
    from sglang.srt.arg_groups.model_override_base import resolving_view

    reasons = _reasons_of_options()
    if DFlashOptions.STRICT.get():
        return reasons
    args = resolving_view(server_args)
    if args.speculative_draft_model_quantization == PACKED:
        reasons.append(f"it lacks --speculative-draft-model-quantization {PACKED}, which was requested")
    config = read_config(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    if config is not None and is_speculators_config(config):
        reasons.append("it lacks a reader of speculators checkpoints, which was requested")
    if any(not finding.builtin_serves for finding in found):
        reasons.append("it does not support all of this either")
    if refusal := builtin_refusal(server_args):
        reasons.append(f"its own refusal is: {refusal}")
    return reasons


def _reasons_of_options() -> list[str]:
    """List the options that only ours has, or only that of strict servers."""
    if DFlashOptions.STRICT.get():
        return ["--speculative-dflash-strict forbids it"]
    named = []
    if DFlashOptions.COPY_AHEAD.get():
        named.append("--speculative-copy-ahead")
    if DFlashOptions.DRAFT_SAMPLE_METHOD.get() == "probabilistic":
        named.append("--speculative-draft-sample-method probabilistic")
    for option, flag in (
        (DFlashOptions.DRAFT_TEMPERATURE_SCALE, "--speculative-draft-temperature-scale"),
        (DFlashOptions.DRAFT_SAMPLED_SLOTS, "--speculative-draft-sampled-slots"),
        (DFlashOptions.DRAFT_HEAD_DTYPE, "--speculative-draft-head-dtype"),
    ):
        if option.get() != option.default:
            named.append(flag)
    return [f"it lacks {name}, which was requested" for name in named]


def builtin_refusal(server_args: Any) -> str | None:
    """Return the built-in's own refusal of these arguments, or None.

    Its validation runs on a copy of the record, and its parser on the draft's config.
    """
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    trial = copy.copy(server_args)
    trial._resolved_overrides = list(getattr(server_args, "_resolved_overrides", None) or ())
    was_disabled, speculative_hook.logger.disabled = speculative_hook.logger.disabled, True
    try:
        speculative_hook._handle_dflash(trial)
        config = read_config(
            server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision
        )
        if config is not None and not is_speculators_config(config):
            parse_dflash_draft_config(draft_hf_config=config)
    except (ValueError, TypeError) as error:
        return " ".join(str(error).split()).rstrip(".")
    finally:
        speculative_hook.logger.disabled = was_disabled
    return None
