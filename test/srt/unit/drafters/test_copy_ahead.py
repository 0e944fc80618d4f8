"""Copies from a request's own text: kernels, search, and the drafter."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.decisions import accepted_blocks
from support.kernel_inputs import random_texts, random_tokens
from support.triton_interpreter import DEVICE, against_twin

from sglang_dflash.kernels.ops.speculative import copy_ahead
from sglang_dflash.kernels.ops.speculative.copy_ahead import LONGEST_MATCH, SHORTEST_MATCH
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle.block import DraftBlock
from sglang_dflash.srt.speculative.cycle.host import ragged_ranges
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks
from sglang_dflash.srt.speculative.cycle.plan import CyclePlan, Proposals
from sglang_dflash.srt.speculative.cycle.prompts import Prompts
from sglang_dflash.srt.speculative.drafters.blocks import draft_subset
from sglang_dflash.srt.speculative.drafters.copies import (
    CopySource,
    CopyStats,
    overlay_copies,
)

CPU = torch.device("cpu")


# -- the search


def match_by_hand(text: list[int]) -> tuple[int, int]:
    """Return (length, last position) of the longest earlier match of the text's end.

    The most recent one, if there are several.
    """
    found = (0, 0)
    for end in range(len(text) - 1):
        length = 0
        while (
            length < LONGEST_MATCH
            and length <= end
            and text[end - length] == text[len(text) - 1 - length] >= 0
        ):
            length += 1
        if length >= SHORTEST_MATCH and length >= found[0]:
            found = length, end
    return found


def copy_by_hand(text: list[int], end: int, count: int) -> list[int]:
    """Return the tokens after `end`, copied ones too, up to the first that must not be."""
    tokens = list(text)
    for k in range(count):
        tokens.append(tokens[end + 1 + k])
    copied = tokens[len(text) :]
    stop = next((k for k, token in enumerate(copied) if token < 0), count)
    return copied[:stop] + [-1] * (count - stop)


@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(1, 60), st.integers(1, 4), st.integers(2, 17))
def test_the_longest_most_recent_match_is_copied(seed, bs, longest, vocabulary, block_size):
    history, rows, seq_lens = random_texts(seed, bs, longest, vocabulary, "cpu")
    keys = copy_ahead.find_match_torch(history, rows, seq_lens, longest)
    copied, lengths = copy_ahead.copy_matches_torch(history, rows, seq_lens, keys, block_size)
    assert copied[:, :1].eq(-1).all() and copied.shape == (bs, block_size)
    for i in range(bs):
        text = history[rows[i], : seq_lens[i] + 1].tolist()
        length, end = match_by_hand(text)
        want = copy_by_hand(text, end, block_size - 1) if length else [-1]
        if want[0] < 0:
            assert lengths[i] == 0 and copied[i].eq(-1).all()
        else:
            assert lengths[i] == length and copied[i, 1:].tolist() == want


@against_twin
@given(st.integers(0, 2**31), st.integers(0, 4), st.integers(1, 60), st.integers(1, 4), st.integers(2, 17))
def test_copying_equals_its_twin(seed, bs, longest, vocabulary, block_size):
    history, rows, seq_lens = random_texts(seed, bs, longest, vocabulary, DEVICE)
    keys = copy_ahead.find_match.__wrapped__(history, rows, seq_lens, longest)
    assert torch.equal(keys.amax(1), copy_ahead.find_match_torch(history, rows, seq_lens, longest).amax(1))
    arguments = history, rows, seq_lens, keys, block_size
    outputs = copy_ahead.copy_matches.__wrapped__(*arguments), copy_ahead.copy_matches_torch(*arguments)
    for got, want in zip(*outputs, strict=True):
        assert torch.equal(got, want) and got.dtype == want.dtype


@against_twin
def test_a_text_of_many_tiles_equals_its_twin(monkeypatch):
    """The second kernel reads fewer tiles in one step; the matches are far back."""
    monkeypatch.setattr(copy_ahead, "TILE", 16)
    monkeypatch.setattr(copy_ahead, "PARTS", 4)
    rng = torch.Generator().manual_seed(0)
    history = torch.randint(1000, (3, 700), generator=rng, dtype=torch.int32)
    seq_lens = torch.tensor([600, 333, 30])
    for row, length in enumerate(seq_lens.tolist()):
        history[row, length - 11 : length + 1] = history[row, 1:13]
    history, rows, seq_lens = history.to(DEVICE), torch.arange(3, device=DEVICE), seq_lens.to(DEVICE)
    keys = copy_ahead.find_match.__wrapped__(history, rows, seq_lens, 640)
    want = copy_ahead.find_match_torch(history, rows, seq_lens, 640)
    assert keys.shape == (3, 40) and torch.equal(keys.amax(1), want.amax(1))
    copied, lengths = copy_ahead.copy_matches.__wrapped__(history, rows, seq_lens, keys, 8)
    assert lengths.tolist() == [12, 12, 12] and torch.equal(copied[:, 1:], history[:, 13:20].long())


@against_twin
@given(st.integers(0, 2**31), st.integers(0, 4), st.integers(1, 9))
def test_appending_equals_its_twin(seed, bs, width):
    history, rows, seq_lens = random_texts(seed, bs, 40, 9, DEVICE)
    tokens = random_tokens(seed, bs, width, DEVICE)
    written = history.clone(), history.clone()
    copy_ahead.append_tokens.__wrapped__(written[0], rows, seq_lens, tokens)
    copy_ahead.append_tokens_torch(written[1], rows, seq_lens, tokens)
    assert torch.equal(*written)


# -- the drafter


class Drafted:
    """A drafter that proposes 900, 901, ..."""

    writes_context_apart, forwards = True, 0
    probs: DraftProbs | None = None

    def propose(self, cycle, sampling_info=None, lengths=None):
        self.forwards += cycle.verify_len > 1
        tokens = torch.arange(899, 899 + cycle.verify_len).repeat(cycle.bs, 1)
        tokens[:, 0] = cycle.tokens[:, 0]
        return DraftBlock(tokens, self.probs)


SILENT = DFlashMetrics(3, None)


class Simulation:
    """Requests in the rows of a request table, as the worker reports them to the source of copies."""

    def __init__(self, **fields):
        self.drafter = Drafted()
        vars(self.drafter).update(fields)
        self.copies = CopySource(block_size=4, stats=CopyStats(SILENT))
        self.copies.allocate(rows=6, context_len=100, vocab_size=950, device=CPU)
        self.texts: dict[int, list[int]] = {}

    def prefill(
        self,
        new: dict[int, tuple[list[int], int]],
        running: tuple[int, ...] = (),
        continued=(),
        said: int = 7,
    ):
        """new: row -> text and how much of it the prefix cache, or an earlier chunk, had."""
        rows = [*new, *running]
        self.texts |= {row: list(text) for row, (text, _) in new.items()}
        starts = [start for _, start in new.values()] + [len(self.texts[row]) - 1 for row in running]
        counts = [len(self.texts[row]) - start for row, start in zip(rows, starts)]
        prompts = Prompts(
            req_pool_indices=torch.tensor(rows),
            tokens=torch.tensor(
                [token for row, start in zip(rows, starts) for token in self.texts[row][start:]]
            ),
            positions=ragged_ranges(starts, counts, CPU),
            prefix_lens=starts,
            extend_lens=counts,
            num_running=len(running),
            is_continued=[row in continued for row in new] + [True] * len(running),
            table_rows=np.array(rows),
            reqs=[SimpleNamespace(get_fill_ids=lambda row=row: self.texts[row][:]) for row in rows],
        )
        self.copies.begin_prefill(prompts)
        self.copies.end_prefill(prompts, torch.full((len(rows),), said))
        for row in rows:
            self.texts[row].append(said)

    def propose(self, *rows: int) -> DraftBlock:
        lengths = torch.tensor([len(self.texts[row]) - 1 for row in rows])
        tokens = torch.full((len(rows), 4), 999)
        tokens[:, 0] = torch.tensor([self.texts[row][-1] for row in rows])
        self.cycle = SimpleNamespace(
            bs=len(rows), verify_len=4, tokens=tokens, committed=lengths, committed_host=lengths,
            req_pool_indices=torch.tensor(rows),
        )  # fmt: skip
        batch = SimpleNamespace(
            req_pool_indices=self.cycle.req_pool_indices, seq_lens=lengths, seq_lens_cpu=lengths
        )
        plan = CyclePlan(whole_blocks(len(batch.req_pool_indices), 1))
        self.copied = self.copies.choose(batch, plan, self.copies.look_up(batch))
        self.was_drafted = not self.drafter.writes_context_apart or self.copies.needs_draft(self.copied)
        on_host = np.arange(len(rows) if self.was_drafted else 0)
        return self.copied.overlay(
            draft_subset(self.drafter, self.cycle, on_host, whole_blocks(len(rows), 4), None, None)
        )

    def commit(self, out_tokens: list[list[int]], kept: list[int], tells: bool = True) -> None:
        out = torch.tensor(out_tokens)
        accepted = accepted_blocks(torch.tensor(kept, dtype=torch.int32), out)
        self.proposals = self.copies.record(self.cycle, self.copied, accepted, self.was_drafted)
        for row, tokens, count in zip(self.cycle.req_pool_indices.tolist(), out_tokens, kept):
            self.texts[row] += tokens[: count + 1]
        if tells:
            drafted = [self.cycle.verify_len - 1] * len(kept)
            self.copies.stats.on_accept_lens(self.proposals, kept, drafted)


TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
LONG = [*TEXT, 50, *TEXT[:8]]  # with 9 said: the match is nine tokens long


@pytest.mark.parametrize("start", [1, 12, len(LONG) - 1])
def test_what_the_prefix_cache_had_is_known(start):
    played = Simulation()
    played.prefill({2: (list(range(60, 90)), 0)})  # whose row is taken over
    played.prefill({2: (LONG, start)}, said=9)
    assert played.propose(2).tokens.tolist() == [[9, 10, 11, 12]]


def test_a_prompt_in_chunks():
    played = Simulation()
    played.prefill({3: (LONG[:5], 0)}, said=400)
    played.prefill({3: (LONG[:15], 5)}, continued=(3,), said=401)
    played.prefill({3: (LONG, 15)}, continued=(3,), said=9)
    assert played.propose(3).tokens.tolist() == [[9, 10, 11, 12]]


def test_a_running_request_of_a_mixed_batch():
    played = Simulation()
    played.prefill({1: (LONG[:-1], 0)}, said=8)
    played.prefill({5: ([30, 31, 32], 0)}, running=(1,), said=9)
    assert played.propose(5, 1).tokens.tolist() == [[9, 900, 901, 902], [9, 10, 11, 12]]


def test_images_are_not_copied():
    """A copied token beside drawn ones has probability 1, as nothing else was possible."""
    ids = torch.tensor([[900, 7], [901, 7], [902, 7]]).repeat(2, 1, 1)
    played = Simulation(probs=DraftProbs(ids, torch.tensor([0.25, 0.75]).expand(2, 3, 2)))
    text = [1, 2, 3, 4, 5, 10, 10**7, 12, 60, 1, 2, 3, 4]
    played.prefill({1: (text, 0), 4: ([30, 31, 32], 0)}, said=5)
    block = played.propose(1, 4)
    assert block.tokens.tolist() == [[5, 10, 901, 902], [5, 900, 901, 902]]
    assert block.probs.prob_of(block.tokens[:, 1:]).tolist() == [[1, 0.25, 0.25], [0.25, 0.25, 0.25]]
    pads = [10**7] * 12
    played.prefill({1: ([*pads, 6, *pads], 0)}, said=6)
    assert played.propose(1).tokens.tolist() == [[6, 900, 901, 902]]


def test_a_copied_token_may_have_any_id():
    found = overlay_copies(DraftBlock(torch.tensor([[5, 6, 7]])), torch.tensor([[-1, 0, -1]]))
    assert found.tokens.tolist() == [[5, 0, 7]]


def test_an_arrival_from_another_server():
    played = Simulation()
    played.texts[3] = [*LONG, 9]
    req = SimpleNamespace(origin_input_ids=LONG[:-2])
    played.copies.admit_prefilled(
        SimpleNamespace(
            reqs=[req], req_pool_indices=torch.tensor([3]), output_ids=[[*LONG[-2:], 9]], lengths=[len(LONG)]
        )
    )
    assert played.propose(3).tokens.tolist() == [[9, 10, 11, 12]]


def test_what_was_kept_is_text_and_the_rest_is_not():
    played = Simulation()
    played.prefill({2: (LONG[:13], 0)}, said=1)
    for said, kept in (
        ([2, 3, 444, 444], 1),
        ([4, 5, 6, 7], 3),
        ([8, 444, 444, 444], 0),
        ([9, 444, 444, 444], 0),
    ):
        played.propose(2)
        played.commit([said], [kept])
    assert played.texts[2][-10:] == [50, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert played.propose(2).tokens.tolist() == [[9, 10, 11, 12]]


# -- without the draft


def test_the_draft_is_left_out_where_all_copy():
    played = Simulation()
    played.prefill({2: (LONG, 0), 4: (list(range(20, 40)), 0)}, said=9)
    played.propose(2, 4)
    played.propose(2)
    assert played.drafter.forwards == 1


def test_a_draft_that_writes_its_context_runs_every_time():
    played = Simulation(writes_context_apart=False)
    played.prefill({2: (LONG, 0)}, said=9)
    played.propose(2)
    assert played.drafter.forwards == 1


def test_a_host_that_cannot_read_who_copies_drafts_every_time():
    played = Simulation()
    played.copies.knows_matches_on_host = False
    played.prefill({2: (LONG, 0)}, said=9)
    played.propose(2)
    assert played.drafter.forwards == 1


def test_outcomes_by_source():
    counted = []
    metrics = SimpleNamespace(
        count_source=lambda source, **given: counted.append((source, *given.values())),
        count_undrafted=lambda cycles: None,
    )
    stats = CopyStats(metrics)
    cycles = [
        Proposals(torch.tensor([9, -9, 0], dtype=torch.int32)),
        Proposals(torch.tensor([9, 0], dtype=torch.int32), was_drafted=False),
        None,
    ]
    stats.on_accept_lens(cycles[0], [5, 2, 1], [7, 7, 7])
    stats.on_accept_lens(cycles[1], [3, 0], [7, 7])
    stats.on_accept_lens(cycles[2], [0, 0], [0, 0])
    assert counted == [("copy", 1, 7, 5), ("draft", 2, 14, 3), ("copy", 1, 7, 3), ("draft", 0, 0, 0)]
    assert stats.report() == {
        "cycles": 3,
        "cycles_without_draft": 1,
        "blocks": {"copy": 2, "draft": 2},
        "proposed_tokens": {"copy": 14, "draft": 14},
        "accepted_tokens": {"copy": 8, "draft": 3},
    }
