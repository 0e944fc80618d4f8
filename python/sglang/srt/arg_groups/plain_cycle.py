"""`SGLANG_DFLASH_PLAIN_CYCLE=1`: whole blocks, without what is adaptive or experimental.

A user with a problem sets it first. If the problem stays, none of these parts is its cause.
"""

import logging
from typing import Any

from sglang_dflash.srt.environ import DFlashOptions, Option

logger = logging.getLogger(__name__)

_ALWAYS = ("adaptive verify lengths", "plans with bounds of lengths", "direct replays of graphs")
_REQUESTED: dict[str, Option[Any]] = {
    "copies": DFlashOptions.COPY_AHEAD,
    "packed layers of the draft": DFlashOptions.DRAFT_PACKED,
    "the FP8 head": DFlashOptions.DRAFT_HEAD_DTYPE,
}


def resolve_plain_cycle(args: Any) -> dict[str, Any]:
    """Log what the plain cycle switches off, and return the fields of SGLang that it changes.

    Our own options have their defaults with it (`Option.is_extra`). Call it once they are settled.
    """
    if not DFlashOptions.PLAIN_CYCLE.get():
        return {}
    off = [*_ALWAYS, *(part for part, option in _REQUESTED.items() if option.requested() != option.default)]
    replays_states = args.enable_linear_replayssm_spec
    if replays_states:
        off.append("ReplaySSM (--enable-linear-replayssm-spec)")
    logger.warning(
        "DFLASH verifies whole blocks with SGLang's own plans and replays (%s=1). Off: %s.",
        DFlashOptions.PLAIN_CYCLE.variable,
        ", ".join(off),
    )
    return {"enable_linear_replayssm_spec": False} if replays_states else {}
