"""Reasons why ours does not serve a draft checkpoint, by its config.json alone."""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.srt.configs.draft_variants import BUILTIN_ARCHITECTURES, draft_findings
from sglang_dflash.srt.configs.not_served import NotServed
from sglang_dflash.srt.configs.peagle_config import config_class, is_draft
from sglang_dflash.srt.configs.quantization import OtherMethodError, checkpoint_quantization
from sglang_dflash.srt.configs.speculators_format import is_speculators_config


def checkpoint_findings(
    config: Mapping[str, Any], checkpoint: str, revision: str | None = None
) -> list[NotServed]:
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
        found.append(NotServed(where + str(error).rstrip("."), builtin_reads and is_other))
    return found


def is_dflash_draft(config: Mapping[str, Any]) -> bool:
    """Return True for a draft in z-lab's format, which the built-in may read as well."""
    architectures = config.get("architectures")
    if is_speculators_config(config):
        return False
    return is_draft(architectures) or (
        isinstance(architectures, list) and architectures[:1] in [[name] for name in BUILTIN_ARCHITECTURES]
    )
