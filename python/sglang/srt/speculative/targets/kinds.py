"""What a kind of target needs of DFLASH: chosen once at start-up, by the architecture its config names.

A draft reads outputs of named target layers. Which of SGLang's layers those are is a convention of each
model's code, and a wrong one raises nothing: drafts are just never kept. So a target is served where its
capture was held against Hugging Face's `hidden_states[k + 1]` (test/srt/test_target_families.py), and refused
elsewhere."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash.srt.environ import is_on

logger = logging.getLogger(__name__)

ALLOW_UNTESTED_VARIABLE = "SGLANG_DFLASH_ALLOW_UNTESTED_TARGET"

_DFLASH_CAPTURE = "set_dflash_layers_to_capture"
_EAGLE3_CAPTURE = "set_eagle3_layers_to_capture"


@dataclass(frozen=True, slots=True)
class TargetKind:
    """One implementation of a target in SGLang.

    capture: the model's method that is told which layers to capture, given 0-based ids of layer outputs.
    is_measured: whether what it then captures has been held against a reference.
    takes_images: whether requests with images, videos or audio are served; they are refused elsewhere.
    """

    architecture: str
    capture: str = _DFLASH_CAPTURE
    is_measured: bool = True
    takes_images: bool = False

    def capture_layers(self, model: Any, layer_ids: Sequence[int]) -> None:
        """Have `model` return the outputs of these layers beside its logits. Raises ValueError if it
        cannot."""
        method = getattr(model, self.capture, None)
        if method is None:
            raise ValueError(
                f"DFLASH needs hidden states of the target, and {type(model).__name__} has no {self.capture}."
            )
        method(list(layer_ids))


MEASURED = {
    kind.architecture: kind
    for kind in (
        TargetKind("DeepseekV2ForCausalLM"),
        TargetKind("DeepseekV3ForCausalLM"),
        TargetKind("Gemma4ForCausalLM"),
        TargetKind("Gemma4ForConditionalGeneration"),
        TargetKind("Glm4MoeForCausalLM", capture=_EAGLE3_CAPTURE),
        TargetKind("GptOssForCausalLM"),
        TargetKind("LlamaForCausalLM"),
        TargetKind("Ministral3ForCausalLM"),
        TargetKind("MistralForCausalLM"),
        TargetKind("Phi3ForCausalLM"),
        TargetKind("Qwen2ForCausalLM", capture=_EAGLE3_CAPTURE),
        TargetKind("Qwen3ForCausalLM"),
        TargetKind("Qwen3_5ForCausalLM"),
        TargetKind("Qwen3_5ForConditionalGeneration"),
        TargetKind("Qwen3_5MoeForConditionalGeneration"),
        TargetKind("Qwen3MoeForCausalLM"),
        # Its DFLASH method calls one that its text model lacks (qwen3_vl.py:1688).
        TargetKind("Qwen3VLForConditionalGeneration", capture=_EAGLE3_CAPTURE, takes_images=True),
        TargetKind("Qwen3VLMoeForConditionalGeneration", takes_images=True),
    )
}

# Measured, and not the layers' outputs: nothing makes a draft work on these.
_CAPTURES_WRONG_STATES = {
    "Gemma3ForCausalLM": "its hidden states without the residual",
    "Gemma3ForConditionalGeneration": "its hidden states without the residual",
}


def target_kind(architectures: Sequence[str] | None) -> TargetKind:
    """The kind of a target whose config names these architectures. Raises ValueError for one that cannot be
    served, and, unless SGLANG_DFLASH_ALLOW_UNTESTED_TARGET is 1, for one whose captured states nobody has
    checked."""
    name = next(iter(architectures or ()), None)
    if name in MEASURED:
        return MEASURED[name]
    if name in _CAPTURES_WRONG_STATES:
        raise ValueError(
            f"DFLASH cannot serve {name}: a draft reads outputs of target layers, and of this target SGLang captures "
            f"{_CAPTURES_WRONG_STATES[name]}."
        )
    capture = _capture_method(name)
    if not is_on(ALLOW_UNTESTED_VARIABLE):
        raise ValueError(
            f"DFLASH has not been tested on {name}: whether the hidden states SGLang captures of it are the layer outputs a "
            f"draft reads is not known. Output would be right either way, drafts perhaps never kept. {ALLOW_UNTESTED_VARIABLE}=1 "
            f"serves it; tested are {', '.join(sorted(MEASURED))}."
        )
    logger.warning(
        "DFLASH has not been tested on %s: if few drafts are kept, SGLang captures other hidden states of it than the draft reads.",
        name,
    )
    return TargetKind(name, capture=capture, is_measured=False)


def _capture_method(name: str | None) -> str:
    """How SGLang's class of this name is told what to capture. Raises ValueError for one that cannot, or is
    not there."""
    from sglang.srt.models.registry import (
        ModelRegistry,
    )  # imports every model there is, so only where nothing else helps

    model_class = ModelRegistry.models.get(name)
    if model_class is None:
        raise ValueError(
            f"DFLASH cannot serve {name}: SGLang has no such model, or could not import it on this machine."
        )
    found = next(
        (method for method in (_DFLASH_CAPTURE, _EAGLE3_CAPTURE) if hasattr(model_class, method)), None
    )
    if found is None:
        raise ValueError(
            f"DFLASH cannot serve {name}: a draft reads hidden states of its target, and SGLang captures none of it."
        )
    return found


def configure_capture(
    *,
    model: Any,
    eagle_use_aux_hidden_state: bool,
    eagle_aux_hidden_state_layer_ids: Any,
    dflash_use_aux_hidden_state: bool,
    dflash_target_layer_ids: Sequence[int] | None,
    is_dspark: bool,
) -> None:
    """In the place of SGLang's `configure_aux_hidden_state_capture`, which calls one method on every target.
    Runs on the draft's model too, of which nothing is captured."""
    global _served
    if dflash_use_aux_hidden_state:
        _served = target_kind([type(model).__name__])
        _served.capture_layers(model, dflash_target_layer_ids)


# A scheduler process serves one target.
_served: TargetKind | None = None


def served_kind() -> TargetKind:
    """The kind of this process's target, which its capture was configured for."""
    assert _served is not None, "no target has been set up in this process"
    return _served
