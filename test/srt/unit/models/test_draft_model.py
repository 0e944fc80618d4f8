"""Our DFlash draft on SGLang's layers against plain PyTorch (reference_dflash.py).

float32 against float64. Hidden states and logits here are of order 1 to 10; tolerance 1e-4 absolute on
logits and 1e-5 on keys and values. Errors of substance (a wrong mask, position, norm or head order) show at
1e-2 and more.
"""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from support.draft_cases import VARIANTS, YARN, Case, random_weights
from support.engine import build, read_config
from support.reference_dflash import rope_frequencies

from sglang_dflash.srt.configs.checkpoint import MaskEmbedding
from sglang_dflash.srt.models.block_draft import BlockDraftModel
from sglang_dflash.srt.models.dflash import DFlashDraftModel

LOGITS_TOLERANCE = 1e-4
KV_TOLERANCE = 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_block_logits_of_a_random_draft(name, tmp_path):
    case = Case.variant(name, tmp_path)
    assert case.compare_blocks([23, 1, 9, 14]) <= LOGITS_TOLERANCE


@pytest.mark.parametrize("page_size", [1, 16])
def test_block_logits_of_the_bundled_draft(page_size, tmp_path):
    assert Case.bundled(tmp_path).compare_blocks([40, 3, 17], page_size=page_size) <= LOGITS_TOLERANCE


@pytest.mark.parametrize("name", ["plain", "sliding, causal", "sliding, not causal"])
@pytest.mark.parametrize("lengths", [[1], [12], [12, 12, 12], [2, 30]])
def test_batch_shapes(name, lengths, tmp_path):
    """One request; equal lengths, for which the backend drops its mask; very unequal lengths."""
    assert Case.variant(name, tmp_path).compare_blocks(lengths) <= LOGITS_TOLERANCE


def test_a_context_written_in_pieces(tmp_path):
    """Chunked prefill and commits write a context piecewise, with the same keys and values.

    Equal up to rounding: GEMMs of other sizes may round differently.
    """
    case = Case.variant("attention bias", tmp_path)
    aux_hidden = case.aux_hidden(20, seed=3)
    whole = case.context_kv(aux_hidden)
    pieces = [case.context_kv(aux_hidden[a:b], a) for a, b in [(0, 1), (1, 13), (13, 20)]]
    for kind in (0, 1):
        torch.testing.assert_close(
            torch.cat([piece[kind] for piece in pieces]), whole[kind], rtol=0, atol=KV_TOLERANCE
        )


@pytest.mark.parametrize(
    "name", ["plain", "one kv head", "attention bias", "yarn", "loose eps", "five target layers"]
)
def test_context_kv(name, tmp_path):
    case = Case.variant(name, tmp_path)
    aux_hidden = case.aux_hidden(80, seed=5)  # beyond YaRN's original length
    keys, values = case.context_kv(aux_hidden)
    heads = (case.config["num_key_value_heads"], case.config["head_dim"])
    assert keys.shape == values.shape == (80, case.config["num_hidden_layers"], *heads)
    for layer, (expected_keys, expected_values) in enumerate(case.reference.context_kv(aux_hidden)):
        torch.testing.assert_close(keys[:, layer].double(), expected_keys, rtol=0, atol=KV_TOLERANCE)
        torch.testing.assert_close(values[:, layer].double(), expected_values, rtol=0, atol=KV_TOLERANCE)


@pytest.mark.parametrize("softcap, multiplier", [(None, 1.0), (2.0, 1.0), (None, 0.5), (2.0, 0.5)])
def test_logits_to_draw_from(softcap, multiplier, tmp_path):
    """Logits are scaled, then capped; the best token stays."""
    nested = {"final_logit_softcapping": softcap, "output_multiplier": multiplier}
    case = Case.variant("plain", tmp_path, **nested)
    hidden = torch.randn(5, case.config["hidden_size"], generator=torch.Generator().manual_seed(0)) * 3
    expected = hidden @ case.head.T * multiplier
    expected = expected if softcap is None else softcap * torch.tanh(expected / softcap)
    torch.testing.assert_close(case.model.logits(hidden), expected, rtol=1e-5, atol=1e-5)


def test_several_streams(tmp_path):
    """Each layer's output is two hidden states wide, and so is the context's projection."""
    case = Case.variant("plain", tmp_path, hc_mult=2)
    aux_hidden = torch.randn(
        12, 2 * 2 * case.config["hidden_size"], generator=torch.Generator().manual_seed(0)
    )
    keys, _ = case.context_kv(aux_hidden)
    torch.testing.assert_close(
        keys[:, 1].double(), case.reference.context_kv(aux_hidden)[1][0], rtol=0, atol=KV_TOLERANCE
    )


def test_rope_fields_of_the_target(tmp_path):
    """M-RoPE sections and a partial factor are copied from the target's config.

    The draft still rotates its whole heads by the text's positions, as `rope_dim` says.
    """
    copied = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True, "rope_dim": 16}
    plain = Case.variant("plain", tmp_path)
    config = plain.config | {"rope_scaling": copied, "partial_rotary_factor": 0.25}
    model = build(
        DFlashDraftModel, read_config(config, tmp_path), random_weights(config, plain.num_aux).items()
    )
    aux_hidden = plain.aux_hidden(30, seed=1)
    expected = plain.context_kv(aux_hidden)
    plain.model = model
    for found, wanted in zip(plain.context_kv(aux_hidden), expected):
        assert torch.equal(found, wanted)


class ScaledEmbedding(torch.nn.Embedding):
    embed_scale = 3.0

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale


@pytest.mark.parametrize("kind", [torch.nn.Embedding, ScaledEmbedding])
def test_a_mask_embedding_of_its_own(kind, tmp_path):
    """It replaces the mask token in blocks, scaled as the table's rows are.

    The table, in which prompts are looked up too, stays.
    """
    case = Case.variant("plain", tmp_path)
    table = kind(case.config["vocab_size"], case.config["hidden_size"])
    before = table.weight.detach().clone()
    vector = torch.full((case.config["hidden_size"],), 0.25)
    case.model.prepare_mask(embedding=MaskEmbedding(case.model.mask_token_id, vector))
    case.model.borrow_from_target(table, case.model.head)
    ids = torch.tensor([3, case.model.mask_token_id, 5])
    with torch.no_grad():
        found, looked_up = case.model.embed(ids), table(ids)
    assert torch.equal(found[[0, 2]], looked_up[[0, 2]])
    assert torch.equal(found[1], vector * getattr(table, "embed_scale", 1.0))
    assert torch.equal(table.weight, before)


class ScaledParallelEmbedding(VocabParallelEmbedding):
    def forward(self, ids):
        return super().forward(ids) * 3.0


@pytest.mark.parametrize("kind", [ScaledEmbedding, ScaledParallelEmbedding])
@pytest.mark.parametrize("scale, factor", [(None, 3.0), (1.0, 1.0), (0.5, 0.5)])
def test_the_scale_of_embeddings(kind, scale, factor, tmp_path):
    """As the target's module has it, or rows of the table times the draft's own scale."""
    nested = {} if scale is None else {"input_embedding_scale": scale}
    case = Case.variant("plain", tmp_path, **nested)
    table = kind(case.config["vocab_size"], case.config["hidden_size"])
    table.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    case.model.borrow_from_target(table, case.model.head)
    ids = torch.tensor([3, case.model.mask_token_id])
    with torch.no_grad():
        assert torch.equal(case.model.embed(ids), table.weight[ids] * factor)


@pytest.mark.parametrize("token, width, words", [(8, 48, "token 8"), (7, 47, "47")])
def test_a_mask_embedding_of_another_draft(token, width, words, tmp_path):
    case = Case.variant("plain", tmp_path)
    with pytest.raises(ValueError, match=words):
        case.model.prepare_mask(embedding=MaskEmbedding(token, torch.zeros(width)))


def test_rejected_rows_do_not_matter(tmp_path):
    """Draft KV of rejected positions must not influence the next block.

    The next block starts at the first of them.
    """
    case = Case.variant("plain", tmp_path)
    length = 10
    tokens = case.block_tokens([4])
    pools = case.pools(1, length + 2 * tokens.shape[1])
    aux_hidden = case.aux_hidden(length, seed=0)
    case.model.write_context_kv(
        aux_hidden, torch.arange(length), pools.slots(0, 0, length), pools.token_to_kv_pool
    )
    clean = pools.forward(case.model, pools.blocks(tokens, [length])).hidden_states
    garbage = case.aux_hidden(2 * tokens.shape[1], seed=9)
    where = torch.arange(length, length + len(garbage))
    case.model.write_context_kv(
        garbage, where, pools.slots(0, length, length + len(garbage)), pools.token_to_kv_pool
    )
    again = pools.forward(case.model, pools.blocks(tokens, [length])).hidden_states
    assert torch.equal(clean, again)


@pytest.mark.parametrize(
    "scaling", [None, YARN, YARN | {"factor": 40.0, "original_max_position_embeddings": 4096}]
)
def test_the_reference_rotates_as_hugging_face_does(scaling):
    """Frequencies equal transformers' to 1e-6 relative (theirs are float32)."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = {"rope_theta": 1e6, "rope_scaling": scaling}
    frequencies, magnitude = rope_frequencies(config, 64)
    rotary = Qwen3RotaryEmbedding(Qwen3Config(head_dim=64, max_position_embeddings=256, **config))
    torch.testing.assert_close(frequencies.float(), rotary.inv_freq, rtol=1e-6, atol=0)
    assert magnitude == pytest.approx(rotary.attention_scaling, rel=1e-9)


def test_a_draft_borrows_the_targets_layers_without_adapters():
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    embedding, head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4)
    draft = SimpleNamespace(mask_embedding=None)
    wrapped = [BaseLayerWithLoRA(layer, None) for layer in (embedding, head)]
    BlockDraftModel.borrow_from_target(draft, *wrapped)
    assert draft.borrowed == (embedding, head)
    BlockDraftModel.borrow_from_target(draft, embedding, head)
    assert draft.borrowed == (embedding, head)
