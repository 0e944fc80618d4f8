"""What a DFlash2 checkpoint's config says beyond what it shares with a DFlash one.

Format: z-lab/dflash, `DFlash2DraftModel`: four more entries in `dflash_config`, `conv_kernel_size`,
`conv_group_size`, `selector_rank` and `selector_top_k`."""

from dataclasses import dataclass, fields
from typing import Any

from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig, DraftConfigError, parse_draft_config
from sglang_dflash.srt.configs.layer_fields import is_int

# One format under three names, as SGLang has them.
DFLASH2_ARCHITECTURES = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
CONV_FIELDS = ("conv_kernel_size", "conv_group_size")
SELECTOR_FIELDS = ("selector_rank", "selector_top_k")


@dataclass(frozen=True, slots=True)
class DFlash2DraftConfig(DFlashDraftConfig):
    """One DFlash2 draft.

    conv_kernel_size: rows of its block that a row's convolution sees, its own included; 0 for a draft
    without. conv_group_size: channels that share what is added to their kernel; 0 for a draft without.
    selector_rank: width of the codebooks that score a token after another.
    selector_top_k: candidates of a slot.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


def parse_dflash2_config(hf_config: Any, checkpoint: str) -> DFlash2DraftConfig:
    """Read a DFlash2 draft's `PretrainedConfig`. Raises DraftConfigError as `parse_draft_config` does."""
    nested = getattr(hf_config, "dflash_config", None)
    given = nested if isinstance(nested, dict) else {}
    own = {name: given.get(name) or 0 for name in CONV_FIELDS + SELECTOR_FIELDS}
    problems: list[str] = []
    try:
        shared = parse_draft_config(hf_config, checkpoint, served=CONV_FIELDS + SELECTOR_FIELDS)
    except DraftConfigError as error:
        shared, problems = None, list(error.problems)
    for name, value in own.items():
        if not is_int(value) or value < 0:
            problems.append(f"dflash_config.{name} must be a positive integer, got {value!r}")
            own[name] = 0
    if not problems:
        problems = _contradictions(shared, **own)
    if problems:
        raise DraftConfigError(checkpoint, problems)
    return DFlash2DraftConfig(**{field.name: getattr(shared, field.name) for field in fields(shared)}, **own)


def _contradictions(
    shared: DFlashDraftConfig,
    conv_kernel_size: int,
    conv_group_size: int,
    selector_rank: int,
    selector_top_k: int,
) -> list[str]:
    problems = []
    for name, value in (("selector_rank", selector_rank), ("selector_top_k", selector_top_k)):
        if not value:
            problems.append(f"dflash_config.{name} is missing: a DFlash2 draft has a candidate selector")
    if selector_top_k > shared.vocab_size:
        problems.append(
            f"dflash_config.selector_top_k is {selector_top_k}, of a vocabulary of {shared.vocab_size} tokens"
        )
    if bool(conv_kernel_size) != bool(conv_group_size):
        problems.append(
            f"dflash_config.conv_kernel_size is {conv_kernel_size} and conv_group_size {conv_group_size}: convolutions need both"
        )
    elif conv_group_size and shared.hidden_size % conv_group_size:
        problems.append(
            f"dflash_config.conv_group_size is {conv_group_size}, which does not divide {shared.hidden_size} channels"
        )
    # Neither is defined: no published draft, and no other server, has one with a selector.
    if shared.has_own_vocabulary:
        problems.append("draft_vocab_size: a candidate selector over a draft vocabulary is not supported")
    if shared.sample_from_anchor:
        problems.append(
            "sample_from_anchor: a candidate selector that drafts from the anchor's row is not supported"
        )
    return problems
