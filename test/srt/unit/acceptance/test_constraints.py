"""Biases, grammars' masks and penalties reach the rows of their own request and slot."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.sampling_parameters import VOCABULARY

from sglang_dflash.srt.speculative.acceptance import constraints
from sglang_dflash.srt.speculative.acceptance.constraints import count_tokens_torch, penalize_block_torch
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks

BLOCK = torch.tensor([[1, 2, 2, 3], [4, 4, 4, 4]])
LENGTHS = [np.array([3, 3]), np.array([1, 3])]


def batch_of(**fields) -> SimpleNamespace:
    info = SimpleNamespace(logit_bias=None, acc_additive_penalties=None, has_custom_logit_processor=False)
    vars(info).update(fields)
    return SimpleNamespace(sampling_info=info, has_grammar=False, reqs=[])


@pytest.mark.parametrize("lengths", LENGTHS, ids=["whole blocks", "own lengths"])
def test_a_bias_is_its_requests_own(lengths):
    rows = VerifyLayout(2, 4, lengths)
    bias = torch.randn(2, VOCABULARY)
    logits = torch.randn(rows.num_rows, VOCABULARY)
    wanted = logits + rows.pack(bias[:, None].expand(2, 4, VOCABULARY))
    constraints.constrain(batch_of(logit_bias=bias), BLOCK, logits, None, None, None, rows)
    torch.testing.assert_close(logits, wanted)


def test_penalties_come_before_the_bias():
    """A repetition penalty scales logits, and SGLang does not scale the bias."""
    rows, logits = whole_blocks(2, 4), torch.randn(8, VOCABULARY)
    wanted = 2 * logits + 1
    penalties = SimpleNamespace(penalize_block=lambda batch, block, logits, rows: logits.mul_(2))
    batch = batch_of(logit_bias=torch.ones(2, VOCABULARY), acc_additive_penalties=object())
    constraints.constrain(batch, BLOCK, logits, penalties, None, None, rows)
    torch.testing.assert_close(logits, wanted)


@pytest.mark.parametrize("lengths", LENGTHS, ids=["whole blocks", "own lengths"])
def test_a_grammars_mask_is_its_slots_own(lengths, monkeypatch):
    """SGLang's mask has a row for each slot of a rectangle."""
    rows, applied = VerifyLayout(2, 4, lengths), []

    class Mask(SimpleNamespace):
        def _replace(self, vocab_mask):
            return Mask(vocab_mask=vocab_mask)

        def apply(self, logits):
            applied.append(self.vocab_mask.flatten().tolist())

    monkeypatch.setattr(
        constraints, "build_grammar_vocab_mask", lambda **_: Mask(vocab_mask=torch.arange(8)[:, None])
    )
    batch = batch_of()
    batch.has_grammar = True
    constraints.constrain(batch, BLOCK, torch.zeros(rows.num_rows, VOCABULARY), None, object(), None, rows)
    assert applied == [[*range(8)] if rows.is_rectangle else [0, 1, 4, 5, 6, 7]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=["whole blocks", "own lengths"])
def test_penalties_of_each_slot_by_their_definition(lengths):
    """Slot k counts the block's tokens up to the k-th; a first token is counted already."""
    rows = VerifyLayout(2, 4, lengths)
    counts = torch.zeros(3, VOCABULARY, dtype=torch.int32)
    counts[2, 1], counts[0, 4], counts[0, 7] = 1, 2, 1
    emitted, requests, prompt_lens = counts.clone(), torch.tensor([2, 0]), torch.tensor([[3], [9]])
    # The first request has emitted one token before the block and its anchor, the second one nine.
    seq_lens, minimum = torch.tensor([4, 18]), torch.tensor([[4], [0]])
    frequency, presence, repetition = (
        torch.tensor([[a], [b]]) for a, b in ((0.3, 0.0), (0.5, 1.5), (1.0, 2.0))
    )
    stops = torch.zeros(2, VOCABULARY)
    stops[0, 9] = -torch.inf
    logits = torch.randn(rows.num_rows, VOCABULARY, generator=torch.Generator().manual_seed(0))
    wanted = logits.clone()
    row = 0
    for i in range(2):
        for k in range(int(lengths[i]) + 1):
            said = emitted[requests[i]].tolist()
            for token in BLOCK[i, 1 : k + 1].tolist():
                said[token] += 1
            for token in range(VOCABULARY):
                value = float(wanted[row, token]) - float(frequency[i]) * said[token]
                value -= float(presence[i]) * (said[token] > 0)
                if said[token]:
                    value = value / float(repetition[i]) if value > 0 else value * float(repetition[i])
                wanted[row, token] = value
            if int(seq_lens[i]) + 1 + k - int(prompt_lens[i]) < int(minimum[i]):
                wanted[row] += stops[i]
            row += 1
    assert wanted.isinf().sum() == 2, "the minimum ends within the block"
    columns = frequency, presence, repetition, minimum, prompt_lens, stops
    penalize_block_torch(logits, BLOCK, counts, requests, seq_lens, *columns, *rows.bounds)
    torch.testing.assert_close(logits, wanted)
    assert torch.equal(counts, emitted)
    count_tokens_torch(counts, requests, BLOCK, torch.tensor([1, 3], dtype=torch.int32))
    emitted[2, 1], emitted[2, 2], emitted[0, 4] = 2, 1, 6
    assert torch.equal(counts, emitted)
