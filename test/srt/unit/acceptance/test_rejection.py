"""Rejection and block verification are exact, and as long as their papers state."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.decisions import Decision, accept_by_block_verification, accept_by_rejection
from support.draft_probs import one_hot
from support.enumeration import Case, as_shuffled_list, deviation, output_law, random_case, sequence_law
from support.rejection_batches import batches

from sglang_dflash.srt.layers.draft_probs import DraftProbs, draw_by_inverse_cdf
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout

RULES = [accept_by_rejection, accept_by_block_verification]
SIZES = [(3, 2), (4, 3), (3, 4)]  # vocabulary, block size
KINDS = ["chain", "marginals", "one-hot", "half", "near"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary, width", SIZES)
def test_the_output_is_the_targets(vocabulary, width, kind, rule):
    """Check float64, where rounding hides no error, and float32, which servers use."""
    for seed in range(3):
        case = random_case(seed, vocabulary, width, kind)
        assert deviation(rule, case) < 1e-9
        assert deviation(rule, case, dtype=torch.float32, listed=as_shuffled_list) < 1e-6


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["one-hot", "half", "marginals"])
def test_any_draft_may_be_declared_one_hot(kind, rule):
    def declared_one_hot(block, target_probs, draft, *uniforms):
        return rule(block, target_probs, one_hot(block[:, 1:]), *uniforms)

    case = random_case(7, 3, 3, kind)
    assert deviation(declared_one_hot, case) < 1e-9


@given(batches(), st.sampled_from(RULES), st.integers(0, 2**31))
def test_a_request_that_verifies_less_has_a_shorter_block(arguments, rule, seed):
    """Its last verified slot is followed by a token of the target's, whatever was drafted behind it."""
    block, target_probs, draft, accept_uniforms, final_uniforms = arguments
    bs, width = block.shape
    for lengths in np.random.default_rng(seed).integers(0, width, (5, bs)):
        layout = VerifyLayout(bs, width, lengths)
        ragged = layout.to_rows(target_probs)
        found = rule(block, ragged, draft, accept_uniforms, final_uniforms, layout=layout)
        for i, length in enumerate(lengths):
            one, drafted = slice(i, i + 1), slice(0, length)
            alone = rule(
                block[one, : length + 1],
                target_probs[one, : length + 1],
                DraftProbs(draft.ids[one, drafted], draft.probs[one, drafted]),
                accept_uniforms[one, drafted],
                final_uniforms[one],
            )
            accepted = int(alone.accept_len)
            assert found.accept_len[i] == accepted and found.bonus[i] == alone.bonus
            assert torch.equal(found.out_tokens[i, : accepted + 1], alone.out_tokens[0, : accepted + 1])


@pytest.mark.parametrize("rule", RULES)
def test_a_uniform_of_zero_accepts_no_impossible_token(rule):
    """The draft proposes a token that the target excludes, and then one that it may take."""
    target_probs = torch.tensor([[[1.0, 0.0], [0.5, 0.5], [0.5, 0.5]]])
    block, draft = torch.tensor([[0, 1, 0]]), one_hot(torch.tensor([[1, 0]]))
    verdict = rule(block, target_probs, draft, torch.zeros(1, 2), torch.zeros(1))
    assert (verdict.accept_len.item(), verdict.bonus.item()) == (0, 0)


# -- the enumeration can fail


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["chain", "marginals", "one-hot"])
def test_misdeclared_draft_probabilities_are_caught(kind, rule):
    for seed in range(3):
        case = random_case(seed, 3, 3, kind)
        uniform = [torch.full_like(table, 1 / 3) for table in case.draft]
        assert deviation(rule, case, declared=Case(case.target, uniform)) > 1e-2


@pytest.mark.parametrize("rule", RULES)
def test_probabilities_of_a_neighbouring_slot_are_caught(rule):
    case = random_case(3, 3, 3, "marginals")
    swapped = [case.draft[1][:1], case.draft[0].expand(3, -1)]
    assert deviation(rule, case, declared=Case(case.target, swapped)) > 1e-2


def filtered(probs: torch.Tensor, top_k: int, top_p: float, chained: bool) -> torch.Tensor:
    """Filter every row; if `chained`, top_p applies to the renormalised top_k tokens."""
    ordered, ids = probs.sort(dim=1, descending=True)
    seen = ordered.clone()
    if chained:
        seen[:, top_k:] = 0
        seen /= seen.sum(dim=1, keepdim=True)
    kept = (seen.cumsum(dim=1) - seen <= top_p) & (torch.arange(probs.shape[1]) < top_k)
    kept = torch.where(kept, ordered, 0)
    return torch.zeros_like(probs).scatter(1, ids, kept / kept.sum(dim=1, keepdim=True))


@pytest.mark.parametrize("rule", RULES)
def test_a_chained_filter_is_caught(rule):
    """A chained filter deviates for top_k = 3 and top_p = 0.8.

    The third token survives the joint filter (0.7 of the mass comes before it), but not the chained one
    (0.7 / 0.85 = 0.82). In half of the contexts both filters agree.
    """
    rng = np.random.default_rng(0)
    shapes = torch.tensor([[0.4, 0.3, 0.15, 0.15], [0.6, 0.3, 0.06, 0.04]], dtype=torch.float64)
    raw = [torch.stack([shapes[rng.integers(2)][rng.permutation(4)] for _ in range(4**k)]) for k in range(3)]
    raw[0][0] = shapes[0]
    draft = random_case(1, 4, 3, "chain").draft
    joint, chained = (Case([filtered(t, 3, 0.8, chain) for t in raw], draft) for chain in (False, True))
    assert deviation(rule, joint) < 1e-9
    assert deviation(rule, joint, declared=chained) > 1e-2


def rejection_with_the_targets_draw(block, target_probs, draft, accept_uniforms, final_uniforms):
    """Draw from p after a rejection, not from the residual of p and q."""
    kept = accept_by_rejection(block, target_probs, draft, accept_uniforms, final_uniforms).accept_len
    bonus = draw_by_inverse_cdf(target_probs[torch.arange(len(block)), kept.long()], final_uniforms)
    return Decision(kept, block, bonus)


def block_verification_without_weights(block, target_probs, draft, accept_uniforms, final_uniforms):
    """Use the residual of rejection in block verification."""
    verdict = accept_by_block_verification(block, target_probs, draft, accept_uniforms, final_uniforms)
    kept, rows = verdict.accept_len, torch.arange(len(block))
    mass = target_probs[rows, kept.long()]
    drafted = torch.nn.functional.pad(draft.probs, (0, 0, 0, 1))[rows, kept.long()]  # column c is token c
    return Decision(kept, block, draw_by_inverse_cdf((mass - drafted).clamp(min=0), final_uniforms))


@pytest.mark.parametrize("wrong_rule", [rejection_with_the_targets_draw, block_verification_without_weights])
def test_a_wrong_rule_is_caught(wrong_rule):
    assert max(deviation(wrong_rule, random_case(seed, 4, 3, "chain")) for seed in range(3)) > 1e-2


# -- expected accept lengths


def expected_lengths(case: Case) -> tuple[float, float]:
    """Compute both rules' expected accept lengths by their papers' formulas.

    Rejection accepts the first k tokens with probability prod min(1, p / q). Block verification accepts them
    with probability w_k, the most that any rule can reach (Sun et al. 2024).
    """
    means, weights = [0.0, 0.0], [torch.ones(1, dtype=torch.float64)] * 2
    for k, draft in enumerate(case.draft):
        ratio = torch.where(draft > 0, case.target[k] / draft, 0)
        one_by_one = (weights[0][:, None] * ratio.clamp(max=1)).flatten()
        joint = (weights[1][:, None] * ratio).clamp(max=1).flatten()
        weights = [one_by_one, joint]
        chance = sequence_law(case.draft[: k + 1])
        means = [mean + (chance * weight).sum().item() for mean, weight in zip(means, weights, strict=True)]
    return tuple(means)


@pytest.mark.parametrize("kind", KINDS)
def test_expected_lengths(kind):
    """Block verification gains length on sampled drafts, and none on one-hot drafts."""
    gains = []
    for seed in range(6):
        case = random_case(seed, 3, 4, kind)
        found = [output_law(rule, case)[1] for rule in RULES]
        assert found == pytest.approx(expected_lengths(case), abs=1e-9)
        gains.append(found[1] - found[0])
    assert min(gains) > -1e-9
    if kind == "one-hot":
        assert max(gains) < 1e-9
    else:
        assert max(gains) > 1e-3


def test_the_example_of_the_paper():
    """Reproduce the first example of Sun et al. 2024: q = (2/3, 1/3), p = (1/3, 2/3)."""
    table = torch.tensor([[1 / 3, 2 / 3]], dtype=torch.float64)
    case = Case([table.expand(2**k, 2) for k in range(3)], [1 - table.expand(2**k, 2) for k in range(2)])
    assert [output_law(rule, case)[1] for rule in RULES] == pytest.approx([10 / 9, 11 / 9], abs=1e-9)
