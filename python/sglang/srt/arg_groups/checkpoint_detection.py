"""Server arguments that follow from a checkpoint.

`--model-path <speculators checkpoint>` serves the checkpoint's target, with the checkpoint as its draft. A
P-EAGLE draft under any of its names (PEAGLE; EAGLE3, as vLLM has it) runs in DFLASH's cycle: to SGLang the
algorithm is DFLASH.
"""

import logging
import os
from typing import Any

from sglang_dflash.srt.configs.checkpoint import read_config, read_file
from sglang_dflash.srt.configs.draft_formats import is_flat_peagle, layer_inputs
from sglang_dflash.srt.configs.speculators_format import is_served, speculators_type, verifier_of
from sglang_dflash.srt.environ import SOURCE, DFlashOptions

logger = logging.getLogger(__name__)

# Values of --speculative-algorithm that run a P-EAGLE draft.
_PEAGLE = ("DFLASH", "PEAGLE", "EAGLE3")
_DISPLAY_NAMES = {"dflash": "DFLASH", "dflash2": "DFlash2", "dspark": "DFlash", "peagle": "P-EAGLE"}


def detect_speculators_model(server_args: Any) -> None:
    """Serve the target of a speculators checkpoint, and turn PEAGLE into DFLASH.

    All later steps see the target as the model. A model that is no draft in a format of the plugin is left to
    SGLang.

    Raises:
        ValueError: A flag of the user contradicts the checkpoint.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    args = resolving_view(server_args)
    DFlashOptions.TARGET_LAYERS.clear()
    config = read_config(args.model_path, args.revision)
    if config is not None and is_served(config):
        checkpoint = args.model_path
        kind = speculators_type(config)
        verifier_name = verifier_of(config, checkpoint)  # reports nearly all its faults
        _check_flags_agree(args, checkpoint, kind)
        verifier = locate_verifier(verifier_name, checkpoint)
        if kind == "peagle":
            _record_target_depth(read_config(verifier, None), checkpoint, config)
        logger.info(
            "%s is a speculators checkpoint: serving its target %s, with the checkpoint as its %s draft.",
            checkpoint,
            verifier,
            _DISPLAY_NAMES[kind],
        )
        declare_resolution(
            server_args,
            source=SOURCE,
            model_path=verifier,
            revision=None,  # --revision was the checkpoint's
            speculative_algorithm="DFLASH",
            speculative_draft_model_path=checkpoint,
            speculative_draft_model_revision=args.speculative_draft_model_revision or args.revision,
        )
    elif (algorithm := (args.speculative_algorithm or "").upper()) in _PEAGLE:
        draft = args.speculative_draft_model_path
        config = read_config(draft, args.speculative_draft_model_revision) or {}
        is_peagle = speculators_type(config) == "peagle" or is_flat_peagle(config, draft)
        if is_peagle:
            _record_target_depth(read_config(args.model_path, args.revision), draft, config)
        if algorithm != "DFLASH":
            _resolve_peagle(server_args, args, config, is_peagle)


def _resolve_peagle(server_args: Any, args: Any, config: dict[str, Any], is_peagle: bool) -> None:
    """Declare DFLASH for PEAGLE, and for EAGLE3 with a P-EAGLE draft.

    `config` is the draft's config.json. It is empty if the file cannot be read.

    Raises:
        ValueError: PEAGLE was requested without a P-EAGLE draft.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution

    draft, named = args.speculative_draft_model_path, args.speculative_algorithm.upper()
    if is_peagle:
        logger.info(
            "--speculative-algorithm %s with the P-EAGLE draft %s: drafting in parallel, in DFLASH's cycle.",
            named,
            draft,
        )
        declare_resolution(server_args, SOURCE, speculative_algorithm="DFLASH")
    elif named == "PEAGLE":
        if draft is None:
            raise ValueError("PEAGLE needs a draft: give --speculative-draft-model-path.")
        if not config:
            read_file(draft, args.speculative_draft_model_revision)  # says why
            raise ValueError(f"--speculative-draft-model-path {draft!r}: no config.json there.")
        raise ValueError(
            f"--speculative-algorithm PEAGLE, but {draft!r} is no P-EAGLE checkpoint: its "
            f"speculators_model_type is {speculators_type(config)!r}, its architectures are "
            f"{config.get('architectures')}."
        )


def _record_target_depth(target: dict[str, Any] | None, draft: str, config: dict[str, Any]) -> None:
    """Pass the target's depth to all processes, if a P-EAGLE draft does not name its layers.

    `target` and `config` are the config.json of the target and of the draft.
    """
    if target is None or layer_inputs(config) is not None:
        return
    nested = target.get("text_config")
    depth = (nested if isinstance(nested, dict) else target).get("num_hidden_layers")
    if isinstance(depth, int) and depth > 5:
        DFlashOptions.TARGET_LAYERS.set(depth)
        logger.info(
            "The P-EAGLE draft %s names no target layers; it is taken to read the inputs of layers 2, %d and "
            "%d, as EAGLE-3 drafts do.",
            draft,
            depth // 2,
            depth - 3,
        )


def locate_verifier(name_or_path: str, checkpoint: str) -> str:
    """Locate a target, by its path, by a path next to the checkpoint, or by its hub id.

    Raises:
        ValueError: The name can only be a path, and that path does not exist.
    """
    folders = ("", checkpoint, os.path.dirname(checkpoint.rstrip("/")))
    for candidate in (os.path.join(folder, os.path.expanduser(name_or_path)) for folder in folders):
        if os.path.isdir(candidate):
            return os.path.normpath(candidate)
    if os.path.isabs(name_or_path) or name_or_path.startswith((".", "~")) or name_or_path.count("/") > 1:
        raise ValueError(
            f"{checkpoint!r} was trained for the target at {name_or_path!r}, which is not on this machine. "
            "Name yours: --model-path TARGET --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {checkpoint}"
        )
    return name_or_path


def _check_flags_agree(args: Any, checkpoint: str, kind: str) -> None:
    if args.speculative_draft_model_path not in (None, checkpoint):
        raise ValueError(
            f"--model-path {checkpoint!r} is a draft, and so is --speculative-draft-model-path "
            f"{args.speculative_draft_model_path!r}: give the target as --model-path."
        )
    if (args.speculative_algorithm or "DFLASH").upper() not in (_PEAGLE if kind == "peagle" else ("DFLASH",)):
        raise ValueError(
            f"--model-path {checkpoint!r} is a {_DISPLAY_NAMES[kind]} draft, which --speculative-algorithm "
            f"{args.speculative_algorithm} cannot run."
        )
