"""Served targets, and how SGLang is configured to capture their hidden states."""

from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
from support.families import FAMILIES

from sglang_dflash.srt.speculative.dflash_utils import validate_dflash_request
from sglang_dflash.srt.speculative.targets import kinds as target_kinds
from sglang_dflash.srt.speculative.targets.kinds import (
    VERIFIED_TARGETS,
    configure_capture,
    target_kind,
)

ALLOW_UNTESTED_VARIABLE = "SGLANG_DFLASH_ALLOW_UNTESTED_TARGET"


class Model:
    """A target that records the layers it is set to capture, per method."""

    def __init__(self):
        self.captured = {}

    def set_dflash_layers_to_capture(self, ids):
        self.captured["dflash"] = ids

    def set_eagle3_layers_to_capture(self, ids):
        self.captured["eagle3"] = ids


def configure(model, **changes):
    arguments = {
        "eagle_use_aux_hidden_state": False,
        "eagle_aux_hidden_state_layer_ids": None,
        "dflash_use_aux_hidden_state": True,
        "dflash_target_layer_ids": [1, 4],
        "is_dspark": False,
    }
    configure_capture(model=model, **{**arguments, **changes})


def test_every_verified_target_has_a_family_test():
    """A family test covers each target; test_target_layers.py has Qwen3 and Llama."""
    assert set(VERIFIED_TARGETS) == {family.architecture for family in FAMILIES.values()} | {
        "Qwen3ForCausalLM",
        "LlamaForCausalLM",
    }


@pytest.mark.parametrize("name", VERIFIED_TARGETS)
def test_sglang_has_the_capture_method_of_a_verified_target(name):
    from sglang.srt.models.registry import ModelRegistry

    assert hasattr(ModelRegistry.models[name], VERIFIED_TARGETS[name].capture)


@pytest.mark.parametrize("name, method", [("Qwen3ForCausalLM", "dflash"), ("Qwen2ForCausalLM", "eagle3")])
def test_each_target_uses_its_own_capture_method(name, method):
    model = type(name, (Model,), {})()
    configure(model)
    assert model.captured == {method: [1, 4]}


def test_nothing_of_the_draft_is_captured():
    model = type("DFlashDraftModel", (Model,), {})()
    configure(model, dflash_use_aux_hidden_state=False, dflash_target_layer_ids=None)
    assert not model.captured


def test_wrong_states_are_refused_even_if_untested_targets_are_allowed(monkeypatch):
    monkeypatch.setenv(ALLOW_UNTESTED_VARIABLE, "1")
    with pytest.raises(ValueError, match="Gemma3ForCausalLM.*without the residual"):
        target_kind(["Gemma3ForCausalLM"])


@pytest.fixture
def registry(monkeypatch):
    """SGLang's model registry, replaced by three models that are not in our list."""
    models = {
        "BothForCausalLM": Model,
        "Eagle3OnlyForCausalLM": type("Eagle3Only", (), {"set_eagle3_layers_to_capture": None}),
        "NeitherForCausalLM": object,
    }
    module = SimpleNamespace(ModelRegistry=SimpleNamespace(models=models))
    monkeypatch.setitem(__import__("sys").modules, "sglang.srt.models.registry", module)


def test_an_untested_target_is_refused_with_the_way_around(registry):
    with pytest.raises(ValueError, match=f"(?s)BothForCausalLM.*{ALLOW_UNTESTED_VARIABLE}=1"):
        target_kind(["BothForCausalLM"])


@pytest.mark.parametrize("name, method", [("BothForCausalLM", "dflash"), ("Eagle3OnlyForCausalLM", "eagle3")])
def test_an_untested_target_runs_with_a_warning(name, method, registry, monkeypatch, caplog):
    monkeypatch.setenv(ALLOW_UNTESTED_VARIABLE, "1")
    kind = target_kind([name])
    assert name in caplog.text
    assert not kind.is_verified and kind.capture == f"set_{method}_layers_to_capture"


def test_the_variable_must_be_1_or_0(registry, monkeypatch):
    monkeypatch.setenv(ALLOW_UNTESTED_VARIABLE, "yes")
    with pytest.raises(ValueError, match=f"{ALLOW_UNTESTED_VARIABLE} must be 1 or 0"):
        target_kind(["BothForCausalLM"])


@pytest.mark.parametrize("allowed", ["0", "1"])
@pytest.mark.parametrize(
    "names, words",
    [(["NeitherForCausalLM"], "captures none"), (["NoSuchModel"], "no such model"), (None, "None")],
)
def test_impossible_targets_are_refused_even_if_untested_ones_are_allowed(
    names, words, allowed, registry, monkeypatch
):
    monkeypatch.setenv(ALLOW_UNTESTED_VARIABLE, allowed)
    with pytest.raises(ValueError, match=words):
        target_kind(names)


@pytest.mark.parametrize(
    "name, is_served", [("Qwen3VLForConditionalGeneration", True), ("Gemma4ForConditionalGeneration", False)]
)
def test_images_are_refused_by_name(name, is_served):
    configure(type(name, (Model,), {})())
    request = SimpleNamespace(
        custom_logit_processor=None,
        return_hidden_states=False,
        sampling_params=SimpleNamespace(min_p=0.0, stop_token_ids=None, top_k=1),
        logprob=SimpleNamespace(top_logprobs_num=0, token_ids_logprob=None),
        multimodal_inputs=object(),
        origin_input_ids=[5, 10**9],  # SGLang gives an image's tokens ids outside the vocabulary
        vocab_size=100,
    )
    message = validate_dflash_request(request, True)
    assert message is None if is_served else name in message and "images" in message
    request.multimodal_inputs = None
    assert "1000000000" in validate_dflash_request(request, True)
    request.origin_input_ids = [5, 99]
    assert validate_dflash_request(request, True) is None


def test_a_model_that_lacks_its_method_is_named():
    with pytest.raises(ValueError, match="object has no set_dflash_layers_to_capture"):
        target_kinds.TargetKind("Qwen3ForCausalLM").capture_layers(object(), [1])
