"""The formats of draft checkpoints, each converted to one flat config or refused."""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.srt.configs.draft_config import names_sliding_layers
from sglang_dflash.srt.configs.draft_kinds import check_architectures, config_class, is_draft
from sglang_dflash.srt.configs.fields import DraftConfigError, layer_problems
from sglang_dflash.srt.configs.flat_peagle import flatten_peagle, is_flat_peagle
from sglang_dflash.srt.configs.quantization import OtherMethodError, checkpoint_quantization
from sglang_dflash.srt.configs.speculators_format import is_speculators_config, normalize
from sglang_dflash.srt.configs.unsupported import BUILTIN_ARCHITECTURES, Unsupported, draft_findings


def flat_config(
    config: Mapping[str, Any], checkpoint: str, target_layers: int | None = None
) -> dict[str, Any]:
    """Return the flat config of a draft in any format.

    Args:
        config: the file's config.json.
        checkpoint: its folder, or a hub id.
        target_layers: the target's depth, for a draft that does not name the layers it reads; None if that
            is not known.

    Raises:
        DraftConfigError: naming every field that is missing, wrong or contradictory.
        ValueError: for the config of another model.
    """
    where = ""
    if is_speculators_config(config):
        flat, where = normalize(config, checkpoint, target_layers), "transformer_layer_config."
    elif is_flat_peagle(config, checkpoint):
        flat = flatten_peagle(config, checkpoint, target_layers)
    else:
        check_architectures(config.get("architectures"), checkpoint)
        flat = dict(config)
    if names_sliding_layers(flat.get("layer_types")):
        flat["use_sliding_window"] = True  # without it transformers drops the window
    if problems := layer_problems(flat, where):
        raise DraftConfigError(checkpoint, problems)
    return flat


def checkpoint_findings(
    config: Mapping[str, Any], checkpoint: str, revision: str | None = None
) -> list[Unsupported]:
    """List what ours does not serve of a checkpoint. Flags and devices may add reasons.

    Faults that make a config invalid are left to the class that reads it, but for those of a quantization:
    the built-in would load such a file, and draft noise.
    """
    builtin_reads = is_dflash_draft(config)
    architectures = config.get("architectures")
    found = draft_findings(config, config_class(architectures).nested_fields()) if builtin_reads else []
    try:
        checkpoint_quantization(config, checkpoint, revision)
    except ValueError as error:
        is_other = isinstance(error, OtherMethodError)
        where = "" if is_other else "quantization_config: "
        found.append(Unsupported(where + str(error).rstrip("."), builtin_reads and is_other))
    return found


def is_dflash_draft(config: Mapping[str, Any]) -> bool:
    """Return True for a draft in z-lab's format, which the built-in may read as well."""
    architectures = config.get("architectures")
    if is_speculators_config(config):
        return False
    return is_draft(architectures) or (
        isinstance(architectures, list) and architectures[:1] in [[name] for name in BUILTIN_ARCHITECTURES]
    )
