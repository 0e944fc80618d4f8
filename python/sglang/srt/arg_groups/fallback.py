"""The decision who serves: our DFLASH, or SGLang's built-in DFLASH as the fallback.

The launcher decides once, before it declares anything. What our DFLASH does not serve is handed over to the
built-in, which runs the server unchanged or refuses it. So installing the plugin never ends a server that
worked. Nothing is handed over if only ours could serve it, or with `--speculative-dflash-strict`.
"""

import logging
from importlib.metadata import version
from typing import Any

from sglang_dflash.srt.arg_groups.implementation import Implementation
from sglang_dflash.srt.configs.checkpoint import read_config
from sglang_dflash.srt.configs.draft_formats import is_converted
from sglang_dflash.srt.configs.speculators_format import is_speculators_config
from sglang_dflash.srt.configs.unsupported import Unsupported
from sglang_dflash.srt.environ import DFlashOptions, Option

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
# Options of such features, each with its flag or variable.
OPTIONS_OF_OURS: dict[str, Option[Any]] = {
    "--speculative-copy-ahead": DFlashOptions.COPY_AHEAD,
    "--speculative-draft-sample-method": DFlashOptions.DRAFT_SAMPLE_METHOD,
    "--speculative-record": DFlashOptions.RECORD,
    DFlashOptions.WAIT_UNDER_DRAFT.variable: DFlashOptions.WAIT_UNDER_DRAFT,
    DFlashOptions.SIMULATE_ACC_LENS.variable: DFlashOptions.SIMULATE_ACC_LENS,
}


def fall_back(server_args: Any, found: list[Unsupported]) -> bool:
    """Hand a server over to the built-in if anything was found that ours does not serve.

    Returns whether it was handed over.

    Raises:
        ValueError: A finding or an option forbids that. The error names all findings, and each reason.
    """
    if not found:
        return False
    because = tuple(finding.what for finding in found)
    if reasons := _reasons_to_refuse(server_args, found):
        listed = "\n  - ".join(because)
        raise ValueError(
            f"DFLASH does not support:\n  - {listed}\n"
            f"SGLang's built-in implementation does not serve instead: {'; '.join(reasons)}."
        )
    lost = (*BUILTIN_LACKS, *(finding.drawback for finding in found if finding.drawback))
    Implementation("sglang", version("sglang"), because, lost).decide(server_args)
    DFlashOptions.FALLBACK.set(1)
    DFlashOptions.ADAPTIVE.clear()
    logger.warning(
        "DFLASH: SGLang's built-in implementation serves this server, because ours does not support %s. "
        "Lost: %s. --speculative-dflash-strict (%s=1) refuses instead.",
        "; ".join(because),
        ", ".join(lost),
        DFlashOptions.STRICT.variable,
    )
    return True


def _reasons_to_refuse(server_args: Any, found: list[Unsupported]) -> list[str]:
    from sglang.srt.arg_groups.model_override_base import resolving_view

    if DFlashOptions.STRICT.get():
        return ["--speculative-dflash-strict forbids it"]
    args = resolving_view(server_args)
    draft = args.speculative_draft_model_path
    config = read_config(draft, args.speculative_draft_model_revision) or {}
    # The built-in drafts greedily, too.
    requested = [name for name, o in OPTIONS_OF_OURS.items() if o.get() not in (o.default, "greedy")]
    if is_speculators_config(config) or is_converted(config, draft):
        requested.append("a reader of this draft's format")
    is_served = args.device != "cpu" and all(finding.builtin_supports for finding in found)
    reasons = [f"it lacks {feature}, which was requested" for feature in requested]
    return reasons if is_served else [*reasons, f"it does not support this on {args.device!r} either"]
