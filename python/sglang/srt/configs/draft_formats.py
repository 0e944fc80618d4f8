"""The formats of draft checkpoints, each converted to one flat config."""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.srt.configs.draft_config import names_sliding_layers
from sglang_dflash.srt.configs.flat_peagle import flatten_peagle, is_flat_peagle
from sglang_dflash.srt.configs.layer_fields import layer_problems
from sglang_dflash.srt.configs.peagle_config import check_architectures
from sglang_dflash.srt.configs.speculators_format import is_speculators_config, normalize
from sglang_dflash.srt.configs.validation import DraftConfigError


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
