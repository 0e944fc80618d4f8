"""The DFlash drafter: prefill, propose, commit, and the argmax of the borrowed head.

Drafted tokens are argmaxes, compared exactly with reference_dflash.py. Seeds are fixed, and no two logits
of these drafts are as close as a rounding error.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.decisions import accepted_blocks
from support.dflash2_cases import DFlash2Case
from support.draft_cases import Case, FakePlan, draft_cycle, lm_head

from sglang_dflash.srt.layers.vocab_argmax import full_logits, greedy_tokens, largest_logits
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks
from sglang_dflash.srt.speculative.drafters.blocks import draft_subset
from sglang_dflash.srt.speculative.drafters.dflash import DFlashDrafter


def test_greedy_tokens_never_come_from_the_heads_padding():
    """All logits are negative, so the padding's zeros would win."""
    hidden = torch.rand(9, 16, generator=torch.Generator().manual_seed(0))
    weight = -torch.rand(61, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(greedy_tokens(hidden, lm_head(weight)), (hidden @ weight.T).argmax(dim=-1))


def test_an_embedding_for_a_head():
    """Gemma ties its head to an embedding: rows without padding, and no quant method."""
    embedding = torch.nn.Embedding(61, 16)
    hidden = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
    expected = hidden @ embedding.weight.T
    with torch.no_grad():
        assert torch.equal(greedy_tokens(hidden, embedding), expected.argmax(dim=-1))
        torch.testing.assert_close(full_logits(hidden, embedding), expected)


class QuantizedMethod:
    """A quant method as SGLang's: it alone can read the weight.

    Here int8 rows, transposed, with a scale each.
    """

    def apply(self, layer, hidden):
        return hidden @ (layer.weight.float() * layer.scale)


def quantized_head(generator: torch.Generator) -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a head that `QuantizedMethod` reads, and its weight [61, 16] as it should be read."""
    head = lm_head(torch.zeros(61, 16))
    rows = torch.randint(-127, 128, (61, 16), generator=generator)
    scale = torch.rand(61, generator=generator) / 127  # larger terms would round differently on each CPU
    padding = head.weight.shape[0] - 61
    head.weight = torch.nn.Parameter(
        torch.nn.functional.pad(rows.T, (0, padding)).to(torch.int8), requires_grad=False
    )
    head.scale, head.quant_method = torch.nn.functional.pad(scale, (0, padding)), QuantizedMethod()
    return head, rows * scale[:, None]


def test_a_quantized_head():
    generator = torch.Generator().manual_seed(4)
    head, weight = quantized_head(generator)
    hidden = torch.randn(9, 16, generator=generator)
    expected = hidden @ weight.T
    assert torch.equal(greedy_tokens(hidden, head), expected.argmax(dim=-1))
    torch.testing.assert_close(full_logits(hidden, head), expected)


@pytest.mark.parametrize("num_tokens", [None, 5, 20, 60])
@pytest.mark.parametrize("kind", ["plain", "embedding", "quantized"])
def test_the_largest_logits_are_of_the_first_tokens(kind, num_tokens):
    """Of any head: one that can be cut is read no further, others multiply whole."""
    generator = torch.Generator().manual_seed(6)
    weight, head = torch.randn(61, 16, generator=generator), torch.nn.Embedding(61, 16)
    head.weight.data = weight
    if kind == "quantized":
        head, weight = quantized_head(generator)
    elif kind != "embedding":
        head = lm_head(weight)
    hidden = torch.randn(9, 16, generator=generator)
    expected = (hidden @ weight.T)[:, :num_tokens].topk(3, dim=-1)
    with torch.no_grad():
        logits, ids = largest_logits(hidden, head, 3, num_tokens)
    torch.testing.assert_close(logits, expected.values)
    assert torch.equal(ids, expected.indices)


@pytest.mark.parametrize(
    "name",
    ["plain", "sliding, not causal", "layer ids left out", "sample from anchor", "DeepSeek's block of 7"],
)
@pytest.mark.parametrize(
    "verified", [(0, 0), (3, 0), (1,) * 10 + (0,)], ids=["whole blocks", "narrow", "a pause"]
)
def test_the_drafter_proposes_what_the_reference_does(name, verified, tmp_path):
    """Cycles through the drafter's own interface.

    Prefill, a block, a commit of all its rows of which two count, and the next block, which must use the
    committed rows alone. `verified`: slots of each cycle, 0 for the whole block. Cycles of one slot draft
    nothing, and later drafts are as if they had.
    """
    case = Case.variant(name, tmp_path)
    # A draft that samples from its anchor drafts a token with every row, so one more position is verified
    # than it has rows.
    from_anchor = case.model.draft.sample_from_anchor
    rows, lengths, kept = case.config["block_size"], [11, 4], [1, 0]
    width = rows + from_anchor
    pools = case.pools(2, 40)
    drafter = case.drafter(pools, width)
    # Of every request, the aux hidden states of all positions to come; what is rejected is replaced by noise.
    aux_hidden = [case.aux_hidden(40, seed) for seed in (1, 2)]
    states = torch.cat([states[:n] for states, n in zip(aux_hidden, lengths, strict=True)])
    prompts = SimpleNamespace(positions=torch.cat([torch.arange(n) for n in lengths]))
    slots = torch.cat([pools.slots(r, 0, n) for r, n in enumerate(lengths)])
    drafter.prefill(prompts, states, slots, torch.tensor([3, 50]))

    for step, verify_len in enumerate(verified):
        bonus_tokens = [3 + 5 * step, 50 - step]
        blocks = case.block_tokens(bonus_tokens)
        if verify_len == 1:
            width, kept = 1, [0, 0]
        else:
            width, kept = rows + from_anchor, [1, 0]
        cycle = draft_cycle(pools, range(2), lengths, blocks, width)
        tokens = draft_subset(drafter, cycle, np.arange(2), cycle.layout, None, None).tokens
        expected = torch.zeros(2, width, dtype=torch.int64)
        expected[:, 0] = blocks[:, 0]
        for request, n in enumerate(lengths):
            context = case.reference.context_kv(aux_hidden[request][:n])
            hidden = case.reference.block_hidden(case.embedding.weight.data[blocks[request]], context)
            expected[request, 1:] = case.logits(hidden)[0 if from_anchor else 1 :].argmax(dim=-1)[: width - 1]
        assert torch.equal(tokens, expected)

        cycle = cycle.with_layout(whole_blocks(cycle.bs, verify_len or width))
        states = case.aux_hidden(2 * cycle.verify_len, seed=7).view(2, cycle.verify_len, -1)
        for request, n in enumerate(lengths):
            states[request, : kept[request] + 1] = aux_hidden[request][n : n + kept[request] + 1]
        accept_len = torch.tensor(kept, dtype=torch.int32)
        accepted = accepted_blocks(accept_len, tokens[:, : cycle.verify_len])
        drafter.commit(cycle, states.flatten(0, 1), accepted)
        lengths = [n + k + 1 for n, k in zip(lengths, kept, strict=True)]


def commit_an_anchor(
    drafter: DFlashDrafter, pools, request: int, slot: int, position: int, states: torch.Tensor
) -> None:
    cycle = draft_cycle(pools, [request], [position], torch.tensor([[3]]), 1)
    slots = torch.tensor([slot])
    cycle = dataclasses.replace(cycle, cache_loc=slots, kv_loc_plan=FakePlan(slots))
    drafter.commit(cycle, states, accepted_blocks(torch.zeros(1, dtype=torch.int32), cycle.tokens))


def test_rows_that_wait_are_the_slots_last_owners(tmp_path):
    """A request ends with unwritten rows, and its slot goes to another one."""
    case = Case.variant("plain", tmp_path)
    pools = case.pools(2, 40)
    drafter = case.drafter(pools, case.config["block_size"])
    slot = pools.slots(0, 5, 6)
    of_the_first, of_the_second = case.aux_hidden(1, seed=1), case.aux_hidden(1, seed=2)

    def written() -> torch.Tensor:
        pool = pools.token_to_kv_pool
        return torch.stack([layer[slot] for layer in (*pool.k_buffer, *pool.v_buffer)]).clone()

    commit_an_anchor(drafter, pools, 0, int(slot), 5, of_the_first)
    assert written().isnan().all(), "one row is not worth the operators"
    overwritten = of_the_first.clone()
    of_the_first.zero_()  # as the next target forward may
    prompt = SimpleNamespace(positions=torch.tensor([5]))
    drafter.begin_prefill(prompt)
    first = written()
    drafter.prefill(prompt, overwritten, slot, torch.tensor([3]))
    assert torch.equal(first, written()) and not first.isnan().any()

    drafter.prefill(prompt, of_the_second, slot, torch.tensor([3]))
    second = written()
    commit_an_anchor(drafter, pools, 0, int(slot), 5, overwritten)
    commit_an_anchor(drafter, pools, 1, int(slot), 5, of_the_second)
    drafter.begin_prefill(prompt)
    assert torch.equal(written(), second) and not torch.equal(first, second)


class OnCuda(torch.Tensor):
    is_cuda = True


def test_no_rows_wait_on_a_gpu(tmp_path, monkeypatch):
    """A graph would write the rows of a slot's next owner before them."""
    case = Case.variant("plain", tmp_path)
    pools = case.pools(2, 40)
    drafter, written = case.drafter(pools, case.config["block_size"]), []
    monkeypatch.setattr(
        drafter, "_write", lambda rows, accept_len=None: written.append(rows.cache_loc.item())
    )
    commit_an_anchor(drafter, pools, 0, 5, 5, case.aux_hidden(1, seed=1).as_subclass(OnCuda))
    assert written == [5]
    commit_an_anchor(drafter, pools, 0, 5, 5, None)  # the graph has written
    drafter.begin_prefill(SimpleNamespace())
    assert written == [5]


@pytest.mark.parametrize("kind", [Case, DFlash2Case], ids=["DFlash", "DFlash2"])
def test_blocks_are_written_outside_the_memory_of_graphs(kind, tmp_path):
    """In a graph's own memory the target's graphs would overwrite what they are about to verify."""
    case = kind.variant("plain" if kind is Case else "as published", tmp_path)
    pools, width = case.pools(2, 40), case.config["block_size"]
    drafter = case.drafter(pools, width)
    drafter.attach_pools(pools)
    for r in range(2):
        prompt = SimpleNamespace(positions=torch.arange(4))
        drafter.prefill(prompt, case.aux_hidden(4, r), pools.slots(r, 0, 4), torch.tensor([3]))
    proposals = []
    for anchors in ([3, 50], [8, 20]):
        cycle = draft_cycle(pools, range(2), [4, 4], case.block_tokens(anchors), width)
        proposals.append(drafter.propose(cycle).tokens)
        assert proposals[-1][:, 0].tolist() == anchors
    first, second = proposals
    assert first.data_ptr() == second.data_ptr() and first[:, 0].tolist() == [8, 20]
