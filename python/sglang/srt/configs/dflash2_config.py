"""A DFlash2 checkpoint's config: a DFlash one with convolutions and a candidate selector.

Format: z-lab/dflash, `DFlash2DraftModel`: four more entries in `dflash_config`, `conv_kernel_size`,
`conv_group_size`, `selector_rank` and `selector_top_k`.
"""

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo

from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.layer_fields import Shapes
from sglang_dflash.srt.configs.validation import Positive

# One format under three names, as SGLang has them.
DFLASH2_ARCHITECTURES = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")


def _check_groups(value: int, info: ValidationInfo) -> int:
    size, hidden = info.data.get("conv_kernel_size", value), info.data.get("hidden_size", value)
    if bool(size) != bool(value):
        raise ValueError(f"is {value} and conv_kernel_size {size}: convolutions need both")
    if value and hidden % value:
        raise ValueError(f"is {value}, which does not divide {hidden} channels")
    return value


def _check_selector(value: int, info: ValidationInfo) -> int:
    vocab_size = info.data.get("vocab_size", value)
    if not value:
        raise ValueError("is missing: a DFlash2 draft has a candidate selector")
    if info.field_name == "selector_top_k" and value > vocab_size:
        raise ValueError(f"is {value}, of a vocabulary of {vocab_size} tokens")
    # Not defined: no published draft, and no other server, has a selector over one.
    if info.data.get("draft_vocab_size", vocab_size) != vocab_size:
        raise ValueError("with a draft_vocab_size is not supported")
    return value


def _check_selected_vocabulary(value: int | None, info: ValidationInfo) -> int | None:
    vocab_size = info.data.get("vocab_size")
    if value is not None and vocab_size is not None and value > vocab_size:
        raise ValueError(f"is {value}, of a vocabulary of {vocab_size} tokens")
    if value is not None and value < info.data.get("selector_top_k", 0):
        raise ValueError(f"is {value}, fewer than the {info.data['selector_top_k']} candidates of a slot")
    return value


# Null and false are zero: the draft has none.
Count = Annotated[int, Field(ge=0), BeforeValidator(lambda value: value or 0)]


class DFlash2DraftConfig(DFlashDraftConfig):
    """One DFlash2 draft.

    Attributes:
        conv_kernel_size: rows of a block that a row's convolution sees, the row included; 0 without
            convolutions.
        conv_group_size: channels that share what is added to their kernel; 0 without convolutions.
        selector_rank: width of the codebooks that score a token after another.
        selector_top_k: candidates of a slot.
        selector_vocab_size: tokens that may be candidates, the first of the vocabulary. None: all.
    """

    kind: ClassVar[str] = "DFlash2"

    conv_kernel_size: Count = 0
    conv_group_size: Annotated[Count, AfterValidator(_check_groups)] = 0
    selector_rank: Annotated[Count, AfterValidator(_check_selector)] = 0
    selector_top_k: Annotated[Count, AfterValidator(_check_selector)] = 0
    selector_vocab_size: Annotated[Positive | None, AfterValidator(_check_selected_vocabulary)] = None

    def required_tensors(self, hf_config: Any) -> Shapes:
        """Return the tensors a checkpoint must hold and their shapes, the vocabulary's aside."""
        codebook = (self.vocab_size, self.selector_rank)
        return super().required_tensors(hf_config) | {
            "candidate_selector.hidden_projection.weight": (self.selector_rank, self.hidden_size),
            "candidate_selector.predecessor_codebook": codebook,
            "candidate_selector.successor_codebook": codebook,
        }

    def layer_tensors(self, hf_config: Any, layer: int) -> Shapes:
        """Return the tensors of one layer and their shapes."""
        shapes = super().layer_tensors(hf_config, layer)
        if taps := self.conv_kernel_size:
            groups = self.hidden_size // self.conv_group_size
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"{name}.base_kernel"] = (2, taps, self.hidden_size)
                shapes[f"{name}.kernel_projection.weight"] = (2 * taps * groups, self.hidden_size)
        return shapes
