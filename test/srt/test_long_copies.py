"""Copies longer than a block: KV slots, layouts and limits. Servers: test_own_lengths.py."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.srt.arg_groups.dflash_args import MOST_COPIED_SLOTS, check_copy_ahead
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative import dflash_info
from sglang_dflash.srt.speculative.cycle.verify_rows import VerifyRows
from sglang_dflash.srt.speculative.dflash_info import Cycle, DraftBlock
from sglang_dflash.srt.speculative.drafters.ahead import copy_room, on_copies
from sglang_dflash.srt.speculative.drafters.some import draft_for_some
from sglang_dflash.srt.speculative.targets.states import NoStates
from sglang_dflash.srt.speculative.width.adaptive import AdaptiveWidth
from sglang_dflash.srt.speculative.width.backends import AnyRows
from sglang_dflash.srt.speculative.width.chooser import LengthChooser
from sglang_dflash.srt.speculative.width.clock import CycleClock
from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.start_up import copied_tokens

BLOCK, MOST, ROW = 4, 16, 400


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
    """Whatever copies add, the next cycle has slots for a block, also if the host knows a cycle less."""
    rng, lengths = np.random.default_rng(seed), np.full(n, 10)
    pool = Pool(n * 3 * BLOCK + spare)
    reqs = [SimpleNamespace(kv=SimpleNamespace(kv_committed_len=10, kv_allocated_len=10)) for _ in range(n)]
    batch = SimpleNamespace(
        reqs=reqs, token_to_kv_pool_allocator=pool, req_to_token_pool=pool, tree_cache=None,
        req_pool_indices=None, device="cpu", return_logprob=False,
    )  # fmt: skip
    longest = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dflash_info, "alloc_for_spec_decode", pool.allocate)
        patch.setattr(dflash_info, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=BLOCK))
        for _ in range(12):
            committed = [req.kv.kv_committed_len for req in reqs]
            missing = sum(max(0, m + 2 * BLOCK - r.kv.kv_allocated_len) for m, r in zip(committed, reqs))
            if missing > pool.free or max(committed) + 3 * MOST > ROW:
                break
            reserved = dflash_info._reserve_slots(batch, committed)
            assert reserved.tolist() == [req.kv.kv_allocated_len for req in reqs]
            assert (reserved.numpy() >= lengths + BLOCK).all() and reserved.max() <= ROW
            batch.seq_lens = torch.from_numpy(lengths)
            room = copy_room(batch, BLOCK, MOST)
            assert (room >= BLOCK - 1).all() and (room < MOST).all()
            assert (lengths + room + 1 <= reserved.numpy()).all(), "every verified row has a slot"
            longest = max(longest, room.max())
            on_copies(reqs, rng.random(n) < 0.7, BLOCK, MOST)
            before, lengths = lengths, lengths + rng.integers(1, room + 2)
            for req, known in zip(reqs, before if overlap else lengths, strict=True):
                req.kv.kv_committed_len = int(known)
    if spare >= n * (2 * MOST + BLOCK) + 12 * n * MOST:
        assert longest == MOST - 1


def test_requests_that_stop_copying_reserve_no_more_than_two_blocks():
    reqs = [SimpleNamespace(), SimpleNamespace()]
    on_copies(reqs, np.array([True, False]), BLOCK, MOST)
    assert [getattr(req, dflash_info.COPY_SLOTS) for req in reqs] == [2 * MOST + BLOCK, 0]
    on_copies(reqs, np.array([False, False]), BLOCK, MOST)
    assert [getattr(req, dflash_info.COPY_SLOTS) for req in reqs] == [0, 0]


def test_log_probabilities_bound_the_longest_copy():
    """SGLang makes them for the longest request's slots of every request."""
    kv = SimpleNamespace(kv_allocated_len=100)
    table = SimpleNamespace(req_to_token=torch.zeros(8, ROW))
    batch = SimpleNamespace(req_to_token_pool=table, return_logprob=True)
    for n, room in ((1, MOST - 1), (2, MOST - 1), (4, 7), (8, BLOCK - 1)):
        batch.reqs, batch.seq_lens = [SimpleNamespace(kv=kv)] * n, torch.full((n,), 10)
        assert copy_room(batch, BLOCK, MOST).tolist() == [room] * n


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
        return DraftBlock(tokens, DraftProbs.one_hot(tokens[:, 1:]) if self.draws else None)


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 6), draws=st.booleans())
def test_drafts_and_long_copies_share_a_batch(seed, n, draws):
    """Rows of the verify forward: each request's tokens, positions and slots, and nothing else."""
    rng = np.random.default_rng(seed)
    copies = rng.random(n) < 0.5
    lengths = np.where(copies, rng.integers(1, MOST, n), rng.integers(0, BLOCK, n))
    width, committed = int(lengths.max()) + 1, torch.from_numpy(rng.integers(5, 60, n))
    slots = max(BLOCK, width)
    table = torch.from_numpy(rng.permutation(n * 64).reshape(n, 64).astype(np.int32))
    anchors = torch.arange(1, n + 1)
    tokens, positions, cache_loc = dflash_info.prepare_block(
        anchors, committed, torch.arange(n), table, 999, slots
    )
    translator = SimpleNamespace(plan=lambda write_virtual, **_: write_virtual)
    cycle = Cycle(n, torch.arange(n), committed, committed, tokens, positions, cache_loc, cache_loc, False)
    on_host = np.flatnonzero((lengths > 0) & ~copies)
    chosen = torch.from_numpy(on_host)
    drafter, info = Counting(draws), None
    if draws:
        some = torch.zeros(n)
        info = _Sampling(some, some, some, some)
    block = draft_for_some(
        drafter, cycle, on_host, chosen, width, info, SimpleNamespace(kv_index_translator=translator), BLOCK
    )
    assert block.tokens.shape == (n, width) and drafter.seen == anchors[chosen].tolist()
    if block.probs is not None:
        assert block.probs.ids.shape[:2] == (n, width - 1)
        assert (block.probs.of(block.tokens[:, 1:]) == 1).all()
    rows = VerifyRows(n, width, lengths)
    packed = cycle.packed(rows, chosen)
    want_tokens, want_positions, want_slots = [], [], []
    for i in range(n):
        for k in range(lengths[i] + 1):
            is_drafted = k > 0 and i in chosen.tolist()
            want_tokens.append(100 * (i + 1) + k if is_drafted else i + 1)
            want_positions.append(int(committed[i]) + k)
            want_slots.append(int(table[i, min(int(committed[i]) + k, 63)]))
    assert rows.pack(block.tokens).flatten().tolist() == want_tokens
    assert rows.pack(packed.positions).flatten().tolist() == want_positions
    assert packed.cache_loc.tolist() == want_slots


@pytest.mark.parametrize("most", ["3", "129", "-1", "many"])
def test_a_bad_limit_is_named(most, monkeypatch):
    monkeypatch.setenv(DFlashOptions.COPY_AHEAD.variable, "1")
    monkeypatch.setenv(DFlashOptions.COPY_AHEAD_MAX_TOKENS.variable, most)
    with pytest.raises(ValueError, match="COPY_AHEAD_MAX_TOKENS|copy-ahead-max-tokens"):
        check_copy_ahead(BLOCK)


def test_a_limit_without_copies_is_an_error(monkeypatch):
    monkeypatch.delenv(DFlashOptions.COPY_AHEAD.variable, raising=False)
    monkeypatch.setenv(DFlashOptions.COPY_AHEAD_MAX_TOKENS.variable, str(MOST_COPIED_SLOTS))
    with pytest.raises(ValueError, match="needs --speculative-copy-ahead"):
        check_copy_ahead(BLOCK)


@pytest.mark.parametrize(
    ("requested", "own_lengths", "apart", "states", "device", "tokens", "words"),
    [
        (None, True, True, NoStates(), "cpu", None, None),
        (BLOCK, True, True, NoStates(), "cpu", None, None),
        (20, True, True, NoStates(), "cpu", 19, "up to 20 tokens"),
        (20, False, True, NoStates(), "cpu", None, "equally many"),
        (20, True, True, NoStates(), "cuda", None, "CUDA graphs"),
        (20, True, False, NoStates(), "cpu", None, "one block"),
        (20, True, True, object(), "cpu", None, "recurrent"),
    ],
)
def test_a_requested_limit_is_logged_with_its_reason(
    requested, own_lengths, apart, states, device, tokens, words, monkeypatch, caplog
):
    monkeypatch.setenv(DFlashOptions.COPY_AHEAD_MAX_TOKENS.variable, str(requested or ""))
    caplog.set_level("INFO")
    drafter = SimpleNamespace(writes_context_apart=apart)
    worker = SimpleNamespace(block_size=BLOCK, drafter=drafter, target_states=states, device=device)
    assert copied_tokens(worker, own_lengths) == tokens
    assert [words in record.message for record in caplog.records] == [True] * (words is not None)


@pytest.mark.parametrize("has_processor", [False, True])
def test_custom_logit_processors_read_whole_blocks(has_processor):
    """All requests of such a batch verify as many, and none more than a block."""
    costs = CostTable(np.array([1, 8]), np.array([1, 2, BLOCK]), np.full((2, 3), 1.0), np.full(2, 0.1))
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    chooser = LengthChooser(costs, 8, copy_depth=MOST - 1)
    right = np.full(9, MOST - 1)
    chooser.copies.learn(np.zeros(9, dtype=int), np.full(9, 16), right, right)
    width = AdaptiveWidth(chooser, AnyRows(), CycleClock("cpu"), 8, group, has_copies=True)
    assert width.most_slots == MOST
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
    plan = width.choose(batch, False, np.array([16, 0]), None, np.array([MOST - 1, BLOCK - 1]))
    if has_processor:
        assert plan.lengths.tolist() == [BLOCK - 1] * 2
    else:
        assert plan.lengths[0] > BLOCK and plan.lengths[1] < BLOCK and plan.copies.tolist() == [True, False]
