"""Loading a draft's weights: missing, unknown or misshapen tensors are named.

No memory stays uninitialised. The faults of support/faults.py are found before, in the files' headers.
"""

import pytest
import torch
from support.draft_cases import BASE, random_weights
from support.engine import build, read_config

from sglang_dflash.srt.models.dflash import DFlashDraftModel


def load(config, weights: dict) -> DFlashDraftModel:
    return build(DFlashDraftModel, config, iter(weights.items()))


@pytest.fixture
def plain(tmp_path):
    """A config as SGLang reads it, and its weights, which tests change."""
    return read_config(BASE, tmp_path), random_weights(BASE, 2)


def test_layers_in_another_order(plain, tmp_path):
    """SGLang captures layers in ascending order; `fc` reads them in the checkpoint's."""
    config, weights = plain
    nested = BASE["dflash_config"]
    ids = nested["target_layer_ids"]
    assert len(ids) > 1 and ids == sorted(ids)
    columns = weights["fc.weight"].chunk(len(ids), dim=1)
    other = BASE | {"dflash_config": nested | {"target_layer_ids": [*ids[1:], ids[0]]}}
    moved = weights | {"fc.weight": torch.cat((*columns[1:], columns[0]), dim=1)}
    wanted = load(config, weights).fc.weight
    (tmp_path / "other").mkdir()
    found = load(read_config(other, tmp_path / "other"), moved).fc.weight
    assert torch.equal(found, wanted) and not torch.equal(moved["fc.weight"], wanted)


@pytest.mark.parametrize(
    "unknown",
    [
        "layers.2.mlp.up_proj.weight",
        "layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.sinks",
        "head.weight_packed",
    ],
)
def test_an_unknown_tensor_is_named_and_left_out(unknown, plain, caplog):
    config, weights = plain
    parameters = dict(load(config, weights).named_parameters())
    weights[unknown] = torch.zeros(8, 8, dtype=torch.int32)
    model = load(config, weights)
    assert f"not read: ['{unknown}']" in caplog.text
    for name, parameter in model.named_parameters():
        assert parameter.equal(parameters[name])


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_rows_beyond_the_vocabulary_are_padding(name, plain):
    config, weights = plain
    table = torch.randn(config.vocab_size + 64, config.hidden_size)
    model = load(config, weights | {f"{name}.weight": table})
    assert getattr(model, name).weight[: config.vocab_size].equal(table[: config.vocab_size])
    with pytest.raises(ValueError, match=f"{name}.weight is"):
        load(config, weights | {f"{name}.weight": table[: config.vocab_size - 1]})


def test_a_width_that_sglang_rounds_up_on_a_cpu(tmp_path):
    """A checkpoint of width 80 gets 96: the added rows are zeros, and the model is the same."""
    weights = random_weights(BASE, 2)
    width = {"intermediate_size": 96, "original_intermediate_size": BASE["intermediate_size"]}
    rounded = load(read_config(BASE | width, tmp_path), weights)
    plain = load(read_config(BASE, tmp_path), weights)
    hidden = torch.randn(5, BASE["hidden_size"], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rounded.layers[1].mlp(hidden), plain.layers[1].mlp(hidden))
    weights["layers.1.mlp.up_proj.weight"] = weights["layers.1.mlp.up_proj.weight"][:-1]
    with pytest.raises(ValueError, match="layers.1.mlp.up_proj.weight"):
        load(read_config(BASE | width, tmp_path), weights)


@pytest.mark.parametrize("moved", [0, 2])
def test_a_map_of_a_draft_without_a_vocabulary_of_its_own(moved, plain):
    """It must be the identity."""
    config, weights = plain
    weights["d2t"] = torch.zeros(BASE["vocab_size"], dtype=torch.int64)
    weights["d2t"][:moved] = 1
    if moved:
        with pytest.raises(ValueError, match="d2t maps 2 tokens.*draft_vocab_size equals vocab_size"):
            load(config, weights)
    else:
        assert load(config, weights).d2t is None


@pytest.mark.parametrize("first, last, is_inside", [(0, 0, True), (0, 1, False), (-1, 0, False)])
def test_a_map_into_the_targets_vocabulary(first, last, is_inside, tmp_path):
    """The draft's first token is the target's first, and its last the target's last, or one beyond."""
    size, vocabulary = 40, BASE["vocab_size"]
    config = BASE | {"dflash_config": BASE["dflash_config"] | {"draft_vocab_size": size}}
    offsets = torch.zeros(size, dtype=torch.int64)
    offsets[0], offsets[-1] = first, vocabulary - size + last
    weights = random_weights(BASE, 2) | {"d2t": offsets, "lm_head.weight": torch.zeros(size, 48)}
    config = read_config(config, tmp_path)
    if is_inside:
        assert torch.equal(load(config, weights).d2t, offsets)
    else:
        with pytest.raises(ValueError, match=f"d2t points outside .* {vocabulary} tokens"):
            load(config, weights)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("name", ["t2d", "verifier_norm.weight", "verifier_lm_head.weight"])
def test_the_librarys_copies_of_target_tensors_are_left_out(name, prefix, plain):
    """They may have any shape."""
    config, weights = plain
    model = load(config, weights)
    others = weights | {f"{prefix}{name}": torch.zeros(3, 5)}
    other = load(config, others)
    for parameter, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.parametrize(
    "claim, name", [("has_own_lm_head", "lm_head"), ("has_embed_tokens", "embed_tokens")]
)
def test_a_vocabulary_that_the_config_claims(claim, name, tmp_path):
    config = BASE | {"dflash_config": BASE["dflash_config"] | {claim: True}}
    with pytest.raises(ValueError, match=f"{name}.weight: missing"):
        load(read_config(config, tmp_path), random_weights(BASE, 2))
