"""Speculators config.json files: conversion, and error messages."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.checkpoint_fields import GOOD, GOOD_DFLASH2, GOOD_PEAGLE, changed

from sglang_dflash.srt.configs.draft_kinds import DFlash2DraftConfig, read_draft_config
from sglang_dflash.srt.configs.fields import DraftConfigError
from sglang_dflash.srt.configs.speculators_format import (
    SERVED_TYPES,
    normalize,
    speculators_ids_to_layer_outputs,
    verifier_of,
)


def test_good_config_becomes_a_flat_one():
    flat = normalize(GOOD, "ck")
    assert flat["architectures"] == ["DFlashDraftModel"]
    assert flat["hidden_size"] == 256 and flat["num_hidden_layers"] == 2 and flat["block_size"] == 8
    assert flat["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert flat["dflash_config"] == {
        "mask_token_id": 3,
        "target_layer_ids": [1, 4, 7, 10],
        "input_embedding_scale": 1.0,
        "draft_vocab_size": 1024,
        "sample_from_anchor": False,
        "speculative_tokens": 7,
        "sliding_is_causal": True,
        "window_from_anchor": True,
    }
    assert verifier_of(GOOD, "ck") == "some/target"


def test_a_dflash2_config_becomes_a_flat_one():
    """Options of convolutions and selector are at the top; sliding layers see their whole block."""
    flat = normalize(GOOD_DFLASH2, "ck")
    assert flat["architectures"] == ["DFlash2DraftModel"]
    assert not flat["dflash_config"]["sliding_is_causal"] and flat["dflash_config"]["window_from_anchor"]
    draft = read_draft_config(SimpleNamespace(**flat), "ck")
    assert isinstance(draft, DFlash2DraftConfig) and not draft.has_own_vocabulary
    assert (draft.conv_kernel_size, draft.conv_group_size) == (2, 16)
    assert (draft.selector_rank, draft.selector_top_k) == (32, 8)
    causal = changed("sliding_window_non_causal", False, base=GOOD_DFLASH2)
    assert normalize(causal, "ck")["dflash_config"]["sliding_is_causal"]


@pytest.mark.parametrize(
    "path, value, words",
    [
        ("conv_kernel_size", 9, "longer than a block of 8"),
        ("selector_rank", None, "selector_rank"),
        ("speculators_config.algorithm", "dflash", "speculators_model_type is 'dflash2'"),
    ],
)
def test_what_a_dflash2_config_may_not_say(path, value, words):
    with pytest.raises(DraftConfigError, match=words):
        normalize(changed(path, value, base=GOOD_DFLASH2), "ck")


def test_a_selector_over_a_reduced_vocabulary():
    flat = normalize(changed("draft_vocab_size", 1024, base=GOOD_DFLASH2), "ck")
    with pytest.raises(DraftConfigError, match="draft_vocab_size is not supported"):
        read_draft_config(SimpleNamespace(**flat), "ck")


def test_layer_inputs_become_layer_outputs():
    """Input of layer i is the output of layer i - 1."""
    assert speculators_ids_to_layer_outputs([1, 2, 12]) == [0, 1, 11]


def test_non_causal_sliding_layers():
    assert (
        normalize(changed("sliding_window_non_causal", True), "ck")["dflash_config"]["sliding_is_causal"]
        is False
    )


def test_rope_given_per_layer_type():
    same = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}
    assert normalize(changed("transformer_layer_config.rope_parameters", same), "ck")["rope_parameters"] == {
        "rope_theta": 5e5
    }
    differing = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(DraftConfigError, match="differ between layer types"):
        normalize(changed("transformer_layer_config.rope_parameters", differing), "ck")


REQUIRED = (
    "aux_hidden_state_layer_ids",
    "block_size",
    "mask_token_id",
    "speculators_config",
    "speculators_config.algorithm",
    "speculators_config.proposal_methods",
    "speculators_config.verifier",
    "speculators_config.verifier.name_or_path",
    "transformer_layer_config",
    "transformer_layer_config.hidden_size",
    "transformer_layer_config.num_hidden_layers",
    "transformer_layer_config.vocab_size",
)


@pytest.mark.parametrize("path", REQUIRED)
def test_missing_field_is_named(path):
    with pytest.raises(DraftConfigError, match=f"{path.replace('.', '[.]')} is missing"):
        normalize(changed(path, remove=True), "ck")


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("aux_hidden_state_layer_ids", [], "non-empty list"),
        ("aux_hidden_state_layer_ids", ["2"], "aux_hidden_state_layer_ids.0 must be an integer, got '2'"),
        ("aux_hidden_state_layer_ids", [0, 3], "id 0 is the embedding"),
        ("block_size", "8", "block_size must be an integer"),
        ("block_size", 0, "block_size must be greater than or equal to 1, got 0"),
        ("mask_token_id", True, "mask_token_id must be an integer"),
        ("speculators_config.proposal_methods", [], "proposal_methods must be a non-empty list, got []"),
        ("speculators_config.proposal_methods.0.speculative_tokens", 8, "drafts 7"),
        ("speculators_config.algorithm", "eagle3", "speculators_model_type is 'dflash'"),
        ("target_hidden_size", 512, "target_hidden_size is 512"),
        ("speculators_model_type", "eagle3", "vLLM may serve it"),
        ("speculators_model_type", "surprise", "not served here"),
        ("speculators_model_type", ["dflash"], "not served here"),
    ],
)
def test_bad_value_is_named(path, value, message):
    with pytest.raises(DraftConfigError) as error:
        normalize(changed(path, value), "ck")
    assert message in str(error.value) and "'ck'" in str(error.value)


def test_good_peagle_config_becomes_a_flat_one():
    """Ids are shifted as for DFlash, and K drafted tokens make a block of K + 1."""
    flat = normalize(GOOD_PEAGLE, "ck")
    assert flat["architectures"] == ["PEagleDraftModel"] and flat["block_size"] == 8
    assert flat["dflash_config"] == {
        "mask_token_id": 3,
        "target_layer_ids": [1, 5, 8],
        "input_embedding_scale": 1.0,
        "draft_vocab_size": 1024,
        "speculative_tokens": 7,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "qk_norm": True,
    }


def test_peagle_defaults_are_the_librarys():
    """Unlike in EAGLE-3, `norm_before_residual` defaults to false.

    A wrong default silently costs acceptance.
    """
    bare = {key: value for key, value in GOOD_PEAGLE.items() if "norm" not in key}
    settings = normalize(bare, "ck")["dflash_config"]
    assert [settings[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm")] == [False] * 3
    assert normalize(changed("norm_before_residual", True, base=GOOD_PEAGLE), "ck")["dflash_config"][
        "norm_before_residual"
    ]


def test_peagle_layers_in_llama_style():
    config = changed("transformer_layer_config.model_type", "llama", base=GOOD_PEAGLE)
    assert normalize(config, "ck")["dflash_config"]["qk_norm"] is False


@pytest.mark.parametrize("architecture", ["PEagleDraftModel", "PEagleSpeculator", "PeagleLlamaForCausalLM"])
def test_names_of_peagle_drafts(architecture):
    config = changed("architectures", [architecture], base=GOOD_PEAGLE)
    assert normalize(config, "ck")["architectures"] == ["PEagleDraftModel"]
    del config["speculators_model_type"]
    assert normalize(config, "ck")["architectures"] == ["PEagleDraftModel"]


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("eagle_aux_hidden_state_layer_ids", None, "eagle_aux_hidden_state_layer_ids is missing"),
        ("eagle_aux_hidden_state_layer_ids", [0, 6], "id 0 is the embedding"),
        ("eagle_aux_hidden_state_layer_ids", [2, True], "layer_ids.1 must be an integer, got True"),
        ("mask_token_id", None, "mask_token_id is missing"),
        ("mask_token_id", "3", "mask_token_id must be an integer"),
        ("norm_before_residual", 1, "norm_before_residual must be true or false"),
        ("speculators_config.algorithm", "eagle3", "speculators_model_type is 'peagle'"),
        (
            "speculators_config.proposal_methods.0.speculative_tokens",
            0,
            "speculative_tokens must be greater than or equal to 1, got 0",
        ),
        ("transformer_layer_config.model_type", "gpt2", "model_type must be 'qwen3' or 'llama', got 'gpt2'"),
        ("target_hidden_size", 512, "target_hidden_size is 512"),
    ],
)
def test_bad_peagle_value_is_named(path, value, message):
    with pytest.raises(DraftConfigError) as error:
        normalize(changed(path, value, base=GOOD_PEAGLE), "ck")
    assert message in str(error.value)


def test_peagle_norms_that_exclude_each_other():
    config = changed("fc_norm", True, base=changed("norm_before_fc", True, base=GOOD_PEAGLE))
    with pytest.raises(DraftConfigError, match="norm_before_fc and fc_norm are both true"):
        normalize(config, "ck")


def test_all_problems_come_at_once():
    config = changed("block_size", remove=True)
    del config["mask_token_id"]
    config["speculators_config"]["proposal_methods"] = []
    with pytest.raises(DraftConfigError) as error:
        normalize(config, "ck")
    assert len(error.value.problems) == 3


@pytest.mark.parametrize("default, tokens", [("greedy", 7), ("sampled", 5), ("absent", 3), (None, 3)])
@pytest.mark.parametrize("base", [GOOD, GOOD_PEAGLE], ids=["dflash", "peagle"])
def test_the_default_proposal_method_says_how_much_is_drafted(base, default, tokens):
    """The first one, if the default is not among them."""
    methods = [("tree", 3), ("greedy", 7), ("sampled", 5)]
    config = changed("speculators_config.default_proposal_method", default, base=base)
    config["speculators_config"]["proposal_methods"] = [
        {"proposal_type": kind, "speculative_tokens": number} for kind, number in methods
    ]
    assert normalize(config, "ck")["dflash_config"]["speculative_tokens"] == tokens


def test_the_library_s_defaults(tmp_path):
    """Without draft_vocab_size: the file's rows if they are here. Without layers: EAGLE-3's."""
    for config in (changed("draft_vocab_size", remove=True), changed("draft_vocab_size", None)):
        big = changed("transformer_layer_config.vocab_size", 151_936, base=config)
        assert normalize(big, "some/hub-id")["dflash_config"]["draft_vocab_size"] == 32_000
        save_file({"d2t": torch.zeros(96, dtype=torch.int64)}, tmp_path / "model.safetensors")
        assert normalize(config, str(tmp_path))["dflash_config"]["draft_vocab_size"] == 96
        save_file({"norm.weight": torch.zeros(8)}, tmp_path / "model.safetensors")
        assert normalize(config, str(tmp_path))["dflash_config"]["draft_vocab_size"] == 2048
    bare = changed("eagle_aux_hidden_state_layer_ids", None, base=GOOD_PEAGLE)
    assert normalize(bare, "ck", target_layers=24)["dflash_config"]["target_layer_ids"] == [1, 11, 20]
    with pytest.raises(DraftConfigError, match="eagle_aux_hidden_state_layer_ids is missing"):
        normalize(bare, "ck")
    assert verifier_of(bare, "ck") == "some/target"


def test_served_types():
    assert SERVED_TYPES == ("dflash", "dflash2", "peagle")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 5000) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
PATHS = [path for path in REQUIRED] + [
    "sample_from_anchor",
    "sliding_window_non_causal",
    "speculators_config.default_proposal_method",
    "speculators_config.proposal_methods.0.speculative_tokens",
    "target_hidden_size",
    "transformer_layer_config.rope_parameters",
]


@given(st.lists(st.tuples(st.sampled_from(PATHS), JSON), min_size=1, max_size=3))
def test_any_json_is_converted_or_refused_by_name(changes):
    """Any config is converted, or refused with the names of its faulty fields."""
    config = copy.deepcopy(GOOD)
    for path, value in changes:
        *parents, last = path.split(".")
        owner = config
        for key in parents:
            owner = (
                owner[int(key)]
                if isinstance(owner, list) and owner and key.isdigit()
                else (owner.get(key) if isinstance(owner, dict) else None)
            )
        if isinstance(owner, dict):
            owner[last] = value
    try:
        flat = normalize(json.loads(json.dumps(config)), "ck")
    except DraftConfigError as error:
        assert error.problems
    else:
        assert flat["dflash_config"]["target_layer_ids"]
