"""What a checkpoint says about how it is to be served.

`--model-path <speculators checkpoint>`: serve the checkpoint's target, with the checkpoint as its draft. And
a P-EAGLE draft under any of the names people know it by (PEAGLE; EAGLE3, as vLLM has it) runs as a DFLASH
draft, whose cycle it shares: to SGLang the algorithm is DFLASH."""

import logging
import os
from typing import Any

from sglang_dflash.srt.arg_groups.draft_files import check_draft_config
from sglang_dflash.srt.configs.config_file import read_config
from sglang_dflash.srt.configs.speculators_format import (
    is_speculators_config,
    normalize,
    speculators_type,
    verifier_of,
)

logger = logging.getLogger(__name__)

SOURCE = "sglang_dflash"
# What --speculative-algorithm may say for a draft of this kind.
_ALGORITHMS = {"dflash": ("DFLASH",), "peagle": ("DFLASH", "PEAGLE", "EAGLE3")}
_DISPLAY_NAMES = {"dflash": "DFLASH", "peagle": "P-EAGLE"}


def detect_speculators_model(server_args: Any, previous: Any) -> None:
    """Resolution hook around SGLang's `handle_deprecated_dp_attention`, its first step: everything after it
    sees the target as the model. Flags the user gave win; contradictions raise ValueError."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    args = resolving_view(server_args)
    config = read_config(args.model_path, args.revision)
    if config is not None and is_speculators_config(config):
        checkpoint = args.model_path
        normalize(config, checkpoint)  # say what is wrong with it before anything is loaded
        kind = speculators_type(config)
        _refuse_contradictions(args, checkpoint, kind)
        verifier = locate_verifier(verifier_of(config, checkpoint), checkpoint)
        logger.info(
            "%s is a speculators checkpoint: serving its target %s, with it as %s draft.",
            checkpoint,
            verifier,
            _DISPLAY_NAMES[kind],
        )
        declare_resolution(
            server_args,
            SOURCE,
            model_path=verifier,
            revision=None,  # --revision was the checkpoint's
            speculative_algorithm="DFLASH",
            speculative_draft_model_path=checkpoint,
            speculative_draft_model_revision=args.speculative_draft_model_revision or args.revision,
        )
    elif (args.speculative_algorithm or "").upper() in ("PEAGLE", "EAGLE3"):
        _resolve_peagle(server_args, args)
    previous(server_args)


def _resolve_peagle(server_args: Any, args: Any) -> None:
    """PEAGLE, or EAGLE3 with a P-EAGLE draft, is DFLASH to SGLang. EAGLE3 with any other draft is none of our
    business.

    Raises ValueError for PEAGLE without a P-EAGLE draft.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution

    draft, named = args.speculative_draft_model_path, args.speculative_algorithm.upper()
    config = read_config(draft, args.speculative_draft_model_revision)
    if config is None or speculators_type(config) != "peagle":
        if named == "EAGLE3":
            return
        if draft is None:
            raise ValueError("PEAGLE needs a draft: give --speculative-draft-model-path.")
        if config is None:
            check_draft_config(draft, args.speculative_draft_model_revision)
            raise ValueError(f"--speculative-draft-model-path {draft!r}: no config.json there.")
        raise ValueError(
            f"--speculative-algorithm PEAGLE, but {draft!r} is no P-EAGLE checkpoint: its speculators_model_type is "
            f"{speculators_type(config)!r}, its architectures are {config.get('architectures')}."
        )
    normalize(config, draft)  # say what is wrong with it before anything is loaded
    logger.info(
        "--speculative-algorithm %s with the P-EAGLE draft %s: drafting in parallel, in DFLASH's cycle.",
        named,
        draft,
    )
    declare_resolution(server_args, SOURCE, speculative_algorithm="DFLASH")


def locate_verifier(name_or_path: str, checkpoint: str) -> str:
    """Where a checkpoint's target is: an existing path as it stands or next to the checkpoint, else a hub id.

    Raises ValueError for what can only be a path and does not exist.
    """
    beside = (
        os.path.join(checkpoint, name_or_path),
        os.path.join(os.path.dirname(checkpoint.rstrip("/")), name_or_path),
    )
    for candidate in (os.path.expanduser(name_or_path), *beside):
        if os.path.isdir(candidate):
            return os.path.normpath(candidate)
    if os.path.isabs(name_or_path) or name_or_path.startswith((".", "~")) or name_or_path.count("/") > 1:
        raise ValueError(
            f"{checkpoint!r} was trained for the target at {name_or_path!r}, which is not on this machine. Name yours: "
            f"--model-path TARGET --speculative-algorithm DFLASH --speculative-draft-model-path {checkpoint}"
        )
    return name_or_path


def _refuse_contradictions(args: Any, checkpoint: str, kind: str) -> None:
    if args.speculative_draft_model_path not in (None, checkpoint):
        raise ValueError(
            f"--model-path {checkpoint!r} is a draft, and so is --speculative-draft-model-path "
            f"{args.speculative_draft_model_path!r}: give the target as --model-path."
        )
    if (args.speculative_algorithm or "DFLASH").upper() not in _ALGORITHMS[kind]:
        raise ValueError(
            f"--model-path {checkpoint!r} is a {_DISPLAY_NAMES[kind]} draft, which --speculative-algorithm "
            f"{args.speculative_algorithm} cannot run."
        )
