"""Chunks that hold for every length within bounds, against FlashInfer's arithmetic.

The arithmetic is that of `support/rehearsal/flashinfer_planner.py`: our reading of FlashInfer, which needs a
GPU.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.rehearsal import flashinfer_planner as planner

from sglang_dflash.srt.layers.attention.flashinfer_plans import ChunkCheck, PlanCounts
from sglang_dflash.srt.layers.attention.kv_chunks import choose_chunk, holds, num_chunks, searched_chunk


@dataclass
class Case:
    """Blocks of requests, with keys between bounds. heads: of queries and of keys.

    counts: queries of each request, at most `width`. None: all have `width`.
    """

    least: list[int]
    most: list[int]
    width: int
    heads: tuple[int, int]
    num_processors: int = 132
    counts: list[int] | None = None

    @property
    def queries(self) -> list[int]:
        return self.counts or [self.width] * len(self.most)

    def plan(self, lengths: list[int], fixed_chunk: int | None = None) -> planner.Plan:
        return planner.plan(
            lengths,
            self.queries,
            self.heads,
            num_processors=self.num_processors,
            fixed_chunk=fixed_chunk or -1,
            uniform_queries=0 if self.counts else self.width,
        )

    def choose(self):
        """Choose as `FlashInferBlockPlan` does: with what the capture's plan says of the kernel's grid."""
        captured = self.plan([1 + n for n in self.queries])
        capacity, tile = captured.information[0], captured.information[3]
        if self.counts:
            one = planner.plan([1], [1], self.heads, num_processors=self.num_processors, uniform_queries=1)
            capacity = one.information[0]
        tiles = [planner.ceil_div(n * self.heads[0] // self.heads[1], tile) for n in self.queries]
        return choose_chunk(self.least, self.most, tiles, capacity), captured

    def lengths(self, rng: random.Random) -> list[int]:
        return [rng.randint(*bounds) for bounds in zip(self.least, self.most, strict=True)]


def random_case(rng: random.Random) -> Case:
    """Draw a batch: the last cycle verified `before` slots, this one `width`. Lanes may be padding."""
    kv_heads = rng.choice([1, 2, 4, 8, 16, 32])
    heads = kv_heads * rng.choice([1, 2, 4, 8, 16]), kv_heads
    block = rng.choice([4, 8, 16, 32])
    before, width = rng.choice([1, 2, block]), rng.choice([1, 2, block])
    bs, context = rng.choice([1, 2, 4, 8, 16, 24, 48]), rng.choice([60, 300, 1200, 8000, 32768, 131072])
    committed = [max(20, int(rng.gauss(context, context / 8))) for _ in range(bs)]
    launched = [rng.random() < 0.8 for _ in range(bs)]  # else the length is exact
    padding = [1 + width] * rng.choice([0, 0, bs])
    least = [n + width + is_launched for n, is_launched in zip(committed, launched, strict=True)] + padding
    most = [n + width + before * is_launched for n, is_launched in zip(committed, launched, strict=True)]
    return Case(least, most + padding, width, heads, rng.choice([8, 46, 132]))


def ragged_case(rng: random.Random) -> Case:
    """Draw a batch whose requests have different numbers of queries. Padding lanes may have none."""
    case = random_case(rng)
    num_padding = case.most.count(1 + case.width)
    counts = [rng.randint(1, case.width) for _ in case.most[num_padding:]]
    counts += [rng.randint(0, case.width) for _ in range(num_padding)]
    bounds = ([n - case.width + count for n, count in zip(side, counts, strict=True)]
              for side in (case.least, case.most))  # fmt: skip
    return Case(*bounds, case.width, case.heads, case.num_processors, counts)


@pytest.mark.parametrize("draw", [random_case, ragged_case])
def test_a_plan_exists_and_is_right_for_every_length(draw):
    """Plain upper bounds are wrong for some of the same lengths: the arithmetic can tell."""
    rng = random.Random(20261123)
    num_wrong_with_upper_bounds = num_without = 0
    for _ in range(2000):
        case = draw(rng)
        choice, captured = case.choose()
        if choice is None:  # the host then waits for the exact lengths
            num_without += 1
            continue
        made = case.plan(choice.lengths, choice.fixed_chunk)
        assert made.chunk == choice.chunk and made.information == captured.information, case
        device = case.lengths(rng)
        assert planner.wrong_rows(made, device) == 0, (case, device)
        num_wrong_with_upper_bounds += planner.wrong_rows(case.plan(case.most), device) > 0
    assert num_wrong_with_upper_bounds > 20
    assert num_without <= (2 if draw is ragged_case else 0)


def test_chunks_are_not_much_larger_than_with_exact_lengths():
    rng = random.Random(7)
    ratios = []
    for _ in range(500):
        case = random_case(rng)
        choice, _ = case.choose()
        ratios.append(choice.chunk / case.plan(case.lengths(rng)).chunk)
    ratios.sort()
    assert ratios[len(ratios) // 2] <= 1.05 and ratios[-len(ratios) // 20] <= 1.5


lengths = st.lists(st.integers(1, 3000) | st.integers(30_000, 140_000), min_size=1, max_size=12)


@given(lengths, st.integers(1, 4), st.integers(1, 300))
def test_the_searched_chunk_is_flashinfers(lengths, tiles, capacity):
    queries = [64 * tiles] * len(lengths)
    made = planner.plan(
        lengths, queries, (1, 1), num_processors=capacity, uniform_queries=64 * tiles, head_dim=256
    )
    assert searched_chunk(lengths, [tiles] * len(lengths), made.information[0]) == made.chunk


@given(lengths, st.integers(0, 40), st.integers(1, 4), st.integers(1, 300))
def test_a_choice_holds_fits_and_splits(most, spread, tiles, capacity):
    least = [max(1, n - spread) for n in most]
    capacity = max(capacity, tiles * len(most))  # the grid has a block for every tile
    choice = choose_chunk(least, most, [tiles] * len(most), capacity)
    if choice is None:
        return
    assert holds(choice.chunk, least, most)
    assert all(planned >= high for planned, high in zip(choice.lengths, most, strict=True))
    blocks = [num_chunks(n, choice.chunk) for n in choice.lengths]
    assert tiles * sum(blocks) <= capacity
    assert [num_chunks(n, choice.chunk) for n in most] == blocks
    if choice.fixed_chunk is not None:
        assert max(blocks) > 1, "FlashInfer would lay out a plan without merging"


def test_exact_lengths_keep_flashinfers_chunk():
    choice = choose_chunk([300, 5000], [300, 5000], [1, 1], 30)
    assert choice.fixed_chunk is None and choice.chunk == searched_chunk([300, 5000], [1, 1], 30)


@pytest.mark.parametrize(
    ("least", "most", "capacity", "fixed"),
    [
        ([100], [110], 66, None),  # both lengths are one chunk of 128
        ([120, 1000], [135, 1015], 66, 135),  # one chunk for the first, eight for the second
        ([120], [135], 66, 119),  # a fixed chunk has to split some request, so two smaller ones
        ([120] * 48, [135] * 48, 66, None),  # no room to split: all are planned with the longest
    ],
)
def test_choices(least, most, capacity, fixed):
    choice = choose_chunk(least, most, [1] * len(most), capacity)
    assert choice.fixed_chunk == fixed and holds(choice.chunk, least, most)


def test_no_choice():
    """Two chunks for one length and three for another, and no chunk in between."""
    assert choose_chunk([2], [200], [1], 66) is None


def test_the_check_ends_the_server_a_plan_later():
    check = ChunkCheck(PlanCounts())
    for first in (130, 128):
        check.start(torch.tensor([0, first, first + 60], dtype=torch.int32), [135, 60], 128)
    with pytest.raises(RuntimeError, match=r"planned for \[2, 1\] chunks of 128 keys, .* found \[1, 1\]"):
        check.start(torch.tensor([0, 130, 190], dtype=torch.int32), [135, 60], 128)
