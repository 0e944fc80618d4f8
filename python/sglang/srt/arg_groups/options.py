"""The plugin's flags, adaptive width, and basic mode.

The flags stand on SGLang's command line and in its `--config` files. A flag writes SGLang's field if there is
one, else an option of `DFlashOptions`.
"""

import argparse
import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

from sglang_dflash.srt.environ import DFlashOptions, Option
from sglang_dflash.srt.observability.record import FILE_BYTES
from sglang_dflash.srt.patching import LOAD, patches
from sglang_dflash.srt.speculative.width.settings import ON_BY_DEFAULT, lens_to_verify, read_steps

logger = logging.getLogger(__name__)

# What basic mode switches off always, and the options that it switches off.
_OFF_IN_BASIC_MODE = (
    "adaptive verify lengths",
    "cycles at start-up",
    "lengths and tokens that the acceptance kernel relays",
)
_EXTRA: dict[str, Option[Any]] = {
    "copies": DFlashOptions.COPY_AHEAD,
    "the wait under the draft": DFlashOptions.WAIT_UNDER_DRAFT,
}


class _SetOption(argparse.Action):
    """Set an option. A sample method also sets SGLang's --speculative-use-rejection-sampling."""

    def __call__(self, parser, namespace, values, option_string=None):
        if not values:
            parser.error(f"{option_string} needs a value")
        getattr(DFlashOptions, self.dest.removeprefix("speculative_").upper()).set(values)
        if self.dest == "speculative_draft_sample_method":
            namespace.speculative_use_rejection_sampling = values == "probabilistic"


class _TurnOn(argparse._StoreTrueAction):
    """Set an option to 1.

    By the base class SGLang's config files know a flag without a value, and 0.5.22 finds it by the flag's own
    name as `dest`.
    """

    def __init__(self, *args, option: str, **kwargs):
        super().__init__(*args, **kwargs)
        self._option = option

    def __call__(self, parser, namespace, values, option_string=None):
        getattr(DFlashOptions, self._option).set(1)
        if self._option == "NO_ADAPTIVE":  # the last of it and SGLang's --speculative-adaptive counts
            namespace.speculative_adaptive = False


@patches(
    "sglang.srt.server_args.ServerArgs.add_cli_args",
    at=LOAD,
    signature="(parser)",
    feature="the flags of sglang-dflash on the command line (their environment variables work)",
    upstream="docs/dev/upstream/plugin-doors.md",
)
def add_cli_args(original: Callable[[Any], None], parser: argparse.ArgumentParser) -> None:
    """Offer DFLASH's flags on SGLang's command line."""
    original(parser)
    add_flags(parser)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add our flags to SGLang's parser."""
    group = parser.add_argument_group("sglang-dflash")

    def add(flag: str, help: str, **options: Any) -> None:
        group.add_argument(flag, default=argparse.SUPPRESS, help=help, **options)

    add(
        "--speculative-draft-sample-method",
        "How drafted tokens of sampled requests are chosen: the draft's argmax (default), or a draw from its "
        "distribution, verified with its true probabilities. At temperature 0 it is always the argmax.",
        action=_SetOption,
        choices=("greedy", "probabilistic"),
    )
    add(
        "--speculative-copy-ahead",
        "If a request's last tokens occur earlier in its prompt or output, propose what followed them there "
        "instead of the draft's block. Cycles in which all requests copy skip the draft (on a GPU with "
        "--speculative-adaptive). Lossless.",
        action=_TurnOn,
        option="COPY_AHEAD",
    )
    add(
        "--speculative-dflash-strict",
        "If this plugin does not serve a draft, flag or device that SGLang's built-in DFLASH serves, end the "
        "start. By default the built-in serves, and a warning says why.",
        action=_TurnOn,
        option="STRICT",
    )
    add(
        "--speculative-record",
        "Write each finished request to this folder, to train a draft on the server's traffic: prompt and "
        "answer as token ids, in the input format of `speculators prepare-data`. It is personal data.",
        action=_SetOption,
        metavar="DIR",
    )
    add(
        "--speculative-record-share",
        "Share of requests to record, 0 to 1 (default: 1).",
        action=_SetOption,
    )
    add(
        "--speculative-record-limit",
        "Size of the record, whose oldest files go first (default: 2GB).",
        action=_SetOption,
    )
    add(
        "--speculative-record-opt-in",
        'Record requests with custom_params {"speculative_record": true} alone. By default all but those '
        "with false.",
        action=_TurnOn,
        option="RECORD_OPT_IN",
    )
    add(
        "--no-speculative-adaptive",
        "Always verify whole blocks. By default each cycle on a CPU verifies as many drafted tokens as pay "
        "off; on a GPU that needs --speculative-adaptive.",
        action=_TurnOn,
        option="NO_ADAPTIVE",
    )


def resolve_adaptive(args: Any, is_requested: bool, block_size: int, is_recurrent: bool) -> None:
    """Keep the settings of adaptive width as an option, if the server will run with it.

    By default, adaptive width is on for a CPU unless it is impossible. If it was requested and is impossible,
    a warning says so.

    Args:
        args: the server's; their `speculative_adaptive` is EAGLE's.
        is_requested: whether `--speculative-adaptive` was given.
        block_size: slots of a block, the anchor included.
        is_recurrent: whether the target has recurrent states.

    Raises:
        ValueError: The config file cannot be used, or the block cannot hold a requested width.
    """
    config = args.speculative_adaptive_config
    DFlashOptions.ADAPTIVE.clear()
    if config is not None and not is_requested and DFlashOptions.NO_ADAPTIVE.get():
        raise ValueError("--speculative-adaptive-config has no effect with --no-speculative-adaptive.")
    is_requested = is_requested or config is not None
    steps = read_steps(config)
    if DFlashOptions.BASIC_MODE.get() or (DFlashOptions.NO_ADAPTIVE.get() and not is_requested):
        return
    reason = _reason_against_adaptive(args, is_recurrent)
    if reason is not None and is_requested:
        logger.warning("DFLASH verifies whole blocks: --speculative-adaptive is %s.", reason)
        return
    if not is_requested and (reason := reason or _reason_against_default(args, block_size)):
        logger.info("DFLASH verifies whole blocks: adaptive width is %s.", reason)
        return
    verify_lens = lens_to_verify(steps, block_size)
    DFlashOptions.ADAPTIVE.set(",".join(map(str, verify_lens)))
    logger.info(
        "DFLASH: each cycle verifies as many slots of a block as pay off, one of %s "
        "(--no-speculative-adaptive: always all).",
        list(verify_lens),
    )


def _reason_against_adaptive(args: Any, is_recurrent: bool) -> str | None:
    """Return why adaptive width is impossible, or None."""
    if is_recurrent and args.enable_linear_replayssm_spec:
        return "not supported with ReplaySSM"
    if args.attn_dp_size > 1:
        return "not supported with DP attention, where each rank would choose its own width"
    if args.enable_lora or args.lora_paths:
        return "not supported with LoRA, which SGLang applies to blocks of one width"
    if simulates_one_length():
        return "not supported with SGLANG_SIMULATE_ACC_LEN, which accepts equally much of all requests"
    return None


def _reason_against_default(args: Any, block_size: int) -> str | None:
    """Return why adaptive width is off without a request, or None."""
    if args.device not in ON_BY_DEFAULT:
        return "off by default on a GPU until it has been measured on one (--speculative-adaptive)"
    if block_size == 1:
        return "pointless with a block of 1"
    if args.disaggregation_mode == "prefill":
        return "pointless on a server that only prefills"
    return None


def simulates_one_length() -> bool:
    return float(os.environ.get("SGLANG_SIMULATE_ACC_LEN") or -1) > 0


def check_simulated_lens(block_size: int) -> None:
    """Raise ValueError if accept lengths by request are requested and cannot be simulated."""
    option = DFlashOptions.SIMULATE_ACC_LENS
    means = option.get()
    if not means:
        return
    if simulates_one_length():
        raise ValueError(f"{option.variable} and SGLANG_SIMULATE_ACC_LEN exclude each other: set one.")
    if os.environ.get("SGLANG_SIMULATE_ACC_TOKEN_MODE", "fixed") != "fixed":
        raise ValueError(f"{option.variable} accepts a fixed token: SGLANG_SIMULATE_ACC_TOKEN_MODE=fixed.")
    if not all(1 <= mean <= block_size for mean in means):
        raise ValueError(
            f"{option.variable} must be from 1, the bonus token, to {block_size}, the whole block, got "
            f"{','.join(map(str, means))}."
        )


def check_record_options(num_ranks: int) -> None:
    """Raise ValueError if so many ranks cannot write the record as it was requested."""
    folder = DFlashOptions.RECORD.get()
    share, limit = DFlashOptions.RECORD_SHARE.get(), DFlashOptions.RECORD_LIMIT.get()
    if not 0 <= share <= 1:
        raise ValueError(f"--speculative-record-share must be from 0 to 1, got {share:g}.")
    # A rank leaves room for the open files to grow. Below this limit it would remove the others'.
    if limit < (least := FILE_BYTES * (2 * num_ranks - 1)):
        raise ValueError(f"--speculative-record-limit must be {least} bytes or more, got {limit}.")
    if folder is None:
        return
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"--speculative-record {folder}: cannot be written: {error}.") from error


def resolve_basic_mode(args: Any) -> dict[str, Any]:
    """Log what basic mode switches off, and return the fields of SGLang that it changes.

    The extra options have their defaults with it (`Option.is_extra`). Call this when all options are final.
    """
    if not DFlashOptions.BASIC_MODE.get():
        return {}
    off = [part for part, option in _EXTRA.items() if option.requested() != option.default]
    replays_states = args.enable_linear_replayssm_spec
    if replays_states:
        off.append("ReplaySSM (--enable-linear-replayssm-spec)")
    logger.warning(
        "DFLASH verifies whole blocks (%s=1). Off: %s.",
        DFlashOptions.BASIC_MODE.variable,
        ", ".join((*_OFF_IN_BASIC_MODE, *off)),
    )
    return {"enable_linear_replayssm_spec": False} if replays_states else {}
