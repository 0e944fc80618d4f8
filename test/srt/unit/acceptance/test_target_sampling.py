"""Target draws over a verified block, by SGLang's sampler.

Each request's parameters must apply to its own rows. Frequencies are compared by Hoeffding's bound. The
chance that one differs by more than EPSILON from its probability over DRAWS draws is below 2 * exp(-2 * DRAWS
* EPSILON**2) = 3e-14. Seeds are fixed as well.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from support.engine import start
from support.sampling_parameters import TOP_K_ALL, VOCABULARY, sampling_info

from sglang_dflash.srt.speculative.acceptance import target_sampling
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks


def draw_target_tokens(logits, info, positions, width, sampler):
    """Draw after every slot of whole blocks."""
    layout = whole_blocks(len(logits) // width, width)
    positions = positions.view(-1, width)
    return target_sampling.draw_target_tokens(logits, info, positions, layout, sampler)[:2]


def target_probs(logits, info, width):
    """Compute the distributions after every slot of whole blocks."""
    found, best = target_sampling.target_probs(logits, info, whole_blocks(len(logits) // width, width))
    return found.view(*best.shape, -1), best


DRAWS, EPSILON = 40_000, 0.02

# The fourth token survives the joint filter of top_k = 4 and top_p = 0.82, because 0.80 of the mass comes
# before it. It does not survive top_p on renormalised top_k output (0.80 / 0.85 = 0.94).
EXAMPLE = [0.35, 0.25, 0.20, 0.05, 0.04, 0.04, 0.03, 0.02, 0.01, 0.01]
JOINT = [0.412, 0.294, 0.235, 0.059]
CHAINED = [0.4375, 0.3125, 0.25]


@pytest.fixture(scope="module")
def sampler():
    start()
    from sglang.srt.layers.sampler import Sampler

    return Sampler()


def assert_close(found: torch.Tensor, expected: list[float]) -> None:
    padded = torch.tensor(expected + [0.0] * (VOCABULARY - len(expected)))
    assert (found - padded).abs().max() < EPSILON, (found.tolist(), expected)
    assert not found[padded == 0].any(), "an excluded token was drawn"


@pytest.mark.parametrize("neighbour", [{}, {"top_k": 1}, {"min_p": 0.5}, {"temperature": 5.0, "top_p": 0.1}])
def test_top_k_and_top_p_filter_jointly_whatever_the_neighbour(neighbour, sampler):
    torch.manual_seed(0)
    width, pairs = 4, DRAWS // 4
    mine, other = torch.tensor(EXAMPLE).log(), torch.tensor(EXAMPLE[::-1]).log()
    logits = torch.stack([mine.repeat(width, 1), other.repeat(width, 1)]).repeat(pairs, 1, 1).flatten(0, 1)
    info = sampling_info(*[{"top_k": 4, "top_p": 0.82}, neighbour] * pairs)
    drawn, _ = draw_target_tokens(logits, info, torch.arange(len(logits)), width, sampler)
    found = torch.bincount(drawn[::2].flatten(), minlength=VOCABULARY) / (pairs * width)
    assert_close(found, JOINT)
    with pytest.raises(AssertionError):
        assert_close(found, CHAINED)


def filters(info, *requests: dict):
    unfiltered = {"top_k": TOP_K_ALL, "top_p": 1.0, "min_p": 0.0}
    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(**unfiltered | of)) for of in requests]
    return target_sampling.filters_of_sampled(SimpleNamespace(sampling_info=info, reqs=reqs))


@pytest.mark.parametrize("sampled", [{}, {"top_k": 4, "top_p": 0.82}, {"temperature": 0.7, "min_p": 0.2}])
def test_greedy_neighbours_add_no_filter(sampled, sampler):
    """A mixed batch is filtered as its sampled requests alone, and every distribution stays."""

    requests, width = [{"top_k": 1}, sampled] * 3, 4
    mixed, alone = sampling_info(*requests), sampling_info(sampled)
    fewer = filters(mixed, *requests)
    assert mixed.need_top_k_sampling
    for name in ("need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling", "max_top_k"):
        assert getattr(fewer, name) == getattr(alone, name), name
    logits = torch.randn(6 * width, VOCABULARY, generator=torch.Generator().manual_seed(2))
    logits[0, 5] = logits[0].max()  # two largest logits: both ways take the first
    expected, _ = target_probs(logits.clone(), mixed, width)
    torch.testing.assert_close(target_probs(logits.clone(), fewer, width)[0], expected)
    drawn, _ = draw_target_tokens(logits.clone(), fewer, torch.arange(6 * width), width, sampler)
    assert torch.equal(drawn[::2], logits.argmax(dim=-1).view(6, width)[::2])

    two = {"top_k": 1}, {"top_k": 4}, {"top_k": 7}
    assert filters(sampling_info(*two), *two).max_top_k == 7
    seeded = sampling_info(*requests, seeds=[1] * 6)
    assert filters(seeded, *requests) is seeded
    assert filters(alone, sampled) is alone


@pytest.mark.parametrize("width", [1, 16])
def test_greedy_requests_take_the_argmax(width, sampler):
    torch.manual_seed(1)
    logits = torch.randn(6 * width, VOCABULARY)
    best = logits.argmax(dim=-1).view(6, width)
    positions = torch.arange(len(logits))
    alone, _ = draw_target_tokens(
        logits.clone(), sampling_info(*[{"top_k": 1}] * 6), positions, width, sampler
    )
    assert torch.equal(alone, best)
    mixed = sampling_info(*[{"top_k": 1}, {"temperature": 100.0}] * 3)
    for _ in range(5):
        drawn, _ = draw_target_tokens(logits.clone(), mixed, positions, width, sampler)
        assert torch.equal(drawn[::2], best[::2])


def test_parameters_belong_to_the_request_of_the_row(sampler):
    """Request i draws exactly the likeliest tokens that its parameters keep."""
    requests = [
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.25},
        {"min_p": 0.97},
        {"min_p": 0.97, "temperature": 2.0},
    ]
    width, kept = 200, [1, 5, 3, 3, 6]
    logits = torch.linspace(1.0, 0.9, VOCABULARY).repeat(len(requests) * width, 1)
    torch.manual_seed(0)
    drawn, _ = draw_target_tokens(logits, sampling_info(*requests), torch.arange(len(logits)), width, sampler)
    assert [sorted(set(row.tolist())) for row in drawn] == [list(range(k)) for k in kept]


@pytest.mark.parametrize("filters", [{}, {"top_k": 4, "top_p": 0.82}, {"temperature": 0.5, "top_k": 9}])
def test_seeds_and_positions_are_those_of_plain_decoding(filters, sampler):
    seeds, lengths, width = [11, 11, 987654321], [5, 40, 5], 6
    logits = torch.randn(3, width, VOCABULARY, generator=torch.Generator().manual_seed(3))
    positions = torch.tensor(lengths)[:, None] + torch.arange(width)
    info = sampling_info(*[filters] * 3, seeds=seeds)
    drawn, _ = draw_target_tokens(logits.flatten(0, 1).clone(), info, positions.flatten(), width, sampler)
    for slot in range(width):
        plain = sampler(
            LogitsProcessorOutput(next_token_logits=logits[:, slot].clone()),
            sampling_info(*[filters] * 3, seeds=seeds),
            return_logprob=False,
            top_logprobs_nums=[],
            token_ids_logprobs=[],
            positions=positions[:, slot],
        )
        assert torch.equal(drawn[:, slot], plain.long())
    other = sampling_info(*[filters] * 3, seeds=[1, 2, 3])
    found, _ = draw_target_tokens(logits.flatten(0, 1).clone(), other, positions.flatten(), width, sampler)
    assert not torch.equal(drawn, found)


def test_rows_of_requests_with_lengths_of_their_own(sampler):
    """Ragged rows are drawn as in whole blocks; slots past a request's rows repeat its last one."""
    width, bs, lengths = 4, 3, np.array([1, 3, 0])
    layout = VerifyLayout(bs, width, lengths)
    assert layout.index.tolist() == [0, 1, 4, 5, 6, 7, 8] and layout.bounds[0].tolist() == [0, 2, 6]
    assert layout.slots.tolist() == [[0, 1, 1, 1], [2, 3, 4, 5], [6, 6, 6, 6]]
    assert layout.max_accept.tolist() == lengths.tolist() and layout.max_accept.dtype == torch.int32
    blocks = torch.arange(bs * width).view(bs, width)
    assert layout.to_rows(blocks).tolist() == layout.index.tolist()
    assert layout.to_blocks(layout.to_rows(blocks)).tolist() == [[0, 1, 1, 1], [4, 5, 6, 7], [8, 8, 8, 8]]
    info = sampling_info({"top_k": 1}, {"temperature": 0.8, "top_k": 1}, {"top_k": 1})
    assert layout.repeat(None) is None
    assert layout.repeat(torch.tensor([[1], [2], [3]])).flatten().tolist() == [1, 1, 2, 2, 2, 2, 3]
    logits = torch.randn(bs * width, VOCABULARY, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(bs * width)
    whole, _ = draw_target_tokens(logits.clone(), info, positions, width, sampler)
    drawn, best, masks = target_sampling.draw_target_tokens(
        logits[layout.index].clone(), info, positions.view(bs, width), layout, sampler
    )
    assert masks is None
    assert torch.equal(layout.to_rows(drawn), layout.to_rows(whole)) and best.shape == (bs, width)
    probs, _ = target_sampling.target_probs(logits[layout.index].clone(), info, layout)
    assert torch.equal(probs, target_probs(logits.clone(), info, width)[0].flatten(0, 1)[layout.index])


REQUESTS = [
    {"top_k": 1},
    {"top_k": 4, "top_p": 0.82},
    {"temperature": 0.7, "min_p": 0.2},
    {"temperature": 1e-6},
    {"temperature": 100.0, "top_p": 0.5},
    {"top_k": 1000, "top_p": 1.0},
]


def test_target_probs_are_the_samplers():
    """Compare with the sampler's filtered weights, for all kinds of requests at once."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    width, bs = 3, len(REQUESTS)
    logits = torch.randn(bs * width, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2
    before = logits.clone()
    info = sampling_info(*REQUESTS)
    found, _ = target_probs(logits, info, width)
    assert found.shape == (bs, width, VOCABULARY) and found.dtype == torch.float32
    assert found.data_ptr() == logits.data_ptr()  # in place
    rows = {
        name: whole_blocks(bs, width).repeat(getattr(info, name))
        for name in ("temperatures", "top_ks", "top_ps", "min_ps")
    }
    _, weights, ids, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        torch.softmax(before / rows["temperatures"], dim=-1),
        rows["top_ks"],
        rows["top_ps"],
        rows["min_ps"],
        True,
        None,
        torch.zeros(bs * width),
        return_filtered_probs=True,
    )
    expected = torch.zeros_like(weights).scatter_(1, ids, weights)
    expected = expected / expected.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=0, atol=1e-6)
    assert torch.equal(
        found[0], torch.nn.functional.one_hot(before[:width].argmax(dim=-1), VOCABULARY).float()
    )


@pytest.mark.parametrize("is_bounded", [True, False], ids=["without a sort", "sorted"])
@pytest.mark.parametrize(
    "request_, kept",
    [
        ({"top_k": 9, "top_p": 0.5}, 3),  # half of the mass comes before the third of four equal tokens
        ({"top_k": 9, "top_p": 0.25}, 2),
        ({"top_k": 9, "top_p": 0.0}, 1),
        ({"top_k": 9, "min_p": 1.0}, 4),
        ({"top_k": 3, "top_p": 0.75}, 3),
        ({"top_k": 1}, 1),
    ],
)
def test_ties_are_cut_as_the_sampler_cuts_them(request_, kept, is_bounded):
    """Probabilities of exactly 1/4 meet a limit exactly."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    logits = torch.full((1, VOCABULARY), -torch.inf)
    logits[:, :4] = 0.0
    info = sampling_info(request_)
    if not is_bounded:
        info = dataclasses.replace(info, max_top_k=None)
    found, _ = target_probs(logits.clone(), info, 1)
    assert (found > 0).sum() == kept and found.max() == pytest.approx(1 / kept)
    _, weights, *_ = top_k_top_p_min_p_sampling_from_probs_torch(
        logits.softmax(dim=-1), info.top_ks, info.top_ps, info.min_ps, True, None, torch.zeros(1),
        return_filtered_probs=True,
    )  # fmt: skip
    assert (weights > 0).sum() == kept


@pytest.mark.parametrize("neighbour", [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_greedy_request_takes_the_same_of_equal_tokens_beside_any(neighbour):
    """A sort may begin with any of them."""
    logits = torch.randn(64, VOCABULARY)
    logits[:, ::3] = logits.amax(dim=-1, keepdim=True)
    found, _ = target_probs(logits.clone(), sampling_info(*[{"top_k": 1}, neighbour] * 32), 1)
    assert torch.equal(found.flatten(0, 1)[::2].argmax(dim=-1), logits[::2].argmax(dim=-1))


def test_target_probs_of_a_padded_head_are_contiguous():
    """Kernels read whole rows. Logits of a padded head are a part of wider ones."""
    wide = torch.randn(6, VOCABULARY + 3, generator=torch.Generator().manual_seed(4))
    info = sampling_info({"top_k": 4}, {"top_p": 0.5})
    expected, _ = target_probs(wide[:, :VOCABULARY].clone(), info, 3)
    found, _ = target_probs(wide[:, :VOCABULARY], info, 3)
    assert found.is_contiguous() and torch.equal(found, expected)


def test_target_probs_with_small_top_k_need_no_sort(monkeypatch):
    requests = [{"top_k": 1}, {"top_k": 4, "top_p": 0.82}, {"top_k": 3, "min_p": 0.2, "temperature": 0.7}]
    logits = torch.randn(len(requests) * 3, VOCABULARY, generator=torch.Generator().manual_seed(8)) * 2
    unknown = dataclasses.replace(sampling_info(*requests), max_top_k=None)
    sorted_, *_ = target_probs(logits.clone(), unknown, 3)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    found, *_ = target_probs(logits, sampling_info(*requests), 3)
    torch.testing.assert_close(found, sorted_, rtol=0, atol=1e-7)


def test_a_top_k_beyond_the_vocabulary():
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(9))
    found, _ = target_probs(logits.clone(), sampling_info(*[{"top_k": VOCABULARY + 1}] * 3), 1)
    torch.testing.assert_close(found.squeeze(1), logits.softmax(dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_filtered_some_at_a_time(dtype, monkeypatch):
    """Each with its own parameters, and one at a time if the vocabulary is as large as the memory."""
    logits = torch.randn(len(REQUESTS) * 2, VOCABULARY, generator=torch.Generator().manual_seed(7)).to(dtype)
    info = sampling_info(*REQUESTS)
    expected, _ = target_probs(logits.clone(), info, 2)
    for elements in (3 * VOCABULARY, VOCABULARY - 1):
        monkeypatch.setattr(target_sampling, "ELEMENTS_AT_ONCE", elements)
        found, _ = target_probs(logits.clone(), info, 2)
        assert torch.equal(found, expected)


def test_unfiltered_target_probs_need_no_sort():
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(6))
    info = sampling_info({"temperature": 0.5}, {"temperature": 2.0})
    assert not (info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling)
    expected = torch.softmax(logits / torch.tensor([[0.5], [0.5], [2.0], [2.0]]), dim=-1)
    torch.testing.assert_close(target_probs(logits, info, 2)[0].flatten(0, 1), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    "requests", [[{"top_k": 1}] * 3, [{"top_k": 1}, {}, {"temperature": 0.5, "top_p": 0.9}]]
)
def test_broken_rows_are_reported_and_affect_no_other(requests, bad, sampler):
    width, positions = 2, torch.arange(6)
    info, good = sampling_info(*requests), 3 * torch.randn(6, VOCABULARY)
    broken = good.clone()
    broken[3, 4] = bad
    torch.manual_seed(1)
    wanted, all_fine = draw_target_tokens(good.clone(), info, positions, width, sampler)
    torch.manual_seed(1)
    found, best = draw_target_tokens(broken.clone(), info, positions, width, sampler)
    is_broken = ~best.isfinite()
    assert all_fine.isfinite().all() and is_broken.flatten().tolist() == [row == 3 for row in range(6)]
    assert torch.equal(found[~is_broken], wanted[~is_broken])
    probs, best = target_probs(broken.clone(), info, width)
    assert best.isfinite().logical_not().flatten().tolist() == [row == 3 for row in range(6)]
    assert torch.equal(probs[~is_broken], target_probs(good, info, width)[0][~is_broken])
    assert torch.allclose(probs.sum(dim=-1), torch.ones(3, width))


def test_a_row_in_which_nothing_is_allowed_is_broken(sampler):
    logits = torch.randn(4, VOCABULARY)
    logits[2] = -torch.inf
    for requests in ([{"top_k": 1}] * 2, [{}] * 2):
        _, best = draw_target_tokens(logits.clone(), sampling_info(*requests), torch.arange(4), 2, sampler)
        assert best.isfinite().flatten().tolist() == [True, True, False, True]
