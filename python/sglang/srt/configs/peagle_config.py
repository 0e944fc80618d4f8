"""What a P-EAGLE checkpoint's config says beyond what it shares with a DFlash one.

Format: speculators, `speculators_model_type: "peagle"`, brought to a flat config by
`configs/speculators_format.py`."""

from dataclasses import dataclass, fields
from typing import Any

from sglang_dflash.srt.configs.dflash2_config import DFLASH2_ARCHITECTURES, parse_dflash2_config
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig, DraftConfigError, parse_draft_config
from sglang_dflash.srt.configs.layer_fields import shown

PEAGLE_ARCHITECTURE = "PEagleDraftModel"


@dataclass(frozen=True, slots=True)
class PEagleDraftConfig(DFlashDraftConfig):
    """One P-EAGLE draft (arXiv 2602.01469). `block_size` is the verified block, anchor included: K + 1.

    norm_before_residual: whether layer 0's residual is the fused hidden state after its norm, rather than
    before. norm_before_fc: one norm over all captured states at once, before they are fused.
    fc_norm: a norm for each captured state, before they are fused.
    qk_norm: whether queries and keys are normed per head, as Qwen3's are and Llama's are not.
    """

    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    qk_norm: bool

    def is_causal(self, layer_id: int) -> bool:
        return True


def parse_peagle_config(hf_config: Any, checkpoint: str) -> PEagleDraftConfig:
    """Read what `speculators_format` made of a P-EAGLE config. Raises DraftConfigError as
    `parse_draft_config` does."""
    shared = parse_draft_config(hf_config, checkpoint)
    own = {
        name: hf_config.dflash_config[name]
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "qk_norm")
    }
    return PEagleDraftConfig(**{field.name: getattr(shared, field.name) for field in fields(shared)}, **own)


def read_draft_config(hf_config: Any, checkpoint: str) -> DFlashDraftConfig:
    """The draft a config describes, of whichever algorithm. Raises ValueError for an architecture that is
    neither."""
    architectures = getattr(hf_config, "architectures", None)
    check_architectures(architectures, checkpoint)
    return _PARSERS[architectures[0]](hf_config, checkpoint)


def is_draft(architectures: Any) -> bool:
    """Whether a config's `architectures` are those of a draft of ours."""
    return isinstance(architectures, list) and bool(architectures) and str(architectures[0]) in _PARSERS


def check_architectures(architectures: Any, checkpoint: str) -> None:
    """Raise ValueError for what is no list of names, or of another model."""
    names = architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DraftConfigError(
            checkpoint, [f"architectures must be a list of names, got {shown(architectures)}"]
        )
    if not is_draft(names):
        raise ValueError(
            f"{checkpoint!r} is neither a DFlash nor a P-EAGLE draft: its architectures are {shown(architectures)}, expected "
            f"one of {sorted(_PARSERS)}."
        )


_PARSERS = {
    "DFlashDraftModel": parse_draft_config,
    PEAGLE_ARCHITECTURE: parse_peagle_config,
    **dict.fromkeys(DFLASH2_ARCHITECTURES, parse_dflash2_config),
}
