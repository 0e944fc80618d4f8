"""Any verify length chosen before a token is drawn is lossless; one chosen by the drawn token is not.

Many requests are simulated at once with the acceptance rules of the project, over a vocabulary small enough
that the target's probability of every sequence is known. A request's width may differ in every cycle and from
its neighbours'. The chi-square test compares the emitted sequences with the target's distribution. Verifying
by the drawn token must fail it.
"""

import itertools

import pytest
import torch
from scipy.stats import chi2
from support.decisions import accept_by_rejection, accept_matching_prefix, decide, rule_of

from sglang_dflash.srt.layers.draft_probs import DraftProbs, draw_by_inverse_cdf
from sglang_dflash.srt.speculative.acceptance.rejection import REJECTION_RULES
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout

FALSE_ALARM = 1e-6
REQUESTS, LENGTH, VOCABULARY, BLOCK = 60_000, 4, 2, 4
# The next token's distribution after token 0 and after token 1; a draft per slot, given only the anchor.
TARGET = torch.tensor([[0.9, 0.1], [0.35, 0.65]])
DRAFT = torch.tensor(
    [[[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]], [[0.35, 0.65], [0.5, 0.5], [0.7, 0.3]]]
)  # [anchor, slot, token]


NOBODY = torch.zeros(REQUESTS, dtype=torch.bool)


def by_schedule(cycle, anchor, accepted, drafted):
    return torch.full_like(anchor, (4, 1, 2, 3, 1)[cycle % 5])


def by_history(cycle, anchor, accepted, drafted):
    """By the previous accept length, as acceptance estimates do."""
    return (accepted + 1 + anchor).clamp(1, BLOCK)


def by_confidence(cycle, anchor, accepted, drafted):
    """By the draft's own probabilities of a slot, before anything is drawn from it."""
    is_sure = DRAFT[anchor].amax(dim=2) > 0.65
    return 1 + is_sure.int().cumprod(dim=1).sum(dim=1)


def by_pooled_rank(cycle, anchor, accepted, drafted):
    """By the draft's probabilities, with a budget of rows that all requests share: half of their slots."""
    survival = DRAFT[anchor].amax(dim=2).cumprod(dim=1).double()
    pooled = survival - 1e-9 * torch.arange(survival.numel()).view_as(survival)  # equals by position
    budget = pooled.flatten().topk(pooled.numel() // 2).values[-1]
    return 1 + (pooled >= budget).sum(dim=1)


def by_budget_of_drawn_tokens(cycle, anchor, accepted, drafted):
    """A trap: the length with most tokens for its cost, by what the drawn tokens were given."""
    given = DRAFT[anchor].gather(2, drafted[..., None]).squeeze(2)
    tokens = 1 + torch.nn.functional.pad(given.cumprod(dim=1).cumsum(dim=1), (1, 0))
    return 1 + (tokens / torch.tensor([1.0, 1.55, 1.75, 2.4])).argmax(dim=1)


def by_drawn_token(cycle, anchor, accepted, drafted):
    """The trap: verify only drawn tokens that are likely, otherwise take the target's own sample."""
    is_likely = DRAFT[anchor].gather(2, drafted[..., None]).squeeze(2) > 0.5
    return 1 + is_likely.int().cumprod(dim=1).sum(dim=1)


def rejection(rule):
    """Run a rule on drawn drafts, and on copies, which have probability 1."""

    def accept(block, rows, anchor, is_copy):
        uniforms = torch.rand(len(block), BLOCK)
        certain = torch.nn.functional.one_hot(block[:, 1:], VOCABULARY).float()
        probs = torch.where(is_copy[:, None, None], certain, DRAFT[anchor])
        draft = DraftProbs(torch.arange(VOCABULARY).expand(probs.shape), probs)
        return rule(block, rows.to_rows(TARGET[block]), draft, uniforms[:, 1:], uniforms[:, 0], layout=rows)

    return accept


def draw_from_target(block, rows, anchor, is_copy):
    """One-hot drafts: compare drafted tokens with a draw from the target."""
    draws = rows.to_blocks(torch.multinomial(rows.to_rows(TARGET[block]), 1).squeeze(1))
    found = accept_matching_prefix(block, draws)
    limits = found.accept_len if rows.is_rectangle else rows.max_accept
    return decide(found.accept_len.minimum(limits), draws)


def sequences(choose_width, accept, is_copy: torch.Tensor = NOBODY) -> torch.Tensor:
    """Return the emitted tokens after a token 0. [REQUESTS, LENGTH]

    is_copy: requests that propose what followed the anchor before, or itself; the others draw from the draft.
    """
    emitted = torch.zeros(REQUESTS, LENGTH + BLOCK, dtype=torch.int64)
    length = torch.zeros(REQUESTS, dtype=torch.int64)
    anchor, accepted = torch.zeros_like(length), torch.zeros_like(length)
    followed = torch.arange(VOCABULARY).repeat(REQUESTS, 1)  # by request and token
    for cycle in range(LENGTH):
        uniforms = torch.rand(REQUESTS * (BLOCK - 1))
        drafted = draw_by_inverse_cdf(DRAFT[anchor].flatten(0, 1), uniforms).view(REQUESTS, -1)
        drafted = torch.where(is_copy[:, None], followed.gather(1, anchor[:, None]), drafted)
        widths = choose_width(cycle, anchor, accepted, drafted)
        block = torch.cat([anchor[:, None], drafted], dim=1)
        running = torch.nonzero(length < LENGTH).squeeze(1)
        block, layout = block[running], VerifyLayout(len(running), BLOCK, widths[running].numpy() - 1)
        blocks = accept(block, layout, anchor[running], is_copy[running])
        columns = length[running][:, None] + torch.arange(BLOCK)
        emitted[running[:, None], columns] = blocks.out_tokens
        followed[running, anchor[running]] = blocks.out_tokens[:, 0]
        accepted[running], anchor[running] = blocks.accept_len.long(), blocks.bonus
        length[running] += accepted[running] + 1
    assert (length >= LENGTH).all()
    return emitted[:, :LENGTH]


def p_value(tokens: torch.Tensor) -> float:
    code = (tokens * VOCABULARY ** torch.arange(LENGTH)).sum(dim=1)
    counts = torch.bincount(code, minlength=VOCABULARY**LENGTH)
    probabilities = torch.zeros(VOCABULARY**LENGTH, dtype=torch.float64)
    for sequence in itertools.product(range(VOCABULARY), repeat=LENGTH):
        probabilities[sum(token * VOCABULARY**k for k, token in enumerate(sequence))] = (
            torch.tensor([TARGET[before, token] for before, token in zip((0, *sequence), sequence)])
            .double()
            .prod()
        )
    mean = probabilities * len(tokens)
    assert mean.min() > 8
    return float(chi2.sf(((counts - mean) ** 2 / mean).sum().item(), len(probabilities) - 1))


ACCEPT = {name: rejection(rule_of(name)) for name in REJECTION_RULES} | {"one-hot": draw_from_target}


@pytest.mark.parametrize("choose_width", [by_schedule, by_history, by_confidence, by_pooled_rank])
@pytest.mark.parametrize("accept", ACCEPT.values(), ids=ACCEPT)
def test_any_width_known_beforehand_is_lossless(choose_width, accept):
    torch.manual_seed(0)
    p = p_value(sequences(choose_width, accept))
    assert p > FALSE_ALARM, f"not the target's distribution, p = {p:.2g}"


@pytest.mark.parametrize("accept", ACCEPT.values(), ids=ACCEPT)
def test_a_width_by_the_copied_token_is_lossless(accept):
    """The text determines a copy: it is known before anything is drawn. Neighbours draw their blocks."""
    torch.manual_seed(0)
    is_copy = torch.arange(REQUESTS) % 2 == 0

    def by_copied_token(cycle, anchor, accepted, drafted):
        widths = 1 + (drafted == anchor[:, None]).sum(dim=1).clamp(max=2) + accepted.clamp(max=1)
        return torch.where(is_copy, widths, by_history(cycle, anchor, accepted, drafted))

    emitted = sequences(by_copied_token, accept, is_copy)
    p = min(p_value(emitted[is_copy]), p_value(emitted[~is_copy]))
    assert p > FALSE_ALARM, f"not the target's distribution, p = {p:.2g}"


@pytest.mark.parametrize("choose_width", [by_drawn_token, by_budget_of_drawn_tokens])
def test_verifying_by_the_drawn_token_is_not_lossless(choose_width):
    """Draft and target agree on the first slot, and still the likely token is emitted too often."""
    torch.manual_seed(0)
    p = p_value(sequences(choose_width, rejection(accept_by_rejection)))
    assert p < FALSE_ALARM, f"trimming by the drawn token passes, p = {p:.2g}"
