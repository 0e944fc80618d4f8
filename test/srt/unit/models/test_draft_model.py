"""Our DFlash draft on SGLang's layers against plain PyTorch (reference_dflash.py).

float32 against float64. Logits here are of order 1 to 10; tolerance 1e-4 absolute. Errors of substance (a
wrong mask, position, norm or head order) show at 1e-2 and more.
"""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from support.draft_cases import VARIANTS, Case, lm_head
from support.engine import build, read_config

from sglang_dflash.srt.configs.checkpoint import MaskEmbedding
from sglang_dflash.srt.models.block_draft import BlockDraftModel
from sglang_dflash.srt.models.dflash import DFlashDraftModel

LOGITS_TOLERANCE = 1e-4
# What the seven rows of the random draft draft behind nine positions, and the logits of the drafted tokens.
GOLDEN = {
    "DeepSeek's block of 7": (
        (12, 15, 43, 14, 20, 20, 58),
        (1.76275, 1.662444, 1.938586, 2.069858, 1.958879, 2.064328, 2.011706),
    )
}


@pytest.mark.parametrize("name", VARIANTS)
def test_block_logits_of_a_random_draft(name, tmp_path):
    case = Case.variant(name, tmp_path)
    # Beyond YaRN's original length; and of equal lengths, for which the backend drops its mask.
    assert max(map(case.compare_blocks, ([80, 1, 9, 14], [12, 12]))) <= LOGITS_TOLERANCE


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_block_logits(name, tmp_path):
    """SGLang's layers and plain PyTorch give what was recorded once."""
    drafted, logits = GOLDEN[name]
    case = Case.variant(name, tmp_path)
    tokens, [context], output = case.run_blocks([9])
    for hidden in (output.hidden_states, case.block_hidden(tokens[0], context)):
        best = case.logits(hidden).max(dim=-1)
        assert tuple(best.indices.tolist()) == drafted
        assert (best.values - torch.tensor(logits)).abs().max() <= LOGITS_TOLERANCE


@pytest.mark.parametrize("page_size", [1, 16])
def test_block_logits_of_the_bundled_draft(page_size, tmp_path):
    assert Case.bundled(tmp_path).compare_blocks([40, 3, 17], page_size=page_size) <= LOGITS_TOLERANCE


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
    assert case.num_aux == 2 * 2 and case.compare_blocks([12]) <= LOGITS_TOLERANCE


def test_rope_fields_of_the_target(tmp_path):
    """M-RoPE sections and a partial factor are copied from the target's config.

    The draft still rotates its whole heads by the text's positions, as `rope_dim` says.
    """
    copied = {"rope_type": "default", "mrope_section": [2, 3, 3], "mrope_interleaved": True, "rope_dim": 16}
    plain = Case.variant("plain", tmp_path)
    config = plain.config | {"rope_scaling": copied, "partial_rotary_factor": 0.25}
    expected = plain.run_blocks([30])[2].hidden_states
    plain.model = build(DFlashDraftModel, read_config(config, tmp_path), iter(plain.weights.items()))
    plain.model.borrow_from_target(plain.embedding, lm_head(plain.head))
    assert torch.equal(plain.run_blocks([30])[2].hidden_states, expected)


class ScaledEmbedding(torch.nn.Embedding):
    embed_scale = 3.0

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale


@pytest.mark.parametrize("kind", [torch.nn.Embedding, ScaledEmbedding])
def test_a_mask_embedding_of_its_own(kind, tmp_path):
    """It replaces the mask token in blocks, scaled as the table's rows are."""
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


def test_a_draft_borrows_the_targets_layers_without_adapters():
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    embedding, head = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 4)
    draft = SimpleNamespace(mask_embedding=None)
    wrapped = [BaseLayerWithLoRA(layer, None) for layer in (embedding, head)]
    BlockDraftModel.borrow_from_target(draft, *wrapped)
    assert draft.borrowed == (embedding, head)
    BlockDraftModel.borrow_from_target(draft, embedding, head)
    assert draft.borrowed == (embedding, head)
