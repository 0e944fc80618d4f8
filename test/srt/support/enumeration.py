"""Exact output distributions of the rules that know the draft's probabilities.

A target over a tiny vocabulary is a table per block position: for every prefix, the distribution of the
next token. A draft is another table. Every draft is followed with its probability. A rule's uniforms are
integrated exactly: its outcome only changes if a uniform crosses a threshold, and bisecting the rule finds
the thresholds. One block is enough, as the next one starts from a prefix that is already the target's: the
rest of the block is drawn from the target, so that all sequences have B tokens.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from support.decisions import Decision

from sglang_dflash.srt.layers.draft_probs import DraftProbs

LAST = 1 - 2**-24  # the largest float32 below 1
HALVINGS = 40


@dataclass
class Case:
    """A target and a draft.

    Attributes:
        target: target[k] is [V**k, V] float64, the next token after k tokens.
        draft: draft[k] is the same for slot k + 1.
    """

    target: list[torch.Tensor]
    draft: list[torch.Tensor]


def random_table(rng, prefixes: int, vocabulary: int) -> torch.Tensor:
    """Return [prefixes, vocabulary] distributions; some tokens are impossible or certain."""
    weights = rng.exponential(size=(prefixes, vocabulary)) ** rng.choice([0.3, 1, 2], size=(prefixes, 1))
    weights[rng.random(weights.shape) < 0.12] = 0
    weights[weights.sum(axis=1) == 0, 0] = 1
    return torch.tensor(weights / weights.sum(axis=1, keepdims=True))


def random_case(seed: int, vocabulary: int, width: int, kind: str) -> Case:
    """Return a random case.

    kind: "chain", a draft that knows its own prefix; "marginals", one that does not, as DFlash; "one-hot";
    "half", drawn in the first slots and one-hot in the others; "near", a chain close to the target, here and
    there equal.
    """
    rng = np.random.default_rng(seed)
    target = [random_table(rng, vocabulary**k, vocabulary) for k in range(width)]
    draft = []
    for k in range(width - 1):
        own_prefixes = vocabulary**k if kind in ("chain", "near") else 1
        table = random_table(rng, own_prefixes, vocabulary).expand(vocabulary**k, -1)
        if kind == "one-hot" or (kind == "half" and k >= (width - 1) / 2):
            table = torch.nn.functional.one_hot(table.argmax(dim=1), vocabulary).double()
        if kind == "near":
            pull = torch.tensor(rng.choice([0, 0.1, 0.5], size=(len(table), 1)))
            table = pull * table + (1 - pull) * target[k]
        draft.append(table)
    return Case(target, draft)


def sequence_law(tables: list[torch.Tensor]) -> torch.Tensor:
    """Return the probability of every sequence, [V**len(tables)]."""
    law = torch.ones(1, dtype=torch.float64)
    for table in tables:
        law = (law[:, None] * table).flatten()
    return law


def as_list(probs: torch.Tensor) -> DraftProbs:
    """Return candidate lists [n, B - 1, V] whose column c is token c."""
    return DraftProbs(torch.arange(probs.shape[2]).expand(probs.shape), probs)


def as_shuffled_list(probs: torch.Tensor) -> DraftProbs:
    """Return candidate lists in random order; impossible tokens become extra padding."""
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(probs.shape, generator=generator).argsort(dim=2)
    probs = probs.gather(2, order)
    anything = torch.randint(probs.shape[2], (*probs.shape[:2], probs.shape[2] + 2), generator=generator)
    ids = torch.where(probs > 0, order, anything[..., 2:])
    return DraftProbs(
        torch.cat([anything[..., :2], ids], dim=2), torch.nn.functional.pad(probs, (2, 0), value=0)
    )


def bisect(unchanged, shape) -> torch.Tensor:
    """Return the largest level in [0, 1], per entry, at which `unchanged` holds."""
    low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        same = unchanged(middle)
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return (low + high) / 2


def accept_thresholds(rule, n: int, slots: int) -> torch.Tensor:
    """Return the uniform of each slot at which accept lengths change, [n, slots]; 1 if never.

    rule: (accept_uniforms [m, n, slots], final_uniforms [m, n]) -> Decision with leading [m, n].
    """
    thresholds = torch.ones(n, slots, dtype=torch.float64)
    for slot in range(slots):
        others = list(itertools.product([0.0, LAST], repeat=slots - 1))
        patterns = torch.tensor([[*o[:slot], 0.0, *o[slot:]] for o in others], dtype=torch.float64)
        uniforms = patterns[:, None].repeat(1, n, 1)
        final = torch.zeros(len(patterns), n)
        longest = rule(uniforms, final).accept_len

        def unchanged(levels, slot=slot, uniforms=uniforms, final=final, longest=longest):
            uniforms[..., slot] = levels
            return rule(uniforms, final).accept_len == longest

        found = bisect(unchanged, longest.shape)
        visible = ~unchanged(torch.tensor(LAST))
        # One uniform has one threshold, whatever the others are.
        lowest = torch.where(visible, found, 1).amin(dim=0)
        assert ((found - lowest).abs() < 1e-9)[visible].all()
        thresholds[:, slot] = lowest
    return thresholds


def output_law(rule, case: Case, declared=None, dtype=torch.float64, listed=as_list):
    """Return ([V**B] probability of every output sequence, expected accept length) of a rule.

    rule: as `accept_by_rejection`. declared: the case passed to the rule, if it is not the true one.
    """
    declared = declared or case
    width, vocabulary = len(case.target), case.target[0].shape[1]
    slots = width - 1
    drafts = torch.tensor(list(itertools.product(range(vocabulary), repeat=slots)))
    n = len(drafts)
    prefixes = [torch.arange(n) // vocabulary ** (slots - k) for k in range(width)]  # of k tokens
    target_probs = torch.stack([declared.target[k][prefixes[k]] for k in range(width)], dim=1).to(dtype)
    draft_probs = torch.stack([declared.draft[k][prefixes[k]] for k in range(slots)], dim=1).to(dtype)
    draft = listed(draft_probs)
    block = torch.cat([torch.zeros(n, 1, dtype=torch.int64), drafts], dim=1)

    def rule_of_many(accept_uniforms: torch.Tensor, final_uniforms: torch.Tensor) -> Decision:
        m = len(accept_uniforms)
        verdict = rule(
            block.repeat(m, 1),
            target_probs.repeat(m, 1, 1),
            DraftProbs(draft.ids.repeat(m, 1, 1), draft.probs.repeat(m, 1, 1)),
            accept_uniforms.flatten(0, 1),
            final_uniforms.flatten(),
        )
        fields = verdict.accept_len, verdict.out_tokens, verdict.bonus
        return Decision(*[field.unflatten(0, (m, n)) for field in fields])

    thresholds = accept_thresholds(rule_of_many, n, slots)
    # One uniform from each side of each threshold, weighted with the width of that side.
    below = torch.tensor(list(itertools.product([True, False], repeat=slots)))[:, None]
    uniforms = torch.where(below, thresholds / 2, (thresholds + 1) / 2)
    cells = torch.where(below, thresholds, 1 - thresholds).prod(dim=2) * sequence_law(case.draft)
    shape = cells.shape
    accept_len = rule_of_many(uniforms, torch.zeros(shape)).accept_len

    steps = [torch.zeros(shape, dtype=torch.float64)]
    for token in range(vocabulary - 1):
        steps.append(bisect(lambda level, token=token: rule_of_many(uniforms, level).bonus <= token, shape))
    steps.append(torch.ones(shape, dtype=torch.float64))

    law = torch.zeros(1, dtype=torch.float64)
    for length in range(width):
        here = torch.where(accept_len == length, cells, 0).sum(dim=0)
        ends = torch.zeros(vocabulary**length, vocabulary, dtype=torch.float64)
        for token in range(vocabulary):
            mass = torch.where(accept_len == length, cells * (steps[token + 1] - steps[token]), 0).sum(dim=0)
            ends[:, token].index_add_(0, prefixes[length], mass)
        assert (ends.sum() - here.sum()).abs() < 1e-9
        law = (law[:, None] * case.target[length]).flatten() + ends.flatten()
    return law, (cells * accept_len).sum().item()


def deviation(rule, case: Case, **options) -> float:
    """Return the largest difference of a sequence's probability from the target's."""
    law, _ = output_law(rule, case, **options)
    assert abs(law.sum().item() - 1) < 1e-6
    return (law - sequence_law(case.target)).abs().max().item()


def is_valid(block: torch.Tensor, target_probs: torch.Tensor, draft: DraftProbs) -> torch.Tensor:
    """Return the requests that a rule may get, [bs] bool.

    Distributions sum to 1 (within 1e-3), and every drafted token could have been drawn.
    """
    valid = (draft.prob_of(block[:, 1:]) > 0).all(dim=1)
    for probs in (target_probs, draft.probs):
        sums_to_one = (probs.sum(dim=2) - 1).abs() < 1e-3  # false for NaN
        valid &= sums_to_one.all(dim=1) & (probs >= 0).flatten(1).all(dim=1)
    return valid
