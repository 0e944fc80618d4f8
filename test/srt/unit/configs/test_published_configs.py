"""Configs as publishers write them: each is read, refused by name, or told.

The table is golden/published_configs.toml. No weights are read.
"""

import re

import published_drafts
import pytest
from published_drafts import CASES, TABLE, config_of, merged

from sglang_dflash.srt.configs import draft_formats, unsupported
from sglang_dflash.srt.configs.draft_kinds import config_class

OUTCOMES = ("read", "falls_back", "refused")


def read(config: dict, checkpoint: str) -> tuple[str, str]:
    """Return what start-up makes of a config, and the kind of the draft or the reason."""
    outcome, found = published_drafts.read(config, checkpoint)
    return outcome, found.kind if outcome == "read" else found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["by"])
def test_a_published_config(case, tmp_path):
    config = config_of(case)
    [expected] = [outcome for outcome in OUTCOMES if outcome in case]
    outcome, said = read(config, str(tmp_path))
    assert outcome == expected and re.search(case[expected], said, re.DOTALL), said
    assert expected != "read" or sorted(draft_formats.unread_fields(config)) == case.get("told", [])


def test_the_page_lists_what_the_readers_do(tmp_path):
    """The list of drafts is the table's, with the block size that the table expects."""
    _, shown, _ = published_drafts.parts(published_drafts.PAGE.read_text())
    assert shown.strip() == published_drafts.drafts_list().strip(), (
        "run python tools/published_drafts.py --write"
    )
    listed = [case for case in CASES if "page" in case]
    assert len(listed) > 20 and len({case["page"] for case in listed} - {*TABLE["unseen"]}) == len(listed)
    for case in listed:
        outcome, draft = published_drafts.read(config_of(case), str(tmp_path))
        if outcome == "read":
            assert draft.speculative_tokens + 1 == case["block"], case["page"]


def test_the_table_holds_every_publisher_and_outcome():
    assert len(CASES) >= 60 and len({case["by"] for case in CASES}) == len(CASES)
    for publisher in ("z-lab", "SpecForge", "ModelOpt", "RedHatAI", "vLLM", "LMSYS", "fork", "community"):
        assert any(publisher in case["by"] for case in CASES), publisher
    assert {outcome for case in CASES for outcome in OUTCOMES if outcome in case} == set(OUTCOMES)


OTHER_TYPES = ("several", 7.5, 3, True, [], ["gqa", 1], {"a": 1})
BOTH_PLACES = ({}, {"dflash_config": {}})


@pytest.mark.parametrize("name", unsupported.FIELDS)
@pytest.mark.parametrize("place", ["", "dflash_config."])
def test_values_of_a_field_that_are_not_read_are_named(name, place, tmp_path):
    """Every field of the table, with its own values, null, and values of other types, in both places."""
    field = unsupported.FIELDS[name]
    name = f"{name}option" if name.endswith("_") else name
    for value in (None, *field.read, *OTHER_TYPES):
        listed = [value] * 5 if field.is_list and value in field.read else value
        change = {"dflash_config": {name: listed}} if place else {name: listed}
        outcome, said = read(merged(TABLE["base"]["dflash"], change), str(tmp_path))
        is_read = listed is None or listed == [] and field.is_list
        is_read = is_read or any(type(value) is type(known) and value == known for known in field.read)
        assert (outcome == "read") == is_read, (value, said)
        if not is_read:
            assert f"{place}{name} is {unsupported.short_repr(listed)}: " in said and field.words in said


# Fields that a draft's class or its layers read: base -> place -> names.
TYPED = {
    "dflash": {
        "": ("hidden_size", "block_size", "rms_norm_eps", "layer_types", "rope_theta", "attention_bias"),
        "dflash_config": (
            *("mask_token_id", "target_layer_ids", "use_swa", "swa_window_size", "is_causal", "causal"),
            *("input_embedding_scale", "output_multiplier", "has_own_lm_head"),
        ),
    },
    "dflash2": {"dflash_config": ("conv_kernel_size", "selector_rank", "selector_vocab_size")},
    "library": {
        "": ("block_size", "draft_vocab_size", "mask_token_id", "sample_from_anchor", "speculators_config"),
        "transformer_layer_config": ("hidden_size", "sliding_window", "rope_parameters"),
    },
    "peagle": {
        "": ("hidden_size", "mask_token_id", "num_depths", "mlp_bias", "target_hidden_size"),
        "eagle_config": ("norm_before_fc", "layer_ids"),
    },
}
PLACES = [(base, place, name) for base in TYPED for place, names in TYPED[base].items() for name in names]


@pytest.mark.parametrize("base, place, name", PLACES)
def test_a_value_of_another_type_is_refused_by_name(base, place, name, tmp_path):
    change = {place: {name: [{}]}} if place else {name: [{}]}
    config = merged(TABLE["base"][base], change)
    if name == "layer_ids":
        del config["eagle_aux_hidden_state_layer_ids"]
    outcome, said = read({"mask_token_id": 9} | config, str(tmp_path))
    name = "eagle_aux_hidden_state_layer_ids" if name == "layer_ids" else name
    assert outcome == "refused" and name in said and "{}" in said, said


def test_unread_fields_concern_what_the_class_reads():
    """A field that only another kind reads is told, and null says nothing."""
    dflash = TABLE["base"]["dflash"]
    assert draft_formats.unread_fields(dflash | {"norm_before_fc": True, "other": None}) == ["norm_before_fc"]
    assert draft_formats.unread_fields(dflash | {"use_swa": True}) == ["use_swa"]
    assert config_class(dflash["architectures"]).kind == "DFlash"
