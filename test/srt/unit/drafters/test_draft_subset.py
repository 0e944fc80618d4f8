"""Drafts for some requests of a batch, beside copies: KV slots and layouts. Servers: test_own_lengths.py."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.draft_probs import one_hot
from support.sampling_parameters import sampling_info

from sglang_dflash.srt.speculative.cycle import block as blocks
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks
from sglang_dflash.srt.speculative.drafters.blocks import draft_subset

BLOCK = 4


class Counting:
    """A drafter whose token at slot k of the request with anchor a is 100 a + k.

    Its blocks end with the longest that is verified.
    """

    def __init__(self, draws: bool):
        self.draws, self.seen, self.lengths = draws, [], []

    def propose(self, cycle, sampling_info=None, lengths=None):
        assert cycle.tokens.shape[1] == BLOCK and cycle.cache_loc.numel() == cycle.bs * BLOCK
        self.seen = cycle.tokens[:, 0].tolist()
        tokens = 100 * cycle.tokens[:, :1] + torch.arange(BLOCK)
        tokens[:, 0] = cycle.tokens[:, 0]
        self.lengths, tokens = lengths.tolist(), tokens[:, : lengths.max() + 1]
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
    runner = SimpleNamespace(
        kv_index_translator=SimpleNamespace(plan=lambda write_virtual, **_: write_virtual)
    )
    per_request = torch.arange(n), committed, committed
    per_slot = tokens, positions, cache_loc, cache_loc
    cycle = Cycle(n, BLOCK, *per_request, *per_slot, False, whole_blocks(n, BLOCK))
    is_drafted = (lengths > 0) & ~copies
    chosen = torch.from_numpy(np.flatnonzero(is_drafted))
    drafter, info = Counting(draws), sampling_info(*[{}] * n) if draws else None
    layout = VerifyLayout(n, width, lengths)
    block = draft_subset(drafter, cycle, np.flatnonzero(is_drafted), layout, info, runner)
    assert block.tokens.shape == (n, width) and drafter.seen == anchors[chosen].tolist()
    assert drafter.lengths == lengths[is_drafted].tolist()
    if block.probs is not None:
        assert block.probs.ids.shape[:2] == (n, width - 1)
        assert (block.probs.prob_of(block.tokens[:, 1:]) == 1).all()
    ragged = cycle.with_layout(layout)
    want_tokens, want_positions, want_slots = [], [], []
    for i in range(n):
        for k in range(lengths[i] + 1):
            want_tokens.append(100 * (i + 1) + k if k > 0 and is_drafted[i] else i + 1)
            want_positions.append(int(committed[i]) + k)
            want_slots.append(int(table[i, min(int(committed[i]) + k, 63)]))
    assert layout.to_rows(block.tokens).flatten().tolist() == want_tokens
    assert layout.to_rows(ragged.positions).flatten().tolist() == want_positions
    assert ragged.cache_loc.tolist() == want_slots
