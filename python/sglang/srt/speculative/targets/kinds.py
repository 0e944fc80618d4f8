"""Kinds of targets, by the architecture that a target's config names.

A draft reads the outputs of named target layers. Which of SGLang's layers those are is a convention of each
model's code, and a wrong one raises nothing: drafted tokens are just never accepted. `VERIFIED_TARGETS` were
compared with Hugging Face's `hidden_states[k + 1]` (test/srt/engine/test_target_families.py). Others are
served with a warning, as the output is right either way.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

from sglang_dflash.srt.patching import WORKER, patches

logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)

_DFLASH_CAPTURE = "set_dflash_layers_to_capture"
_EAGLE3_CAPTURE = "set_eagle3_layers_to_capture"

VERIFIED_TARGETS = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "LlamaForCausalLM",
    "Ministral3ForCausalLM",
    "MistralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)

# Verified targets that take the layers to capture through EAGLE-3's method. The DFLASH method of Qwen3-VL
# calls one that its text model lacks (qwen3_vl.py:1688).
_TAKES_EAGLE3 = ("Glm4MoeForCausalLM", "Qwen2ForCausalLM", "Qwen3VLForConditionalGeneration")

# By reading SGLang's code: their hooks name the input of a layer, one above its output (muse_glimmer.py:420).
_CAPTURES_INPUTS = ("MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration")

# Compared, and not the layers' outputs: nothing makes a draft work on these.
_CAPTURES_WRONG_STATES = {
    "Gemma3ForCausalLM": "its hidden states without the residual",
    "Gemma3ForConditionalGeneration": "its hidden states without the residual",
}

# Fields of a target whose embedding depends on earlier tokens. SGLang passes it those of prefills and of
# single steps alone.
_N_GRAM_FIELDS = ("use_ngram_embedding", "engram_layer_ids")


def check_embedding(config: Any) -> None:
    """Raise ValueError if a target embeds n-grams, by its Hugging Face config."""
    if fields := [field for field in _N_GRAM_FIELDS if getattr(config, field, None)]:
        name = next(iter(config.architectures or ()), None)
        raise ValueError(f"DFLASH cannot serve {name} with {fields[0]}: a verify would embed other n-grams.")


def find_capture_method(architectures: Sequence[str] | None) -> str:
    """Return the method that takes the layers to capture of a target.

    A target that was not compared is served with a warning.

    Args:
        architectures: of the target's config. None: it names none.

    Raises:
        ValueError: The target cannot be served.
    """
    name = str(next(iter(architectures or ()), None))
    if name in VERIFIED_TARGETS:
        return _EAGLE3_CAPTURE if name in _TAKES_EAGLE3 else _DFLASH_CAPTURE
    from sglang.srt.models.registry import ModelRegistry  # imports every model, so not at the top

    model_class = ModelRegistry.models.get(name)
    captures = [method for method in (_DFLASH_CAPTURE, _EAGLE3_CAPTURE) if hasattr(model_class, method)]
    if name in _CAPTURES_WRONG_STATES:
        captured = _CAPTURES_WRONG_STATES[name]
        problem = f"a draft reads outputs of target layers, but SGLang captures {captured}"
    elif model_class is None:
        problem = "SGLang has no such model, or could not import it on this machine"
    elif not captures:
        problem = "a draft reads its target's hidden states, and SGLang captures none"
    elif not hasattr(model_class, "get_input_embeddings"):
        problem = "a draft borrows the target's embedding, and it lends none"
    else:
        _warn_once(
            "DFLASH has not been tested on %s: if few drafted tokens are accepted, SGLang captures other "
            "hidden states than the draft reads.",
            name,
        )
        return captures[0]
    raise ValueError(f"DFLASH cannot serve {name}: {problem}.")


@patches(
    "sglang.srt.model_executor.model_runner.configure_aux_hidden_state_capture",
    at=WORKER,
    signature="(model, eagle_use_aux_hidden_state, eagle_aux_hidden_state_layer_ids, "
    "dflash_use_aux_hidden_state, dflash_target_layer_ids, is_dspark)",
    feature="targets that capture hidden states through EAGLE-3's interface only",
    upstream="docs/dev/upstream/plugin-doors.md",
)
def configure_capture(
    *,
    model: Any,
    eagle_use_aux_hidden_state: bool,
    eagle_aux_hidden_state_layer_ids: Any,
    dflash_use_aux_hidden_state: bool,
    dflash_target_layer_ids: Any,
    is_dspark: bool,
) -> None:
    """Tell a target which layers to capture, if need be by EAGLE-3's interface.

    SGLang calls one method on every target. It runs on the draft's model too, from which nothing is captured.
    """
    if not dflash_use_aux_hidden_state:
        return
    name = type(model).__name__
    method = find_capture_method([name])
    if not hasattr(model, method):
        raise ValueError(f"DFLASH needs hidden states of the target, and {name} has no {method}.")
    getattr(model, method)([layer_id + (name in _CAPTURES_INPUTS) for layer_id in dflash_target_layer_ids])
