"""`--speculative-adaptive` and `--no-speculative-adaptive`: what was asked for, and what is done where
nothing was."""

import logging
import os
from typing import Any

from sglang_dflash.srt.environ import is_on
from sglang_dflash.srt.speculative.width.settings import NEVER_VARIABLE, VARIABLE, AdaptiveSettings

logger = logging.getLogger(__name__)


def take_adaptive(server_args: Any, source: str) -> None:
    """Move what was asked for into the environment, where `AdaptiveSettings.from_environment` finds it.
    Raises ValueError for a config file that cannot be used."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    args = resolving_view(server_args)
    os.environ.pop(VARIABLE, None)
    config = args.speculative_adaptive_config
    if config is not None and not args.speculative_adaptive and is_on(NEVER_VARIABLE):
        raise ValueError("--speculative-adaptive-config says nothing with --no-speculative-adaptive.")
    if config is None and not args.speculative_adaptive:
        return
    AdaptiveSettings.read(config).to_environment()
    # SGLang's own switch means EAGLE's widths, policy and config file, from which it would size its buffers.
    # Ours are never wider than a block.
    declare_resolution(server_args, source, speculative_adaptive=False)


def settle_adaptive(args: Any, block_size: int, is_recurrent: bool) -> AdaptiveSettings | None:
    """What the server will do; None: verify whole blocks. Where nobody said: adaptive on a CPU, unless
    something stands against it. Raises ValueError where it was asked for and cannot be, or for candidates
    that the block does not hold."""
    settings = AdaptiveSettings.from_environment()
    impossible = _first(
        (is_recurrent, "not supported yet for targets with recurrent states (Mamba, GatedDeltaNet)"),
        (
            args.attn_dp_size > 1,
            "not supported with DP attention, where each rank would choose a width of its own",
        ),
        (
            simulates_acceptance(),
            "not supported with SGLANG_SIMULATE_ACC_LEN: it would learn from made-up accept lengths",
        ),
    )
    if settings is not None and impossible:
        raise ValueError(f"--speculative-adaptive is {impossible}.")
    if settings is None and not is_on(NEVER_VARIABLE):
        reason = impossible or _first(
            (
                args.device != "cpu",
                "off by default on a GPU until it has been measured on one (--speculative-adaptive)",
            ),
            (block_size == 1, "pointless with a block of 1"),
            (args.disaggregation_mode == "prefill", "pointless on a server that only prefills"),
        )
        if reason:
            logger.info("DFLASH verifies whole blocks: adaptive width is %s.", reason)
            return None
        settings = AdaptiveSettings()
        settings.to_environment()
    if settings is not None:
        logger.info(
            "DFLASH: each cycle verifies as many slots of a block as are worth it, of %s (--no-speculative-adaptive: all).",
            list(settings.widths(block_size)),
        )
    return settings


def _first(*reasons: tuple[bool, str]) -> str | None:
    return next((reason for applies, reason in reasons if applies), None)


def simulates_acceptance() -> bool:
    return float(os.environ.get("SGLANG_SIMULATE_ACC_LEN") or -1) > 0
