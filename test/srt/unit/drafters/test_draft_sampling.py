"""Drafted tokens come from the declared distribution, and it is the intended one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.decisions import accept_by_block_verification, accept_by_rejection, accept_matching_prefix
from support.enumeration import LAST, Case, bisect, deviation, is_valid, random_case

from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.drafters.sampling import choose_tokens, top_candidates

NO_LIMIT = 1 << 30  # what SGLang makes of top_k = -1
WHOLE = 1000  # candidates


def dense(draft: DraftProbs, vocabulary: int) -> torch.Tensor:
    """Return dense probabilities [bs, B - 1, vocabulary] float32."""
    return torch.zeros(*draft.ids.shape[:2], vocabulary).scatter(2, draft.ids, draft.probs)


def draw(logits, uniforms=None, temperature=1.0, top_k=NO_LIMIT, top_p=1.0, candidates=WHOLE, d2t=None):
    """Draft from logits [bs, B - 1, V]; parameters are shared, or lists with one per request."""
    bs, slots = logits.shape[:2]
    uniforms = torch.zeros(bs, slots) if uniforms is None else uniforms

    def column(value, dtype):
        return torch.tensor(value if isinstance(value, list) else [value] * bs, dtype=dtype)

    temperature, top_k = column(temperature, torch.float32), column(top_k, torch.int32)
    ids, probs = top_candidates(logits.flatten(0, 1), temperature.repeat_interleave(slots), candidates)
    return choose_tokens(ids, probs, top_k, column(top_p, torch.float32), uniforms, d2t)


def intended(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, candidates: int
) -> torch.Tensor:
    """Return one slot's distribution, token by token: logits [V] -> [V]."""
    probs = (logits.double() / temperature).softmax(dim=0).tolist()
    kept, before = [0.0] * len(probs), 0.0
    for rank, token in enumerate(sorted(range(len(probs)), key=lambda token: -probs[token])):
        if rank < min(top_k, candidates) and before <= top_p:
            kept[token] = probs[token]
        before += probs[token]
    return torch.tensor(kept) / sum(kept)


@pytest.mark.parametrize(
    "temperature, top_k, top_p, candidates",
    [
        (1.0, NO_LIMIT, 1.0, 1000),
        (0.7, NO_LIMIT, 1.0, 1000),
        (1.0, 4, 1.0, 1000),
        (1.0, NO_LIMIT, 0.7, 1000),
        (1.3, 5, 0.7, 1000),
        (1.0, 5, 0.9, 3),
        (1.0, NO_LIMIT, 1.0, 4),
        (2.0, 12, 0.0, 1000),
        (1.0, 1, 1.0, 1000),
        (100.0, NO_LIMIT, 1.0, 1000),
        (1e-6, NO_LIMIT, 1.0, 1000),
    ],
)
def test_the_distribution_is_the_intended_one(temperature, top_k, top_p, candidates):
    logits = 3 * torch.randn(4, 3, 12, generator=torch.Generator().manual_seed(0))
    _, draft = draw(logits, None, temperature, top_k, top_p, candidates)
    assert draft.probs.dtype == torch.float32
    assert draft.ids.shape == (4, 3, min(candidates, 12))
    expected = torch.stack(
        [intended(row, temperature, top_k, top_p, candidates) for row in logits.flatten(0, 1)]
    )
    assert torch.allclose(dense(draft, 12).flatten(0, 1), expected, atol=1e-6)


@pytest.mark.parametrize("candidates", [WHOLE, 3, 4])
def test_tokens_are_drawn_from_the_declared_distribution(candidates):
    """Uniforms are integrated exactly: a token's interval is as long as its probability."""
    logits = 2 * torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(1))
    _, draft = draw(logits, None, 0.8, 4, 0.95, candidates)

    def rank_at(levels):
        tokens, again = draw(logits, levels, 0.8, 4, 0.95, candidates)
        assert torch.equal(again.probs, draft.probs) and torch.equal(again.ids, draft.ids)
        return (draft.ids == tokens[..., None]).int().argmax(dim=2)

    ranks = range(draft.ids.shape[2])
    steps = [bisect(lambda levels, rank=rank: rank_at(levels) <= rank, (3, 2)) for rank in ranks]
    lengths = torch.stack(steps, dim=2).diff(dim=2, prepend=torch.zeros(3, 2, 1))
    assert torch.allclose(lengths, draft.probs.double(), atol=1e-7)


@pytest.mark.parametrize("rule", [accept_by_rejection, accept_by_block_verification])
@pytest.mark.parametrize("temperature, candidates", [(1.0, WHOLE), (0.3, WHOLE), (0.5, 2), (1.0, 1)])
def test_every_proposal_is_lossless(temperature, candidates, rule):
    """Marginals as a DFlash draft has them, 4 tokens, 3 drafted slots; by enumeration."""
    target = random_case(5, 4, 4, "chain").target
    logits = 2 * torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(2))
    probs = dense(draw(logits, temperature=temperature, candidates=candidates)[1], 4)[0].double()
    probs /= probs.sum(dim=1, keepdim=True)
    assert deviation(rule, Case(target, [probs[k].expand(4**k, 4) for k in range(3)])) < 1e-9


def test_greedy_requests_draft_the_argmax_next_to_others():
    logits = torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(4))
    for uniforms in (torch.zeros(4, 6), torch.full((4, 6), LAST), torch.rand(4, 6)):
        tokens, draft = draw(
            logits, uniforms, [1.0, 5.0, 1.0, 0.5], [1, NO_LIMIT, 1, 3], [1.0, 1.0, 0.3, 1.0]
        )
        best = logits[::2].argmax(dim=2)
        assert torch.equal(tokens[::2], best)
        assert torch.equal(dense(draft, 9)[::2], torch.nn.functional.one_hot(best, 9).float())
        # Their blocks are then verified as without any draft probabilities.
        certain = torch.nn.functional.one_hot(torch.randint(9, (4, 7)), 9).float()
        block = torch.nn.functional.pad(tokens, (1, 0))
        verdict = accept_by_rejection(block, certain, draft, uniforms, uniforms[:, 0])
        plain = accept_matching_prefix(block, certain.argmax(dim=2))
        assert torch.equal(verdict.accept_len, plain.accept_len) and torch.equal(verdict.bonus, plain.bonus)


def test_a_reduced_vocabulary():
    """Draft tokens 0, 1, 2, 3 are the target's 2, 3, 7, 8: the same draw, renamed."""
    d2t = torch.tensor([2, 2, 5, 5])
    logits, uniforms = torch.randn(3, 2, 4), torch.rand(3, 2)
    tokens, draft = draw(logits, uniforms)
    named, renamed = draw(logits, uniforms, d2t=d2t)
    assert torch.equal(named, tokens + d2t[tokens])
    assert torch.equal(dense(renamed, 9)[..., [2, 3, 7, 8]], dense(draft, 4))
    assert set(renamed.ids.unique().tolist()) == {2, 3, 7, 8}


@given(st.data())
def test_a_draft_makes_sense(data):
    bs, slots, vocabulary = (data.draw(st.integers(1, top)) for top in (4, 4, 7))
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    logits = torch.randn(bs, slots, vocabulary) * data.draw(st.sampled_from([0.0, 1.0, 30.0]))
    logits[torch.rand(logits.shape) < 0.2] = -torch.inf
    logits[..., 0] = logits[..., 0].clamp(min=-50)  # as when a mask leaves at least one token
    levels = [torch.rand(bs, slots), torch.zeros(bs, slots), torch.full((bs, slots), LAST)]
    uniforms = data.draw(st.sampled_from(levels))

    def each(values):
        return data.draw(st.lists(st.sampled_from(values), min_size=bs, max_size=bs))

    parameters = each([1e-6, 0.3, 1.0, 100.0]), each([1, 2, 5, 1000, NO_LIMIT]), each([0.0, 0.5, 0.999, 1.0])
    candidates = data.draw(st.sampled_from([1, 3, WHOLE]))
    tokens, draft = draw(logits, uniforms, *parameters, candidates)
    assert (tokens.shape, tokens.dtype) == ((bs, slots), torch.int64)
    anything = torch.full((bs, slots + 1, vocabulary), 1 / vocabulary)
    assert is_valid(torch.nn.functional.pad(tokens, (1, 0)), anything, draft).all()
    for row in range(bs):
        mine = slice(row, row + 1)
        alone, own = draw(logits[mine], uniforms[mine], *[p[mine] for p in parameters], candidates)
        assert torch.equal(alone, tokens[mine]) and torch.equal(own.probs, draft.probs[mine])


@pytest.mark.parametrize("parameters", [(1.0, NO_LIMIT, 1.0), (1e-6, 3, 0.5), (100.0, NO_LIMIT, 0.9)])
@pytest.mark.parametrize("where", [4, slice(None)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_logits_still_draw_from_what_is_declared(bad, where, parameters):
    logits, uniforms = torch.randn(3, 2, 6), torch.rand(3, 2)
    each = [[value] * 3 for value in parameters]
    good, _ = draw(logits.clone(), uniforms, *each)
    logits[1, 1, where] = bad
    tokens, draft = draw(logits, uniforms, *each)
    assert torch.equal(tokens[::2], good[::2])
    assert is_valid(torch.nn.functional.pad(tokens, (1, 0)), torch.full((3, 3, 6), 1 / 6), draft).all()


@pytest.mark.parametrize("bs, slots", [(0, 3), (2, 0), (0, 0)])
def test_nothing_to_draft(bs, slots):
    tokens, draft = draw(torch.zeros(bs, slots, 5))
    assert tokens.shape == (bs, slots)
    assert draft.ids.shape == draft.probs.shape == (bs, slots, 5)
