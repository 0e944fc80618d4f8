"""The selector's filters, and its Triton kernel beside the PyTorch twin, on a GPU or in Triton's interpreter.

Walks are compared with a reference in unit/models/test_dflash2_model.py.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_inputs import NO_LIMIT, drawing, random_walk
from support.triton_interpreter import DEVICE, against_twin

from sglang_dflash.kernels.ops.speculative import selector_walk as kernels
from sglang_dflash.kernels.ops.speculative.selector_walk import Candidates, DrawInputs
from sglang_dflash.srt.layers.candidate_selector import slot_probs, walk_torch


@pytest.mark.parametrize(
    "temperature, top_k, top_p, min_p",
    [
        (1.0, NO_LIMIT, 1.0, 0.0),
        (0.5, NO_LIMIT, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (1.0, NO_LIMIT, 0.6, 0.0),
        (1.0, NO_LIMIT, 1.0, 0.3),
        (1.4, 4, 0.8, 0.1),
        (1.0, 1, 1.0, 0.0),
        (1.0, NO_LIMIT, 0.0, 0.0),
        (1.0, NO_LIMIT, 1.0, 1.0),
        (1e-6, NO_LIMIT, 1.0, 0.0),
        (100.0, NO_LIMIT, 1.0, 0.0),
    ],
)
def test_the_filters(temperature, top_k, top_p, min_p):
    """Compare with one joint filter on the unfiltered probabilities."""
    scores = 2 * torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    found = slot_probs(scores, drawing(8, 1, temperature, top_k, top_p, min_p))
    for row, got in zip(scores, found):
        probs = (row.double() / temperature).softmax(dim=0)
        before, kept = 0.0, torch.zeros(6, dtype=torch.float64)
        for place, c in enumerate(sorted(range(6), key=lambda c: -probs[c])):
            if place == 0 or (place < top_k and before <= top_p and probs[c] >= min_p * probs.max()):
                kept[c] = probs[c]
            before += float(probs[c])
        torch.testing.assert_close(got.double(), kept / kept.sum(), rtol=0, atol=1e-6)


def test_greedy_requests_take_the_best():
    case = random_walk(3, bs=2, slots=6, candidates=5, rank=3)
    best, _ = walk_torch(*case, None)
    draw = drawing(2, 6, temperature=2.0)
    draw.top_k[0] = 1
    tokens, probs = walk_torch(*case, draw)
    assert torch.equal(tokens[0], best[0]) and torch.equal(probs[0].max(dim=1).values, torch.ones(6))
    assert not torch.equal(tokens[1], best[1])


def test_broken_logits_give_some_candidate():
    found, *rest = random_walk(4, bs=2, slots=3, candidates=4, rank=3)
    found.unary[0, 1] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    found.gate[1, 0, 0] = torch.nan
    for draw in (None, drawing(2, 3)):
        tokens, probs = walk_torch(found, *rest, draw)
        assert (found.ids == tokens[..., None]).any(dim=2).all()
        assert probs is None or torch.allclose(probs.sum(dim=2), torch.ones(2, 3))


def assert_same_walk(case, draw: DrawInputs | None) -> None:
    found, *rest = case
    want, want_probs = walk_torch(found, *rest, draw)
    found = Candidates(*(t.to(DEVICE) for t in found))
    if draw is not None:
        draw = DrawInputs(*(t.to(DEVICE) for t in draw))
    got, got_probs = kernels.walk_triton(found, *(t.to(DEVICE) for t in rest), draw)
    assert torch.equal(got.cpu(), want) and got.dtype == want.dtype
    assert (got_probs is None) == (want_probs is None)
    if got_probs is not None:
        torch.testing.assert_close(got_probs.cpu(), want_probs, rtol=1e-4, atol=1e-6)


@against_twin
@given(
    st.integers(0, 1 << 20),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([1, 3, NO_LIMIT]),
    st.sampled_from([0.0, 0.55, 1.0]),
    st.sampled_from([0.0, 0.2]),
)
def test_the_walk_equals_its_twin(seed, bs, slots, candidates, rank, draws, temperature, top_k, top_p, min_p):
    case = random_walk(seed, bs, slots, candidates, rank)
    assert_same_walk(case, drawing(bs, slots, temperature, top_k, top_p, min_p, seed) if draws else None)


@against_twin
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_walk_of_published_size_equals_its_twin(draws, dtype):
    found, anchors, *codebooks = random_walk(11, bs=4, slots=7, candidates=16, rank=256, vocab=500)
    found = Candidates(found.ids, found.unary, found.gate.to(dtype))
    case = found, anchors, *(book.to(dtype) for book in codebooks)
    assert_same_walk(case, drawing(4, 7, 0.8, top_p=0.95) if draws else None)


@against_twin
def test_broken_scores_equals_its_twin():
    case = random_walk(12, bs=2, slots=3, candidates=4, rank=3)
    case[0].unary[0, 1] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])
    assert_same_walk(case, None)
    assert_same_walk(case, drawing(2, 3))


@against_twin
@pytest.mark.parametrize("draws", [False, True])
def test_ties_and_own_filters_equals_its_twin(draws):
    """Equal scores fall to the first candidate, and each request has its own filters.

    Probabilities are quarters, and lie on the edges of top_p, of min_p and of the draws.
    """
    found, *rest = random_walk(5, bs=8, slots=4, candidates=4, rank=3)
    found.gate.zero_()
    found.unary[:] = torch.tensor([[1.0] * 4, [0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 1.0, 1.0], [1.0] * 4])
    draw = None
    if draws:
        draw = drawing(8, 4)
        draw.temperature[:] = torch.tensor([1.0, 1.0, 1.0, 0.3, 2.0, 1.0, 1.0, 1.0])
        draw.top_k[:] = torch.tensor([NO_LIMIT, 1, 2, 3, NO_LIMIT, NO_LIMIT, NO_LIMIT, 3])
        draw.top_p[:] = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 0.25])
        draw.min_p[:] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0])
        draw.uniforms[:, 0] = torch.tensor([0.25, 0.5, 0.5, 1.0, 0.0, 0.75, 0.5, 0.5])
        draw.uniforms[:, 3] = torch.tensor([0.5, 0.0, 0.75, 0.9, 0.75, 0.9, 1.0, 0.9])
    assert_same_walk((found, *rest), draw)


def test_an_empty_batch():
    """An empty batch launches no kernel, so this needs no GPU."""
    found, anchors, *codebooks = random_walk(0, 1, 3, 4, 5)
    nothing = Candidates(found.ids[:0], found.unary[:0], found.gate[:0])
    tokens, probs = kernels.walk_triton(nothing, anchors[:0], *codebooks, None)
    assert (tokens.shape, tokens.dtype, probs) == ((0, 3), torch.int64, None)
