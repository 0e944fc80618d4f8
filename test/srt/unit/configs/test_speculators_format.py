"""Speculators config.json files: conversion, and error messages.

test_corrupted_checkpoints.py has missing fields and values of a wrong type.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoint_fields import GOOD, GOOD_DFLASH2, GOOD_PEAGLE, changed

from sglang_dflash.srt.configs.draft_kinds import read_draft_config
from sglang_dflash.srt.configs.fields import DraftConfigError
from sglang_dflash.srt.configs.speculators_format import normalize, verifier_of


def read(config: dict):
    return read_draft_config(SimpleNamespace(**normalize(config, "ck")), "ck")


def entries(*change, base: dict = GOOD) -> dict:
    """Return the flat config's `dflash_config`, after a change."""
    return normalize(changed(*change, base=base), "ck")["dflash_config"]


def test_options_that_the_bundled_drafts_do_not_have():
    assert entries("sliding_window_non_causal", True)["sliding_is_causal"] is False
    assert entries("sliding_window_non_causal", False, base=GOOD_DFLASH2)["sliding_is_causal"]
    assert entries("transformer_layer_config.model_type", "llama", base=GOOD_PEAGLE)["qk_norm"] is False
    assert not read(GOOD_DFLASH2).has_own_vocabulary


def test_peagle_defaults_are_the_librarys():
    """Unlike in EAGLE-3, `norm_before_residual` defaults to false."""
    bare = {key: value for key, value in GOOD_PEAGLE.items() if "norm" not in key}
    assert normalize(bare, "ck")["dflash_config"] == normalize(GOOD_PEAGLE, "ck")["dflash_config"]
    assert entries("norm_before_residual", True, base=GOOD_PEAGLE)["norm_before_residual"]


def test_rope_given_per_layer_type():
    same = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}
    place = "transformer_layer_config.rope_parameters"
    assert normalize(changed(place, same), "ck")["rope_parameters"] == {"rope_theta": 5e5}
    differing = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(DraftConfigError, match="differ between layer types"):
        normalize(changed(place, differing), "ck")


@pytest.mark.parametrize("architecture", ["PEagleDraftModel", "PEagleSpeculator", "PeagleLlamaForCausalLM"])
def test_names_of_peagle_drafts(architecture):
    config = changed("architectures", [architecture], base=GOOD_PEAGLE)
    assert normalize(config, "ck")["architectures"] == ["PEagleDraftModel"]
    del config["speculators_model_type"]
    assert normalize(config, "ck")["architectures"] == ["PEagleDraftModel"]


METHODS = "speculators_config.proposal_methods"
BAD = [
    (GOOD, "aux_hidden_state_layer_ids", [], "non-empty list"),
    (GOOD, "aux_hidden_state_layer_ids", ["2"], "aux_hidden_state_layer_ids.0 must be an integer, got '2'"),
    (GOOD, "aux_hidden_state_layer_ids", [0, 3], "id 0 is the embedding"),
    (GOOD, "block_size", 0, "block_size must be greater than or equal to 1, got 0"),
    (GOOD, METHODS, [], "proposal_methods must be a non-empty list, got []"),
    (GOOD, f"{METHODS}.0.speculative_tokens", 8, "speculative_tokens is 8, but a block_size of 8 drafts 7"),
    (GOOD, "speculators_config.algorithm", "eagle3", "speculators_model_type is 'dflash'"),
    (GOOD, "speculators_config.verifier.name_or_path", None, "verifier.name_or_path is missing"),
    (GOOD, "target_hidden_size", 512, "target_hidden_size is 512"),
    (GOOD, "speculators_model_type", "eagle3", "vLLM may serve it"),
    (GOOD, "speculators_model_type", "surprise", "not served here"),
    (GOOD, "speculators_model_type", ["dflash"], "not served here"),
    (GOOD_DFLASH2, "conv_kernel_size", 9, "longer than a block of 8"),
    (GOOD_DFLASH2, "selector_rank", None, "selector_rank"),
    (GOOD_DFLASH2, "draft_vocab_size", 1024, "draft_vocab_size is not supported"),
    (GOOD_PEAGLE, "eagle_aux_hidden_state_layer_ids", None, "eagle_aux_hidden_state_layer_ids is missing"),
    (GOOD_PEAGLE, "eagle_aux_hidden_state_layer_ids", [0, 6], "id 0 is the embedding"),
    (GOOD_PEAGLE, "eagle_aux_hidden_state_layer_ids", [6, 2], "ascending"),
    (GOOD_PEAGLE, "mask_token_id", 2048, "mask_token_id is 2048"),
    (GOOD_PEAGLE, f"{METHODS}.0.speculative_tokens", 0, "greater than or equal to 1, got 0"),
    (GOOD_PEAGLE, "transformer_layer_config.model_type", "gpt2", "model_type must be 'qwen3' or 'llama'"),
    (GOOD_PEAGLE | {"norm_before_fc": True}, "fc_norm", True, "norm_before_fc and fc_norm are both true"),
]


@pytest.mark.parametrize("base, path, value, message", BAD)
def test_bad_value_is_named(base, path, value, message):
    with pytest.raises(DraftConfigError) as error:
        read(changed(path, value, base=base))
    assert message in str(error.value) and "'ck'" in str(error.value)


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
    config = changed("draft_vocab_size", None)
    big = changed("transformer_layer_config.vocab_size", 151_936, base=config)
    assert normalize(big, "some/hub-id")["dflash_config"]["draft_vocab_size"] == 32_000
    save_file({"d2t": torch.zeros(96, dtype=torch.int64)}, tmp_path / "model.safetensors")
    assert normalize(config, str(tmp_path))["dflash_config"]["draft_vocab_size"] == 96
    save_file({"norm.weight": torch.zeros(8)}, tmp_path / "model.safetensors")
    assert normalize(config, str(tmp_path))["dflash_config"]["draft_vocab_size"] == 2048
    bare = changed("eagle_aux_hidden_state_layer_ids", None, base=GOOD_PEAGLE)
    assert normalize(bare, "ck", target_layers=24)["dflash_config"]["target_layer_ids"] == [1, 11, 20]
    assert verifier_of(bare, "ck") == "some/target"
