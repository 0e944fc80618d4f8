"""The greedy acceptance rule keeps the right tokens and the target's exact distribution."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.decisions import accept_matching_prefix, decide
from support.enumeration import random_case, sequence_law


def accept_by_loop(block: list[int], target_tokens: list[int]) -> tuple[int, int]:
    """Return (drafts kept, bonus token) of one request."""
    kept = 0
    for drafted, wanted in zip(block[1:], target_tokens[:-1], strict=True):
        if drafted != wanted:
            break
        kept += 1
    return kept, target_tokens[kept]


@st.composite
def batches(draw):
    """Draw (block, target_tokens), both [bs, B]; prefixes match by chance."""
    bs, width = draw(st.integers(1, 6)), draw(st.integers(1, 17))
    rows = st.lists(st.lists(st.integers(0, 2), min_size=width, max_size=width), min_size=bs, max_size=bs)
    return torch.tensor(draw(rows)), torch.tensor(draw(rows))


@given(batches())
def test_against_a_plain_loop(batch):
    block, target_tokens = batch
    verdict = accept_matching_prefix(block, target_tokens)
    assert verdict.accept_len.dtype == torch.int32
    assert verdict.out_tokens.dtype == verdict.bonus.dtype == torch.int64
    expected = [accept_by_loop(*rows) for rows in zip(block.tolist(), target_tokens.tolist(), strict=True)]
    assert list(zip(verdict.accept_len.tolist(), verdict.bonus.tolist(), strict=True)) == expected
    for row, kept in enumerate(verdict.accept_len.tolist()):
        new_tokens = verdict.out_tokens[row, : kept + 1].tolist()
        assert new_tokens == [*block[row, 1 : kept + 1].tolist(), verdict.bonus[row].item()]


@pytest.mark.parametrize("width", [1, 2, 16])
def test_everything_and_nothing_kept(width):
    """The bonus token is extra: a perfect block of B yields B tokens, a wrong one 1."""
    right = torch.arange(10, 10 + width)[None]
    block = torch.cat([torch.tensor([[5]]), right[:, :-1]], dim=1)
    perfect = accept_matching_prefix(block, right)
    assert (perfect.accept_len.item(), perfect.bonus.item()) == (width - 1, 10 + width - 1)
    wrong = accept_matching_prefix(block + 100, right)
    assert (wrong.accept_len.item(), wrong.bonus.item()) == (0, 10)


# -- losslessness, by enumeration

VOCABULARY, WIDTH = 3, 4


def deviation(accept, seed: int) -> float:
    """Return the largest difference of a sequence's probability from the target's.

    Every outcome of the target's draws after the slots of a block is followed with its probability. One block
    is enough, as the next one starts from a prefix that is already the target's.

    accept: (blocks, draws) -> Decision, as `accept_matching_prefix`.
    """
    case = random_case(seed, VOCABULARY, WIDTH, "one-hot")
    drafted = [int(table[0].argmax()) for table in case.draft]
    draws = torch.tensor([*itertools.product(range(VOCABULARY), repeat=WIDTH)])
    chances, prefix = torch.ones(len(draws), dtype=torch.float64), 0
    for table, slot, token in zip(case.target, draws.T, [*drafted, 0], strict=True):
        chances *= table[prefix, slot]  # whether the tokens before the slot are kept or not
        prefix = prefix * VOCABULARY + token
    verdict = accept(torch.tensor([[0, *drafted]]).expand(len(draws), -1), draws)
    expected = sequence_law(case.target).view([VOCABULARY] * WIDTH)
    found = torch.zeros_like(expected)
    for chance, kept, tokens in zip(chances, verdict.accept_len.tolist(), verdict.out_tokens.tolist()):
        emitted = tuple(tokens[: kept + 1])
        rest = expected[emitted]
        found[emitted] += chance * (rest / rest.sum()).nan_to_num()
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("cap", range(WIDTH))
def test_sampled_verification_leaves_the_targets_distribution(cap):
    """The largest cap caps nothing."""

    def capped(block, draws):
        verdict = accept_matching_prefix(block, draws)
        return decide(verdict.accept_len.clamp(max=cap), verdict.out_tokens)

    for seed in range(12):
        assert deviation(capped, seed) < 1e-9, seed


def keep_one_too_many(block, draws):
    """Also keep the first differing draft."""
    kept = (accept_matching_prefix(block, draws).accept_len + 1).clamp(max=WIDTH - 1)
    return decide(kept, torch.cat([block[:, 1:], draws[:, -1:]], dim=1))


def count_late_matches(block, draws):
    """Also count matches after a mismatch."""
    return decide((block[:, 1:] == draws[:, :-1]).sum(dim=1, dtype=torch.int32), draws)


@pytest.mark.parametrize("wrong_rule", [keep_one_too_many, count_late_matches])
def test_a_wrong_rule_is_caught(wrong_rule):
    assert max(deviation(wrong_rule, seed) for seed in range(12)) > 1e-2
