"""The greedy acceptance rule keeps the right tokens and the target's exact distribution."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.decisions import Decision, accept_matching_prefix


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
    expected = [accept_by_loop(*rows) for rows in zip(block.tolist(), target_tokens.tolist(), strict=True)]
    assert list(zip(verdict.accept_len.tolist(), verdict.bonus.tolist(), strict=True)) == expected
    for row, kept in enumerate(verdict.accept_len.tolist()):
        new_tokens = verdict.out_tokens[row, : kept + 1].tolist()
        assert new_tokens == [*block[row, 1 : kept + 1].tolist(), verdict.bonus[row].item()]


def test_shapes_and_dtypes():
    verdict = accept_matching_prefix(
        torch.zeros(3, 8, dtype=torch.int64), torch.zeros(3, 8, dtype=torch.int64)
    )
    assert (verdict.accept_len.shape, verdict.accept_len.dtype) == ((3,), torch.int32)
    assert (verdict.out_tokens.shape, verdict.out_tokens.dtype) == ((3, 8), torch.int64)
    assert (verdict.bonus.shape, verdict.bonus.dtype) == ((3,), torch.int64)


@pytest.mark.parametrize("width", [1, 2, 16])
def test_everything_and_nothing_kept(width):
    """The bonus token is extra: a perfect block of B yields B tokens, a wrong one 1."""
    right = torch.arange(10, 10 + width)[None]
    block = torch.cat([torch.tensor([[5]]), right[:, :-1]], dim=1)
    perfect = accept_matching_prefix(block, right)
    assert (perfect.accept_len.item(), perfect.bonus.item()) == (width - 1, 10 + width - 1)
    wrong = accept_matching_prefix(block + 100, right)
    assert (wrong.accept_len.item(), wrong.bonus.item()) == (0, 10)


def test_a_late_match_does_not_count():
    verdict = accept_matching_prefix(torch.tensor([[0, 1, 9, 3]]), torch.tensor([[1, 2, 3, 4]]))
    assert (verdict.accept_len.item(), verdict.bonus.item()) == (1, 2)


# -- losslessness, by enumeration
#
# A target over a tiny vocabulary is a table: for every sequence of up to LENGTH tokens, the distribution of
# the next one. A draft is another table: for every sequence, its proposed block. Every outcome of every
# verify draw is followed with its probability. That gives the exact distribution of output sequences, which
# must be the target's own.

VOCABULARY, LENGTH, WIDTH = 3, 4, 3


def random_target(rng) -> dict[tuple, np.ndarray]:
    """Return next-token distributions by prefix; some tokens impossible, some certain."""
    sequences = [s for n in range(LENGTH) for s in itertools.product(range(VOCABULARY), repeat=n)]
    table = {}
    for sequence in sequences:
        weights = rng.exponential(size=VOCABULARY) ** 3
        weights[rng.random(VOCABULARY) < 0.2] = 0
        if weights.sum() == 0:
            weights[0] = 1
        table[sequence] = weights / weights.sum()
    return table


def random_draft(rng) -> dict[tuple, tuple[int, ...]]:
    sequences = [s for n in range(LENGTH) for s in itertools.product(range(VOCABULARY), repeat=n)]
    return {sequence: tuple(rng.integers(0, VOCABULARY, WIDTH - 1)) for sequence in sequences}


def target_distribution(target) -> dict[tuple, float]:
    """Return the probability of every sequence of LENGTH tokens under plain decoding."""
    result = {}
    for sequence in itertools.product(range(VOCABULARY), repeat=LENGTH):
        result[sequence] = float(np.prod([target[sequence[:i]][sequence[i]] for i in range(LENGTH)]))
    return result


def speculative_distribution(target, draft, accept) -> dict[tuple, float]:
    """Return the probability of every sequence under speculative decoding.

    accept: (blocks, draws) -> Decision, as `accept_matching_prefix`.
    """
    result = dict.fromkeys(itertools.product(range(VOCABULARY), repeat=LENGTH), 0.0)
    pending = {(0,): 1.0}  # (anchor, *output so far): the first anchor belongs to the prompt
    while pending:
        cycle, pending = pending, {}
        for (anchor, *output), probability in cycle.items():
            drafted = draft[tuple(output)]
            draws = list(itertools.product(range(VOCABULARY), repeat=WIDTH))
            # Slot k is drawn from the target's distribution after the output and the first k drafted tokens,
            # kept or not.
            prefixes = [(*output, *drafted[:k]) for k in range(WIDTH)]
            slots = [target[p] if len(p) < LENGTH else np.eye(VOCABULARY)[0] for p in prefixes]
            chances = [float(np.prod([slots[k][draw[k]] for k in range(WIDTH)])) for draw in draws]
            block = torch.tensor([[anchor, *drafted]]).expand(len(draws), -1)
            verdict: Decision = accept(block, torch.tensor(draws))
            for row, chance in enumerate(chances):
                if chance == 0:
                    continue
                new = verdict.out_tokens[row, : verdict.accept_len[row] + 1].tolist()
                grown = (*output, *new)[:LENGTH]
                if len(grown) == LENGTH:
                    result[grown] += probability * chance
                else:
                    key = (new[-1], *grown)
                    pending[key] = pending.get(key, 0.0) + probability * chance
    return result


def largest_difference(target, draft, accept) -> float:
    expected, found = target_distribution(target), speculative_distribution(target, draft, accept)
    assert abs(sum(found.values()) - 1) < 1e-9
    return max(abs(found[sequence] - expected[sequence]) for sequence in expected)


@pytest.mark.parametrize("seed", range(12))
def test_sampled_verification_leaves_the_targets_distribution(seed):
    rng = np.random.default_rng(seed)
    assert largest_difference(random_target(rng), random_draft(rng), accept_matching_prefix) < 1e-9


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("cap", range(WIDTH))
def test_a_cap_leaves_the_targets_distribution(seed, cap):
    def capped(block, draws):
        verdict = accept_matching_prefix(block, draws)
        return verdict._replace(accept_len=verdict.accept_len.clamp(max=cap))

    rng = np.random.default_rng(seed)
    assert largest_difference(random_target(rng), random_draft(rng), capped) < 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_a_good_and_a_hopeless_draft(seed):
    """One draft always proposes the likeliest token, the other one only impossible ones."""
    target = random_target(np.random.default_rng(seed))

    def follow(pick):
        blocks = {}
        for sequence in target:
            block = []
            for _ in range(WIDTH - 1):
                block.append(int(pick(target.get((*sequence, *block), np.ones(VOCABULARY)))))
            blocks[sequence] = tuple(block)
        return blocks

    for pick in (np.argmax, np.argmin):
        assert largest_difference(target, follow(pick), accept_matching_prefix) < 1e-9


def keep_one_too_many(block, draws):
    """Also keep the first differing draft."""
    kept = accept_matching_prefix(block, draws).accept_len
    kept = (kept + 1).clamp(max=block.shape[1] - 1)
    out = torch.cat([block[:, 1:], draws[:, -1:]], dim=1)
    rows = torch.arange(len(out))
    out[rows, kept.long()] = draws[rows, kept.long()]
    return Decision(kept, out, out[rows, kept.long()])


def count_late_matches(block, draws):
    """Also count matches after a mismatch."""
    kept = (block[:, 1:] == draws[:, :-1]).sum(dim=1, dtype=torch.int32)
    return Decision(kept, draws, draws.gather(1, kept.long()[:, None]).squeeze(1))


@pytest.mark.parametrize("wrong_rule", [keep_one_too_many, count_late_matches])
def test_a_wrong_rule_is_caught(wrong_rule):
    """The enumeration can fail."""
    generators = [np.random.default_rng(seed) for seed in range(12)]
    differences = [
        largest_difference(random_target(rng), random_draft(rng), wrong_rule) for rng in generators
    ]
    assert max(differences) > 1e-2
