"""Rejection and block verification: properties for any numbers, and bad ones."""

import numpy as np
import pytest
import torch
from support.decisions import Decision, accept_by_block_verification, accept_by_rejection
from support.enumeration import LAST, as_list, is_valid

from sglang_dflash.srt.layers.draft_probs import DraftProbs, draw_by_inverse_cdf

RULES = [accept_by_rejection, accept_by_block_verification]


def outcome(verdict: Decision) -> list[tuple[int, list[int]]]:
    rows = zip(verdict.accept_len.tolist(), verdict.out_tokens.tolist(), strict=True)
    return [(length, tokens[: length + 1]) for length, tokens in rows]


@pytest.mark.parametrize("rule", RULES)
def test_no_drafted_tokens_and_an_empty_batch(rule):
    target_probs = torch.tensor([[[0.0, 1.0]], [[0.25, 0.75]]])
    alone = rule(
        torch.zeros(2, 1, dtype=torch.int64),
        target_probs,
        as_list(torch.zeros(2, 0, 2)),
        torch.zeros(2, 0),
        torch.tensor([0.0, 0.2]),
    )
    assert outcome(alone) == [(0, [1]), (0, [0])]
    empty = rule(
        torch.zeros(0, 3, dtype=torch.int64),
        torch.zeros(0, 3, 4),
        as_list(torch.zeros(0, 2, 4)),
        torch.zeros(0, 2),
        torch.zeros(0),
    )
    assert (empty.accept_len.shape, empty.out_tokens.shape, empty.bonus.shape) == ((0,), (0, 3), (0,))


def test_a_rounding_error_leaves_the_targets_own_distribution():
    """With q = 1.000001 p one token in a million is rejected, and p - q is empty."""
    target_probs = torch.tensor([0.0, 0.25, 0.0, 0.75]).repeat(101, 2, 1)
    draft = as_list(target_probs[:, :1] * 1.000001)
    block = torch.tensor([[0, 3]]).repeat(101, 1)
    final = torch.arange(101) / 101
    verdict = accept_by_rejection(block, target_probs, draft, torch.full((101, 1), LAST), final)
    assert not verdict.accept_len.any()
    assert verdict.bonus.tolist() == [1 if u < 0.25 else 3 for u in final.tolist()]


def set_probability(of_draft, value):
    def apply(block, target_probs, draft):
        (draft.probs if of_draft else target_probs)[1, 1 - of_draft, 2] = value

    return apply


def erase_target(block, target_probs, draft):
    target_probs[1, 0] = 0


def go_below_zero(block, target_probs, draft):
    draft.probs[1, 0] = torch.tensor([0.5, 0.7, -0.2, 0.0])
    block[1, 1] = 1


def draft_the_impossible(block, target_probs, draft):
    draft.probs[1, 1] = torch.tensor([0.5, 0.5, 0.0, 0.0])
    block[1, 2] = 3


BAD = (np.nan, np.inf, -np.inf, -0.1)
DEFECTS = [set_probability(of_draft, value) for of_draft in (False, True) for value in BAD]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("defect", [*DEFECTS, erase_target, go_below_zero, draft_the_impossible])
def test_a_request_with_bad_numbers_affects_no_other(defect, rule):
    torch.manual_seed(0)
    target_probs, draft_probs = torch.rand(3, 3, 4).softmax(dim=2), torch.rand(3, 2, 4).softmax(dim=2)
    draft = DraftProbs(torch.arange(4).repeat(3, 2, 1), draft_probs)
    block = torch.randint(4, (3, 3))
    for level in (0.0, 0.5, LAST):
        uniforms = torch.full((3, 2), level), torch.full((3,), level)
        good = outcome(rule(block, target_probs, draft, *uniforms))
        arguments = block.clone(), target_probs.clone(), DraftProbs(draft.ids, draft.probs.clone())
        defect(*arguments)
        assert is_valid(*arguments).tolist() == [True, False, True]
        verdict = rule(*arguments, *uniforms)
        assert (outcome(verdict)[0], outcome(verdict)[2]) == (good[0], good[2])
        assert 0 <= verdict.accept_len[1] < 3
        assert ((verdict.out_tokens >= 0) & (verdict.out_tokens < 4)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf(dtype):
    """Every column gets an interval as wide as its mass, in order."""
    mass = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.05, 0.0], dtype=dtype)
    levels = torch.cat([(torch.arange(1500) + 0.5) / 1500, torch.tensor([0.0, LAST, 1.0])])
    drawn = draw_by_inverse_cdf(mass.repeat(len(levels), 1), levels)
    assert torch.bincount(drawn[:1500], minlength=6).tolist() == [0, 400, 0, 1000, 100, 0]
    assert drawn[1500:].tolist() == [1, 4, 4]
    assert (drawn[:1500].diff() >= 0).all()
