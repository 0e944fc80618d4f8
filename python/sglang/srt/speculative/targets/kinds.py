"""Kinds of targets, by the architecture that a target's config names.

A draft reads the outputs of named target layers. Which of SGLang's layers those are is a convention of each
model's code, and a wrong one raises nothing: drafted tokens are just never accepted. `VERIFIED_TARGETS` were
compared with Hugging Face's `hidden_states[k + 1]` (test/srt/engine/test_target_families.py). Others are
served with a warning, as the output is right either way.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

_DFLASH_CAPTURE = "set_dflash_layers_to_capture"
_EAGLE3_CAPTURE = "set_eagle3_layers_to_capture"


@dataclass(frozen=True, slots=True)
class TargetKind:
    """One implementation of a target in SGLang.

    Attributes:
        capture: the model's method that takes the layers to capture, as 0-based ids of layer outputs.
        is_verified: whether the captured states have been compared with a reference.
        offset: added to the ids, for a model that captures the input of the layer it is given.
    """

    architecture: str
    capture: str = _DFLASH_CAPTURE
    is_verified: bool = True
    offset: int = 0

    def capture_layers(self, model: Any, layer_ids: Sequence[int]) -> None:
        """Make `model` return these layers' outputs too. Raises ValueError if it cannot."""
        if not hasattr(model, self.capture):
            raise ValueError(
                f"DFLASH needs hidden states of the target, and {type(model).__name__} has no {self.capture}."
            )
        getattr(model, self.capture)([layer_id + self.offset for layer_id in layer_ids])


VERIFIED_TARGETS = {
    kind.architecture: kind
    for kind in (
        TargetKind("DeepseekV2ForCausalLM"),
        TargetKind("DeepseekV3ForCausalLM"),
        TargetKind("Gemma4ForCausalLM"),
        TargetKind("Gemma4ForConditionalGeneration"),
        TargetKind("Glm4MoeForCausalLM", capture=_EAGLE3_CAPTURE),
        TargetKind("GptOssForCausalLM"),
        TargetKind("Lfm2ForCausalLM"),
        TargetKind("Lfm2MoeForCausalLM"),
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
        TargetKind("Qwen3NextForCausalLM"),
        # Its DFLASH method calls one that its text model lacks (qwen3_vl.py:1688).
        TargetKind("Qwen3VLForConditionalGeneration", capture=_EAGLE3_CAPTURE),
        TargetKind("Qwen3VLMoeForConditionalGeneration"),
    )
}

# By reading SGLang's code: their hooks name the input of a layer (muse_glimmer.py:420).
_OFFSETS = {"MuseGlimmerForCausalLM": 1, "MuseGlimmerForConditionalGeneration": 1}

# Compared, and not the layers' outputs: nothing makes a draft work on these.
_CAPTURES_WRONG_STATES = {
    "Gemma3ForCausalLM": "its hidden states without the residual",
    "Gemma3ForConditionalGeneration": "its hidden states without the residual",
}


def target_kind(architectures: Sequence[str] | None) -> TargetKind:
    """Return the kind of a target whose config names these architectures.

    Raises ValueError for a target that cannot be served. One that was not compared is, with a warning.
    """
    name = str(next(iter(architectures or ()), None))
    if name in VERIFIED_TARGETS:
        return VERIFIED_TARGETS[name]
    if name in _CAPTURES_WRONG_STATES:
        raise ValueError(
            f"DFLASH cannot serve {name}: a draft reads outputs of target layers, but SGLang captures "
            f"{_CAPTURES_WRONG_STATES[name]}."
        )
    capture = _find_capture_method(name)
    _warn_not_compared(name)
    return TargetKind(name, capture=capture, is_verified=False, offset=_OFFSETS.get(name, 0))


@functools.cache
def _warn_not_compared(name: str) -> None:
    logger.warning(
        "DFLASH has not been tested on %s: if few drafted tokens are accepted, SGLang captures other hidden "
        "states than the draft reads.",
        name,
    )


def _find_capture_method(name: str) -> str:
    """Return the method by which SGLang's class of this name is told what to capture.

    Raises ValueError if there is no such class or method, or if it does not lend its embedding.
    """
    from sglang.srt.models.registry import ModelRegistry  # imports every model, so not at the top

    if name not in ModelRegistry.models:
        raise ValueError(
            f"DFLASH cannot serve {name}: SGLang has no such model, or could not import it on this machine."
        )
    model_class = ModelRegistry.models[name]
    captures = [method for method in (_DFLASH_CAPTURE, _EAGLE3_CAPTURE) if hasattr(model_class, method)]
    if not captures:
        raise ValueError(
            f"DFLASH cannot serve {name}: a draft reads its target's hidden states, and SGLang captures none."
        )
    if not hasattr(model_class, "get_input_embeddings"):
        raise ValueError(
            f"DFLASH cannot serve {name}: a draft borrows the target's embedding, and it lends none."
        )
    return captures[0]


def configure_capture(
    *,
    model: Any,
    eagle_use_aux_hidden_state: bool,
    eagle_aux_hidden_state_layer_ids: Any,
    dflash_use_aux_hidden_state: bool,
    dflash_target_layer_ids: Any,
    is_dspark: bool,
) -> None:
    """Replace SGLang's `configure_aux_hidden_state_capture`.

    SGLang calls one method on every target. It runs on the draft's model too, from which nothing is captured.
    """
    if dflash_use_aux_hidden_state:
        target_kind([type(model).__name__]).capture_layers(model, dflash_target_layer_ids)
