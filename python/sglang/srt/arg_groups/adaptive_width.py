"""`--speculative-adaptive`, `--no-speculative-adaptive`, and the default without them."""

import logging
import os
from typing import Any

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings, EagleSettingsError

logger = logging.getLogger(__name__)


def read_adaptive_flags(server_args: Any, source: str) -> None:
    """Keep the requested settings as an option. Raises ValueError for an unusable file."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    args = resolving_view(server_args)
    DFlashOptions.ADAPTIVE.clear()
    config = args.speculative_adaptive_config
    if config is not None and not args.speculative_adaptive and DFlashOptions.NO_ADAPTIVE.get():
        raise ValueError("--speculative-adaptive-config has no effect with --no-speculative-adaptive.")
    if config is None and not args.speculative_adaptive:
        return
    try:
        settings = AdaptiveSettings.read(config)
    except EagleSettingsError as error:
        logger.warning("DFLASH does not follow --speculative-adaptive-config %r: %s", config, error)
        settings = AdaptiveSettings()
    settings.to_environment()
    # SGLang's own switch means EAGLE's widths, policy and config file, from which it would size its buffers.
    # Ours are never wider than a block.
    declare_resolution(server_args, source, speculative_adaptive=False)


def resolve_adaptive(args: Any, block_size: int, is_recurrent: bool) -> AdaptiveSettings | None:
    """Return the settings that the server will run with, or None to verify whole blocks.

    By default, adaptive width is on for a CPU unless it is impossible. If it was requested and is impossible,
    a warning says so. Raises ValueError if the block cannot hold a requested width.
    """
    if DFlashOptions.PLAIN_CYCLE.get():
        return None
    settings = AdaptiveSettings.from_environment()
    impossible = _first(
        (is_recurrent and args.enable_linear_replayssm_spec, "not supported with ReplaySSM"),
        (
            args.attn_dp_size > 1,
            "not supported with DP attention, where each rank would choose its own width",
        ),
        (
            bool(args.enable_lora or args.lora_paths) and args.device != "cpu",
            "not supported with LoRA on a GPU, where SGLang sizes the adapters' graphs for one width",
        ),
        (
            simulates_acceptance(),
            "not supported with SGLANG_SIMULATE_ACC_LEN: it would learn from made-up accept lengths",
        ),
    )
    if settings is not None and impossible:
        logger.warning("DFLASH verifies whole blocks: --speculative-adaptive is %s.", impossible)
        DFlashOptions.ADAPTIVE.clear()
        return None
    if settings is None and not DFlashOptions.NO_ADAPTIVE.get():
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
            "DFLASH: each cycle verifies as many slots of a block as pay off, one of %s "
            "(--no-speculative-adaptive: always all).",
            list(settings.widths(block_size, args.device)),
        )
    return settings


def _first(*reasons: tuple[bool, str]) -> str | None:
    return next((reason for applies, reason in reasons if applies), None)


def simulates_acceptance() -> bool:
    return float(os.environ.get("SGLANG_SIMULATE_ACC_LEN") or -1) > 0
