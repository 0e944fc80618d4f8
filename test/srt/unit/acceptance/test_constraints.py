"""Biases, grammars' masks and penalties reach the rows of their own request and slot."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.sampling_parameters import VOCABULARY

from sglang_dflash.srt.speculative.acceptance import constraints
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks

BLOCK = torch.tensor([[1, 2, 2, 3], [4, 4, 4, 4]])
LENGTHS = [np.array([3, 3]), np.array([1, 3])]


def batch_of(**fields) -> SimpleNamespace:
    info = SimpleNamespace(logit_bias=None, acc_additive_penalties=None, has_custom_logit_processor=False)
    vars(info).update(fields)
    return SimpleNamespace(sampling_info=info, has_grammar=False, reqs=[])


@pytest.mark.parametrize("lengths", LENGTHS, ids=["whole blocks", "own lengths"])
def test_a_bias_is_its_requests_own(lengths):
    layout = VerifyLayout(2, 4, lengths)
    bias = torch.randn(2, VOCABULARY)
    logits = torch.randn(layout.num_rows, VOCABULARY)
    wanted = logits + layout.to_rows(bias[:, None].expand(2, 4, VOCABULARY))
    constraints.constrain(batch_of(logit_bias=bias), BLOCK, logits, None, None, None, layout)
    torch.testing.assert_close(logits, wanted)


def test_penalties_come_before_the_bias():
    """A repetition penalty scales logits, and SGLang does not scale the bias."""
    rows, logits = whole_blocks(2, 4), torch.randn(8, VOCABULARY)
    wanted = 2 * logits + 1
    penalties = SimpleNamespace(penalize_block=lambda batch, block, logits, layout: logits.mul_(2))
    batch = batch_of(logit_bias=torch.ones(2, VOCABULARY), acc_additive_penalties=object())
    constraints.constrain(batch, BLOCK, logits, penalties, None, None, rows)
    torch.testing.assert_close(logits, wanted)


@pytest.mark.parametrize("lengths", LENGTHS, ids=["whole blocks", "own lengths"])
def test_a_grammars_mask_is_its_slots_own(lengths, monkeypatch):
    """SGLang's mask has a row for each slot of a rectangle."""
    layout, applied = VerifyLayout(2, 4, lengths), []

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
    constraints.constrain(
        batch, BLOCK, torch.zeros(layout.num_rows, VOCABULARY), None, object(), lambda: None, layout
    )
    assert applied == [[*range(8)] if layout.is_rectangle else [0, 1, 4, 5, 6, 7]]


def test_the_grammar_of_a_request_that_ends_is_not_read(monkeypatch):
    """The barrier ends a request whose grammar refused its last token. llguidance then raises for ever."""
    seen = []
    monkeypatch.setattr(constraints, "build_grammar_vocab_mask", lambda reqs, **_: seen.extend(reqs))
    batch = batch_of()
    batch.has_grammar = True
    batch.reqs = [SimpleNamespace(grammar=n, to_finish=None, finished=lambda n=n: n == 1) for n in range(3)]

    def barrier():
        batch.reqs[0].to_finish = object()

    layout = whole_blocks(3, 4)
    constraints.constrain(batch, BLOCK, torch.zeros(12, VOCABULARY), None, object(), barrier, layout)
    assert [req.grammar for req in seen] == [None, None, 2]
