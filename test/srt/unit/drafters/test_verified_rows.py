"""The draft's head multiplies the rows of verified slots alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.dflash2_cases import DFlash2Case
from support.draft_cases import Case, draft_cycle
from support.verified_rows import INFO, compare, count_head_rows

from sglang_dflash.srt.speculative.cycle.layout import drafted_slots

CONTEXTS = [17, 3, 11]
ANCHORS = [3, 50, 9]
NAMES = {
    Case: ["plain", "sample from anchor", "sliding, not causal"],
    DFlash2Case: ["as published", "drafting from the anchor", "capped logits"],
}
CASES = [(kind, name) for kind, names in NAMES.items() for name in names]


class Drafting:
    """Three requests with contexts and a draft, DFlash or DFlash2."""

    def __init__(self, kind, name: str, folder):
        self.case = case = kind.variant(name, folder)
        self.num_slots = case.model.draft.num_drafting_rows
        self.pools = pools = case.pools(len(CONTEXTS), 48)
        self.drafter = case.drafter(pools, self.num_slots + 1)
        self.contexts = [case.aux_hidden(n, seed) for seed, n in enumerate(CONTEXTS)]
        for request, states in enumerate(self.contexts):
            prompt = SimpleNamespace(positions=torch.arange(len(states)))
            slots = pools.slots(request, 0, len(states))
            self.drafter.prefill(prompt, states, slots, torch.tensor([3]))

    def cycle(self):
        """Begin a cycle of whole blocks."""
        width = self.num_slots + 1
        tokens = self.case.block_tokens(ANCHORS)[:, :width]
        return draft_cycle(self.pools, range(len(CONTEXTS)), CONTEXTS, tokens, width)


@INFO
@pytest.mark.parametrize("kind, name", CASES)
def test_verified_slots_are_those_of_whole_blocks(kind, name, info, monkeypatch, tmp_path):
    drafting, head_rows = Drafting(kind, name, tmp_path), count_head_rows(monkeypatch)
    most, propose = drafting.num_slots, drafting.drafter.propose
    whole = propose(drafting.cycle(), info)
    assert set(head_rows) == {3 * most}, "the control"
    drafting.case.model.ends_before_head = True
    for lengths in ([most, 1, 2], [0, 0, 2], [1, 1, 1], [most] * 3, [0, 0, 0]):
        head_rows.clear()
        compare(whole, propose(drafting.cycle(), info, np.array(lengths)), lengths)
        # A request that verifies nothing has a row beside others.
        assert sum(head_rows) == sum(max(n, 1) for n in lengths if any(lengths))


def test_a_gpu_sees_few_shapes():
    """Numbers of rows are quarters of powers of two, and blocks keep all slots."""
    rng, sizes = np.random.default_rng(0), set()
    for _ in range(500):
        lengths = rng.integers(0, 8, rng.integers(1, 17))
        slots = drafted_slots(tuple(lengths.tolist()), 7, torch.device("cpu"), pads=True)
        verified = np.maximum(lengths, 1).sum()
        assert verified <= slots.num_rows <= max(verified * 1.25, 4) and slots.verify_len == 7
        sizes.add(slots.num_rows)
        of_each = slots.to_blocks(slots.to_rows(torch.arange(len(lengths) * 7).view(-1, 7)))
        for request, n in enumerate(lengths):
            assert of_each[request, :n].tolist() == list(range(request * 7, request * 7 + n))
    assert len(sizes) < 30
