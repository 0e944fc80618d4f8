"""A draft's config.json: valid fields, and named errors.

test_corrupted_checkpoints.py has missing fields, values of a wrong type, and the faults of support/faults.py.
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

from sglang_dflash.srt.configs.checkpoint import read_mask_embedding
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig, spread_target_layer_ids
from sglang_dflash.srt.configs.draft_kinds import (
    DFLASH2_ARCHITECTURES,
    DFlash2DraftConfig,
    check_draft_fits_target,
    find_mask_token,
    read_draft_config,
)
from sglang_dflash.srt.configs.fields import DraftConfigError

VALID = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 100,
    "block_size": 8,
    "num_target_layers": 12,
    "dflash_config": {"mask_token_id": 99, "target_layer_ids": [1, 5, 9]},
}
SLIDING = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 16}


def parse(changes: dict | None = None, nested: dict | None = None) -> DFlashDraftConfig:
    """Parse VALID with changes; None as a value removes the field."""
    merged = {**VALID, **(changes or {})}
    if nested is not None:
        merged["dflash_config"] = {**VALID["dflash_config"], **nested}
    fields = {name: value for name, value in merged.items() if value is not None}
    return DFlashDraftConfig.parse(SimpleNamespace(**fields), "some/draft")


def problems_of(changes: dict | None = None, nested: dict | None = None) -> tuple[str, ...]:
    with pytest.raises(DraftConfigError) as caught:
        parse(changes, nested)
    message = str(caught.value)
    assert "some/draft" in message
    assert all(problem in message for problem in caught.value.problems)
    return caught.value.problems


def test_a_valid_config():
    draft = parse()
    assert (draft.block_size, draft.mask_token_id, draft.target_layer_ids) == (8, 99, (1, 5, 9))
    assert draft.layer_types == ("full_attention",) * 3 and draft.sliding_window is None
    check_draft_fits_target(draft, target(), "some/draft")


@pytest.mark.parametrize("causal, expected", [(None, True), (True, True), (False, False)])
def test_sliding_layers(causal, expected):
    """Without `is_causal`, a sliding layer is causal inside the block."""
    draft = parse({**SLIDING, "is_causal": causal})
    assert draft.sliding_window == 16
    assert draft.sliding_is_causal is expected


@pytest.mark.parametrize("where", ["is_causal", "causal"])
def test_causal_full_layers(where):
    """Given, causality holds for all layers. Not given, full layers see their whole block."""
    mixed = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 16}
    for nested, expected in (
        ({where: True}, [True] * 3),
        ({where: False}, [False] * 3),
        ({}, [True, False, False]),
    ):
        draft = parse(mixed, nested)
        assert [draft.is_causal(layer) for layer in range(3)] == expected


def test_use_swa():
    """All layers are sliding and see their whole block, unless layer types or causality are given."""
    draft = parse({"sliding_window": 7}, {"use_swa": True, "swa_window_size": 24})
    assert draft.layer_types == ("sliding_attention",) * 3 and draft.sliding_window == 24
    assert not draft.is_causal(0)
    assert parse({"sliding_window": 7}, {"use_swa": True}).sliding_window == 7
    assert parse({}, {"use_swa": True, "swa_window_size": 24, "causal": True}).is_causal(0)
    named = parse(
        {"layer_types": ["full_attention"] * 2 + ["sliding_attention"], "sliding_window": 7},
        {"use_swa": True},
    )
    assert named.layer_types[0] == "full_attention" and named.is_causal(2)


def test_fields_may_be_nested_or_at_the_top():
    """`dflash_config` wins; the top level fills in."""
    nested = parse({"block_size": None}, {"block_size": 4})
    top = parse({"mask_token_id": 1}, {"mask_token_id": None})
    both = parse({"block_size": 4}, {"block_size": 2})
    assert (nested.block_size, top.mask_token_id, both.block_size) == (4, 1, 2)


@pytest.mark.parametrize(
    "nested, words",
    [
        ({"target_layer_ids": [1, 2.0]}, ["target_layer_ids.1", "integer", "2.0"]),
        ({"target_layer_ids": [-1, 2]}, ["target_layer_ids", "-1", "negative"]),
        ({"is_causal": 1}, ["is_causal"]),
        ({"use_swa": True}, ["sliding_window", "missing", "swa_window_size"]),
        ({"use_swa": True, "swa_window_size": 0}, ["sliding_window", "0"]),
        ({"input_embedding_scale": 0.0}, ["input_embedding_scale", "0.0"]),
        ({"mask_token_id": None, "mask_token": ""}, ["mask_token"]),
        ({"output_multiplier": -1.0}, ["output_multiplier", "-1.0"]),
        ({"final_logit_softcapping": float("inf")}, ["final_logit_softcapping", "inf"]),
        ({"hc_mult": 0}, ["hc_mult", "0"]),
    ],
)
def test_what_dflash_config_may_not_say(nested, words):
    problems = problems_of(nested=nested)
    assert any(all(word in problem for word in words) for problem in problems), problems


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dflash_config": [1, 2]}, ["dflash_config", "[1, 2]"]),
        (
            {"num_target_layers": None, "dflash_config": {}},
            ["target_layer_ids", "num_target_layers", "missing"],
        ),
        ({"num_target_layers": 3, "dflash_config": {}}, ["target_layer_ids", "shallow"]),
        # SGLang would capture a repeated layer once, and `fc` would not fit.
        ({"num_target_layers": 5, "num_hidden_layers": 4, "dflash_config": {}}, ["must be without repeats"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "3"]),
        ({"layer_types": "full_attention"}, ["layer_types"]),
        ({**SLIDING, "sliding_window": None}, ["sliding_window", "missing"]),
        ({**SLIDING, "sliding_window": 0}, ["sliding_window", "0"]),
        # SGLang's RadixAttention takes the 0 tokens before the query for "no window".
        ({**SLIDING, "sliding_window": 1}, ["sliding_window", "1"]),
        ({"num_experts": 8}, ["num_experts"]),
        ({"partial_rotary_factor": 0.25}, ["partial_rotary_factor", "0.25"]),
        ({"head_dim": 64, "rope_scaling": {"rope_dim": 16}}, ["rope_dim", "16", "64"]),
        ({"rope_parameters": {"rope_type": "yarn", "partial_rotary_factor": 0.5}}, ["0.5", "yarn"]),
        ({"rope_is_neox_style": False}, ["rope_is_neox_style"]),
    ],
)
def test_what_the_top_level_may_not_say(changes, words):
    problems = problems_of(changes)
    assert any(all(word in problem for word in words) for problem in problems), problems


def test_fields_that_say_no_are_no_variant():
    """Exporters write zero, null or false, and a rotary width equal to the head's."""
    nested = {"conv_kernel_size": 0, "selector_rank": 0, "projector_type": None, "attention_sink_bias": False}
    rotary = {"head_dim": 64, "partial_rotary_factor": 0.25, "rope_scaling": {"rope_dim": 64}}
    parse(rotary | {"num_experts": None}, nested)
    parse({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}})


SELECTOR = {"selector_rank": 8, "selector_top_k": 4, "conv_kernel_size": 2, "conv_group_size": 16}


def dflash2(nested: dict | None = None, **top) -> SimpleNamespace:
    nested = VALID["dflash_config"] | SELECTOR | (nested or {})
    return SimpleNamespace(**VALID | {"dflash_config": nested} | top)


def parse_dflash2(nested: dict | None = None) -> DFlash2DraftConfig:
    return DFlash2DraftConfig.parse(dflash2(nested), "some/draft")


def test_a_dflash2_config():
    draft = parse_dflash2(nested={"causal": False} | SLIDING)
    assert {name: getattr(draft, name) for name in SELECTOR} == SELECTOR
    assert (draft.block_size, draft.target_layer_ids, draft.sliding_is_causal) == (8, (1, 5, 9), False)
    plain = parse_dflash2(nested={"conv_kernel_size": 0, "conv_group_size": None})
    assert plain.conv_kernel_size == plain.conv_group_size == 0
    for architecture in DFLASH2_ARCHITECTURES:
        assert read_draft_config(dflash2(architectures=[architecture]), "some/draft") == parse_dflash2()


@pytest.mark.parametrize(
    "nested, words",
    [
        ({"selector_rank": None}, ["selector_rank", "missing"]),
        ({"selector_top_k": 0}, ["selector_top_k", "missing"]),
        ({"selector_top_k": -1}, ["selector_top_k", "-1"]),
        ({"selector_top_k": 101}, ["selector_top_k", "101", "100"]),
        ({"conv_kernel_size": 0}, ["conv_kernel_size", "conv_group_size"]),
        ({"conv_group_size": None}, ["conv_kernel_size", "conv_group_size"]),
        ({"conv_group_size": 15}, ["conv_group_size", "15", "64"]),
        ({"draft_vocab_size": 50}, ["draft_vocab_size"]),
        ({"selector_beam_width": 4}, ["selector_beam_width", "not supported"]),
        ({"selector_vocab_size": 101}, ["selector_vocab_size", "101", "100"]),
        ({"selector_vocab_size": 3}, ["selector_vocab_size", "3", "4"]),
        ({"conv_dilation": 2}, ["conv_dilation"]),
        ({"markov_order": 1}, ["markov_order", "DSpark"]),
        ({"mask_token_id": 200, "selector_rank": 1.5}, ["selector_rank", "1.5"]),
    ],
)
def test_what_a_dflash2_config_may_not_say(nested, words):
    with pytest.raises(DraftConfigError) as caught:
        parse_dflash2(nested=nested)
    problems = caught.value.problems
    assert any(all(word in problem for word in words) for problem in problems), problems


def test_a_mask_token_by_name():
    """The id wins if both are present."""
    named = parse(nested={"mask_token_id": None, "mask_token": "<|MASK|>"})
    both = parse(nested={"mask_token": "<|MASK|>"})
    assert (named.mask_token, named.mask_token_id) == ("<|MASK|>", None)
    assert (both.mask_token, both.mask_token_id) == (None, 99)


class Tokenizer:
    """A tokenizer of 90 tokens, one of them a mask."""

    def __len__(self):
        return 90

    def get_vocab(self):
        return {"<mask>": 3}


def test_a_mask_token_is_looked_up_in_the_targets_tokenizer():
    """z-lab's code adds a missing token, which makes it the next one."""

    def found(name, **changes):
        return find_mask_token(parse(changes, {"mask_token_id": None, "mask_token": name}), Tokenizer())

    assert found("<mask>") == 3
    assert found("<|MASK|>") == 90
    with pytest.raises(DraftConfigError, match="90 rows"):
        found("<|MASK|>", vocab_size=90)
    with pytest.raises(DraftConfigError, match="no tokenizer"):
        find_mask_token(parse(nested={"mask_token_id": None, "mask_token": "<mask>"}), None)


def test_a_file_with_a_mask_embedding(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert read_mask_embedding(str(tmp_path)) is None
    vector = torch.arange(4.0)
    torch.save({"embedding": vector, "mask_token_id": 9}, tmp_path / "mask_embedding.pt")
    saved = read_mask_embedding(str(tmp_path))
    assert saved.token_id == 9 and torch.equal(saved.vector, vector)
    fields = {"embedding": vector, "mask_token_id": 9, "per_position": True}
    torch.save(fields, tmp_path / "mask_embedding.pt")
    with pytest.raises(DraftConfigError, match="per position"):
        read_mask_embedding(str(tmp_path))
    torch.save([vector], tmp_path / "mask_embedding.pt")
    with pytest.raises(DraftConfigError, match="mask_embedding.pt"):
        read_mask_embedding(str(tmp_path))
    torch.save({"embedding": vector, "mask_token_id": "<mask>"}, tmp_path / "mask_embedding.pt")
    with pytest.raises(DraftConfigError, match="does not hold an embedding and its mask_token_id"):
        read_mask_embedding(str(tmp_path))
    (tmp_path / "mask_embedding.pt").write_bytes(b"nonsense")
    with pytest.raises(DraftConfigError, match="mask_embedding.pt is no file of PyTorch's tensors"):
        read_mask_embedding(str(tmp_path))


def test_logit_scales():
    """Zero is SGLang's "none"; the top level of a config may be the target's."""
    plain = parse({"final_logit_softcapping": 30.0, "output_multiplier": 2.0}, {"final_logit_softcapping": 0})
    assert (plain.final_logit_softcapping, plain.output_multiplier) == (None, 1.0)
    scaled = parse(nested={"final_logit_softcapping": 30, "output_multiplier": 0.5})
    assert (scaled.final_logit_softcapping, scaled.output_multiplier) == (30.0, 0.5)


def test_several_streams():
    draft = parse(nested={"hc_mult": 4})
    assert draft.aux_width == 3 * 4 * 64 and parse().aux_width == 3 * 64
    check_draft_fits_target(draft, target(hc_mult=4), "some/draft")
    for one, other in ((draft, target()), (parse(), target(hc_mult=4))):
        with pytest.raises(DraftConfigError, match="hc_mult"):
            check_draft_fits_target(one, other, "some/draft")


def target(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{"hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 12, **changes})


def test_layers_of_special_targets():
    """Some targets capture their last layer; a looped one counts a layer once per loop."""
    check_draft_fits_target(parse(), target(num_hidden_layers=10), "some/draft", ["Lfm2ForCausalLM"])
    check_draft_fits_target(parse(), target(num_hidden_layers=6, num_loops=2), "some/draft")
    with pytest.raises(DraftConfigError, match="leave the target's 8 layers"):
        check_draft_fits_target(parse(), target(num_hidden_layers=4, num_loops=2), "some/draft")


def test_what_sglang_assumes_is_assumed_and_told():
    draft = parse({"block_size": None}, {"mask_token_id": None})
    assert (draft.block_size, draft.mask_token, draft.mask_token_id) == (16, "<|MASK|>", None)
    assert len(draft.remarks) == 2 and not parse().remarks
    assert not parse(nested={"mask_token_id": None, "mask_token": "<mask>"}).remarks


def test_every_mismatch_with_the_target_is_named_at_once():
    with pytest.raises(DraftConfigError) as caught:
        check_draft_fits_target(
            parse(), target(hidden_size=1, vocab_size=2, num_hidden_layers=3), "some/draft"
        )
    assert len(caught.value.problems) == 3


def test_the_engine_spreads_alike():
    """SGLang and we must spread missing layer ids in the same way.

    SGLang resolves them itself when it tells the target what to capture. Ties between two layers are
    decided by floating point, so the formulas must match to the last bit.
    """
    different = []
    for num_target_layers, num_draft_layers in itertools.product(range(4, 130), range(1, 20)):
        hf_config = SimpleNamespace(
            num_hidden_layers=num_draft_layers, block_size=8, dflash_config={"mask_token_id": 1}
        )
        theirs = parse_dflash_draft_config(draft_hf_config=hf_config).resolve_target_layer_ids(
            target_num_layers=num_target_layers, draft_num_layers=num_draft_layers
        )
        if tuple(theirs) != spread_target_layer_ids(num_target_layers, num_draft_layers):
            different.append((num_target_layers, num_draft_layers))
    assert not different


def test_a_spread_that_ends_on_the_last_layer_is_refused():
    """A one-layer draft reads the middle layer; of two layers SGLang cannot capture the last."""
    draft = parse({"num_target_layers": 2, "num_hidden_layers": 1}, {"target_layer_ids": None})
    with pytest.raises(DraftConfigError, match="name the last layer"):
        check_draft_fits_target(draft, target(num_hidden_layers=2), "some/draft")
