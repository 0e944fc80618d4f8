"""Drafts for some requests of a batch, beside copies: KV slots and layouts. Servers: test_own_lengths.py."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.draft_probs import one_hot

from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative import dflash_info
from sglang_dflash.srt.speculative.cycle import block as blocks
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks
from sglang_dflash.srt.speculative.cycle.ragged_graphs import AnyRows
from sglang_dflash.srt.speculative.drafters.base import draft_subset
from sglang_dflash.srt.speculative.width.controller import AdaptiveLengths
from sglang_dflash.srt.speculative.width.estimates import CostTable, CycleClock
from sglang_dflash.srt.speculative.width.policy import LengthChooser

BLOCK, ROW = 4, 400


class Pool:
    """A KV pool of given size, and a request table."""

    def __init__(self, size: int):
        self.free, self.page_size = size, 1
        self.req_to_token = torch.zeros(9, ROW, dtype=torch.int32)

    def available_size(self) -> int:
        return self.free

    def allocate(self, tree_cache, table, reqs, num_needed_tokens, nxt_kv_lens_cpu, **_) -> None:
        assert num_needed_tokens > 0
        self.free -= num_needed_tokens
        assert self.free >= 0, "SGLang retracts first, for two blocks each"
        for req, length in zip(reqs, nxt_kv_lens_cpu.tolist(), strict=True):
            req.kv.kv_allocated_len = length


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 5), spare=st.integers(0, 300), overlap=st.booleans())
def test_a_cycle_always_has_its_slots(seed, n, spare, overlap):
    """The next cycle has slots for a block, also if the host knows a cycle less."""
    rng, lengths = np.random.default_rng(seed), np.full(n, 10)
    pool = Pool(n * 3 * BLOCK + spare)
    reqs = [SimpleNamespace(kv=SimpleNamespace(kv_committed_len=10, kv_allocated_len=10)) for _ in range(n)]
    batch = SimpleNamespace(
        reqs=reqs, token_to_kv_pool_allocator=pool, req_to_token_pool=pool, tree_cache=None,
        req_pool_indices=None, device="cpu", return_logprob=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dflash_info, "alloc_for_spec_decode", pool.allocate)
        patch.setattr(dflash_info, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=BLOCK))
        for _ in range(12):
            committed = [req.kv.kv_committed_len for req in reqs]
            missing = sum(max(0, m + 2 * BLOCK - r.kv.kv_allocated_len) for m, r in zip(committed, reqs))
            if missing > pool.free or max(committed) + 3 * BLOCK > ROW:
                break
            reserved = dflash_info._reserve_slots(batch, committed)
            assert reserved.tolist() == [req.kv.kv_allocated_len for req in reqs]
            assert (reserved.numpy() >= lengths + BLOCK).all() and reserved.max() <= ROW
            before, lengths = lengths, lengths + rng.integers(1, BLOCK + 1, n)
            for req, known in zip(reqs, before if overlap else lengths, strict=True):
                req.kv.kv_committed_len = int(known)


@dataclasses.dataclass
class _Sampling:
    """Fields of SamplingBatchInfo that drafting reads."""

    temperatures: torch.Tensor
    top_ps: torch.Tensor
    top_ks: torch.Tensor
    min_ps: torch.Tensor


class Counting:
    """A drafter whose token at slot k of the request with anchor a is 100 a + k."""

    def __init__(self, draws: bool):
        self.draws, self.seen = draws, []

    def propose(self, cycle, sampling_info=None):
        assert cycle.tokens.shape[1] == BLOCK and cycle.cache_loc.numel() == cycle.bs * BLOCK
        self.seen = cycle.tokens[:, 0].tolist()
        tokens = 100 * cycle.tokens[:, :1] + torch.arange(BLOCK)
        tokens[:, 0] = cycle.tokens[:, 0]
        return DraftBlock(tokens, one_hot(tokens[:, 1:]) if self.draws else None)


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 6), draws=st.booleans())
def test_drafts_and_copies_share_a_batch(seed, n, draws):
    """Rows of the verify forward: each request's tokens, positions and slots, and nothing else."""
    rng = np.random.default_rng(seed)
    copies = rng.random(n) < 0.5
    lengths = np.where(copies, rng.integers(1, BLOCK, n), rng.integers(0, BLOCK, n))
    width, committed = int(lengths.max()) + 1, torch.from_numpy(rng.integers(5, 60, n))
    table = torch.from_numpy(rng.permutation(n * 64).reshape(n, 64).astype(np.int32))
    anchors = torch.arange(1, n + 1)
    tokens, positions, cache_loc = blocks.prepare_block(
        anchors, committed, torch.arange(n), table, 999, BLOCK
    )
    translator = SimpleNamespace(plan=lambda write_virtual, **_: write_virtual)
    layout = whole_blocks(n, BLOCK)
    cycle = Cycle(
        n,
        BLOCK,
        torch.arange(n),
        committed,
        committed,
        tokens,
        positions,
        cache_loc,
        cache_loc,
        False,
        layout,
    )
    is_drafted = (lengths > 0) & ~copies
    chosen = torch.from_numpy(np.flatnonzero(is_drafted))
    drafter, info = Counting(draws), None
    if draws:
        some = torch.zeros(n)
        info = _Sampling(some, some, some, some)
    block = draft_subset(
        drafter,
        cycle,
        np.flatnonzero(is_drafted),
        width,
        info,
        SimpleNamespace(kv_index_translator=translator),
    )
    assert block.tokens.shape == (n, width) and drafter.seen == anchors[chosen].tolist()
    if block.probs is not None:
        assert block.probs.ids.shape[:2] == (n, width - 1)
        assert (block.probs.prob_of(block.tokens[:, 1:]) == 1).all()
    rows = VerifyLayout(n, width, lengths)
    packed = cycle.packed(rows)
    want_tokens, want_positions, want_slots = [], [], []
    for i in range(n):
        for k in range(lengths[i] + 1):
            want_tokens.append(100 * (i + 1) + k if k > 0 and is_drafted[i] else i + 1)
            want_positions.append(int(committed[i]) + k)
            want_slots.append(int(table[i, min(int(committed[i]) + k, 63)]))
    assert rows.pack(block.tokens).flatten().tolist() == want_tokens
    assert rows.pack(packed.positions).flatten().tolist() == want_positions
    assert packed.cache_loc.tolist() == want_slots


@pytest.mark.parametrize("has_processor", [False, True])
def test_custom_logit_processors_read_whole_blocks(has_processor):
    """All requests of such a batch verify as many."""
    costs = CostTable(np.array([1, 8]), np.array([1, 2, BLOCK]), np.full((2, 3), 1.0), np.full(2, 1.0))
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    chooser = LengthChooser(costs, 8)
    right = np.full(9, BLOCK - 1)
    chooser.copies.learn(np.zeros(9, dtype=int), np.full(9, 16), right, right)
    width = AdaptiveLengths(chooser, AnyRows(), CycleClock("cpu"), group, DFlashMetrics(BLOCK - 1, None), 40)
    params = SimpleNamespace(
        top_k=1, logit_bias=None, min_new_tokens=0, frequency_penalty=0, presence_penalty=0,
        repetition_penalty=1,
    )  # fmt: skip
    reqs = [
        SimpleNamespace(kv=SimpleNamespace(kv_committed_len=9), grammar=None, sampling_params=params)
        for _ in range(2)
    ]
    batch = SimpleNamespace(
        reqs=reqs,
        req_pool_indices_cpu=torch.arange(2),
        sampling_info=SimpleNamespace(has_custom_logit_processor=has_processor),
    )
    plan = width.choose(batch, False, np.array([16, 0]), np.full(2, BLOCK - 1))
    if has_processor:
        assert plan.layout.num_draft_tokens.tolist() == [BLOCK - 1] * 2
    else:
        assert plan.layout.num_draft_tokens.tolist() == [BLOCK - 1, 0]
        assert plan.copies.tolist() == [True, False]
