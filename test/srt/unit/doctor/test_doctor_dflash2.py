"""The doctor's plain DFlash2 draft equals the float64 reference, in every variant of the format."""

import pytest
import torch
from support.dflash2_cases import VARIANTS, dflash2_config, random_dflash2_weights
from support.reference_dflash2 import ReferenceDFlash2
from transformers import Qwen3Config

from sglang_dflash.srt.configs.draft_kinds import read_draft_config
from sglang_dflash.srt.doctor.plain_drafts import plain_draft


@pytest.mark.parametrize("name", VARIANTS)
def test_plain_dflash2_drafts_of_other_shapes(name):
    config = dflash2_config(VARIANTS[name])
    layer_ids, vocab, size = config["dflash_config"]["target_layer_ids"], config["vocab_size"], 20
    weights = random_dflash2_weights(config, len(layer_ids))
    generator = torch.Generator().manual_seed(3)
    table, head = (torch.randn(vocab, config["hidden_size"], generator=generator) for _ in range(2))
    tokens = torch.randint(vocab, (size,), generator=generator)
    aux_hidden = torch.randn(size, len(layer_ids) * config["hidden_size"], generator=generator)
    hf_config = Qwen3Config(**config)
    draft = plain_draft(read_draft_config(hf_config, name), hf_config, weights, table, head)
    reference = ReferenceDFlash2(config, weights)
    anchors = torch.tensor([1, 7, 9])
    drafted = draft.draft_blocks(tokens, aux_hidden, anchors)
    for block, anchor in enumerate(anchors.tolist()):
        slots = config["block_size"] - 1
        ids = torch.tensor([int(tokens[anchor]), *[draft.mask_token_id] * slots])
        hidden = reference.block_hidden(table[ids], reference.context_kv(aux_hidden[:anchor]))
        hidden = hidden[draft.draft.num_idle_rows :]
        path = reference.greedy_path(hidden, head, int(tokens[anchor]))
        assert drafted.tokens[block].tolist() == path
        candidates, unary = reference.candidates(hidden, head)
        for slot in range(min(slots, size - anchor)):
            previous = int(tokens[anchor + slot])
            scores = reference.scores(hidden[slot], previous, candidates[slot], unary[slot])
            ours = drafted.logits[block, slot, candidates[slot]].double()
            torch.testing.assert_close(ours.log_softmax(0), scores.log_softmax(0), rtol=0, atol=1e-3)
