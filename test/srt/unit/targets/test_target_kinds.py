"""Served targets, and how SGLang is configured to capture their hidden states."""

from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
from support.families import FAMILIES

from sglang_dflash.srt.hardware_backend.cpu.arguments import check_runs_on_cpu
from sglang_dflash.srt.speculative.targets import kinds as target_kinds
from sglang_dflash.srt.speculative.targets.kinds import (
    VERIFIED_TARGETS,
    check_embedding,
    configure_capture,
    find_capture_method,
)
from sglang_dflash.srt.speculative.targets.recurrent import check_states_are_committed


class Model:
    """A target that records the layers it is set to capture, per method."""

    def __init__(self):
        self.captured = {}

    def set_dflash_layers_to_capture(self, ids):
        self.captured["dflash"] = ids

    def set_eagle3_layers_to_capture(self, ids):
        self.captured["eagle3"] = ids

    def get_input_embeddings(self):
        """Lent to the draft."""


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
    assert set(VERIFIED_TARGETS) == {family.architecture for family in FAMILIES.values()}


def test_nothing_of_the_draft_is_captured():
    model = type("DFlashDraftModel", (Model,), {})()
    configure(model, dflash_use_aux_hidden_state=False, dflash_target_layer_ids=None)
    assert not model.captured


def test_wrong_states_are_refused():
    with pytest.raises(ValueError, match="Gemma3ForCausalLM.*without the residual"):
        find_capture_method(["Gemma3ForCausalLM"])


@pytest.fixture
def registry(monkeypatch):
    """SGLang's model registry, replaced by models that are not in our list."""
    models = {
        "BothForCausalLM": Model,
        "Eagle3OnlyForCausalLM": type(
            "Eagle3Only", (), {"set_eagle3_layers_to_capture": None, "get_input_embeddings": None}
        ),
        "NeitherForCausalLM": type("Neither", (), {"get_input_embeddings": None}),
        "KeepsForCausalLM": type("Keeps", (), {"set_dflash_layers_to_capture": None}),
    }
    module = SimpleNamespace(ModelRegistry=SimpleNamespace(models=models))
    monkeypatch.setitem(__import__("sys").modules, "sglang.srt.models.registry", module)


@pytest.mark.parametrize("field, value", [("use_ngram_embedding", True), ("engram_layer_ids", [1])])
def test_embeddings_of_several_tokens_are_refused(field, value):
    config = SimpleNamespace(architectures=["LongcatFlashForCausalLM"], use_ngram_embedding=False)
    check_embedding(config)
    setattr(config, field, value)
    with pytest.raises(ValueError, match=f"LongcatFlashForCausalLM with {field}"):
        check_embedding(config)


@pytest.mark.parametrize("name, method", [("BothForCausalLM", "dflash"), ("Eagle3OnlyForCausalLM", "eagle3")])
def test_a_target_that_nobody_compared_is_served_with_one_warning(name, method, registry, caplog):
    target_kinds._warn_once.cache_clear()
    assert [find_capture_method([name]) for _ in range(2)] == [f"set_{method}_layers_to_capture"] * 2
    assert [name in record.getMessage() for record in caplog.records] == [True]


def test_a_target_that_names_inputs_gets_the_ids_of_inputs(monkeypatch):
    """SGLang adds the one for DFlash2 and Muse drafts alone."""
    from sglang.srt.models.registry import ModelRegistry

    name = "MuseGlimmerForCausalLM"
    assert hasattr(ModelRegistry.models[name], "set_dflash_layers_to_capture")
    model = type(name, (Model,), {})()
    configure(model)
    assert model.captured == {"dflash": [2, 5]}


@pytest.mark.parametrize(
    "names, words",
    [
        (["NeitherForCausalLM"], "captures none"),
        (["KeepsForCausalLM"], "lends none"),
        (["NoSuchModel"], "no such model"),
        (None, "None"),
    ],
)
def test_impossible_targets_are_refused(names, words, registry):
    with pytest.raises(ValueError, match=words):
        find_capture_method(names)


def test_a_model_that_lacks_its_method_is_named():
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no set_dflash_layers_to_capture"):
        configure(type("Qwen3ForCausalLM", (), {})())


class BackendWithoutCommit:
    """A hybrid attention backend of a plugin, which verifies no blocks."""


def test_a_backend_that_cannot_commit_states_is_refused():
    """The launcher knows it by the model's registration."""
    committing = "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend"
    hf_config = SimpleNamespace(architectures=["PluginForCausalLM"])

    def model_config(registered):
        result = registered and (SimpleNamespace(hybrid_backend_class_name=registered[0]), hf_config)
        return SimpleNamespace(hf_config=hf_config, linear_attn_registry_result=result)

    for registered in (None, [None], [committing]):
        check_states_are_committed(model_config(registered))
    with pytest.raises(ValueError, match="PluginForCausalLM: its attention backend .*BackendWithoutCommit"):
        check_states_are_committed(model_config([f"{__name__}.BackendWithoutCommit"]))


def test_what_a_cpu_has_no_kernels_for_is_refused():
    """SGLang's own config classes decide; the message has the model's name."""
    from sglang.srt import configs
    from transformers import Qwen3Config

    def check(config, name="AnyForCausalLM", **arguments):
        config.architectures = [name]
        off = {"disaggregation_mode": "null", "enable_hierarchical_cache": False}
        off |= {"enable_torch_compile": False, "enable_return_routed_experts": False}
        off |= {"speculative_algorithm": None}
        model_config = SimpleNamespace(
            hf_config=config, linear_attn_registry_result=None, is_draft_model=False
        )
        check_runs_on_cpu(SimpleNamespace(**off | arguments), model_config)

    qwen3_5 = configs.Qwen3_5Config(), configs.Qwen3_5MoeConfig()
    for config in (Qwen3Config(), *qwen3_5, *(config.text_config for config in qwen3_5)):
        check(config)
    for name in ("Lfm2Config", "Lfm2MoeConfig", "NemotronHConfig", "Qwen3NextConfig"):
        with pytest.raises(ValueError, match="on a CPU: SomeForCausalLM, because of its recurrent layers"):
            check(getattr(configs, name)(), "SomeForCausalLM")
    for arguments in ({"disaggregation_mode": "decode"}, {"enable_hierarchical_cache": True}):
        with pytest.raises(ValueError, match="on a CPU: .*--" + next(iter(arguments)).split("_")[0]):
            check(Qwen3Config(), **arguments)
    check(Qwen3Config(), enable_torch_compile=True)
    with pytest.raises(ValueError, match="--enable-torch-compile: on a CPU, .* without a draft only"):
        check(Qwen3Config(), enable_torch_compile=True, speculative_algorithm="dflash")
