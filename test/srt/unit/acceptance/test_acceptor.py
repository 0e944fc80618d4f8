"""The acceptor passes on what the rules and SGLang's sampler need, each to its own request and slot."""

import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from sglang.srt.layers.logits_processor import SamplingMaskOutput
from sglang.srt.managers import overlap_utils
from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite
from support.acceptors import OneRank, accept, make_acceptor
from support.decisions import accepted_blocks, decide
from support.rehearsal import launches
from support.sampling_parameters import VOCABULARY, sampling_info

from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.acceptance import acceptor as acceptor_module
from sglang_dflash.srt.speculative.acceptance.acceptor import make_relay
from sglang_dflash.srt.speculative.acceptance.rejection import REJECTION_RULES, rejection_rule
from sglang_dflash.srt.speculative.acceptance.simulation import Simulation
from sglang_dflash.srt.speculative.acceptance.target_sampling import SamplingMasks
from sglang_dflash.srt.speculative.cycle.block import DraftBlock
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput

WIDTH = 4
SAMPLED, GREEDY = {"temperature": 1.0}, {"top_k": 1}


class Sampler:
    """SGLang's sampler, which here takes the least likely token and spoils the logits."""

    def __call__(self, output, sampling_info, positions, **_):
        self.info, self.positions = sampling_info, positions
        tokens = output.next_token_logits.argmin(dim=-1)
        output.next_token_logits.fill_(torch.nan)
        return tokens


def batch_of(*requests: dict, **fields) -> SimpleNamespace:
    reqs = [
        SimpleNamespace(
            sampling_params=SimpleNamespace(**{"top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0} | request)
        )
        for request in requests
    ]
    defaults = {"return_logprob": False, "req_pool_indices": torch.arange(len(reqs))}
    return SimpleNamespace(sampling_info=sampling_info(*requests), reqs=reqs, **defaults | fields)


def cycle_of(layout: VerifyLayout) -> SimpleNamespace:
    slots = torch.arange(layout.bs * layout.verify_len).view(layout.bs, layout.verify_len)
    return SimpleNamespace(
        layout=layout, committed=10 * torch.arange(1, layout.bs + 1), positions=100 + slots
    )


def drawn_evenly(bs: int) -> DraftBlock:
    """Return blocks drawn from a draft to which all tokens are equally likely."""
    tokens = torch.randint(VOCABULARY, (bs, WIDTH), generator=torch.Generator().manual_seed(1))
    ids = torch.arange(VOCABULARY).expand(bs, WIDTH - 1, VOCABULARY).contiguous()
    return DraftBlock(tokens, DraftProbs(ids, torch.full(ids.shape, 1 / VOCABULARY)))


class Rule:
    """A rejection rule that notes its arguments, and accepts two tokens of everyone."""

    def __call__(self, _, block, target_probs, draft, accept_uniforms, final_uniforms, layout):
        self.draft, self.target_probs = draft, target_probs
        self.accept_uniforms, self.final_uniforms = accept_uniforms, final_uniforms
        return torch.full((len(block),), 2, dtype=torch.int32), block + 100


@pytest.fixture
def noted(monkeypatch):
    """A `Rule` in the place of all others."""
    monkeypatch.setattr(acceptor_module, "accept_drawn", rule := Rule())
    return rule


@pytest.mark.parametrize("rule", REJECTION_RULES)
def test_drawn_blocks_are_verified_with_the_drafts_own_probabilities(rule):
    """A draft that equals the target is accepted whole; as one-hot, it would rarely be."""
    block, layout = drawn_evenly(64), whole_blocks(64, WIDTH)
    acceptor = make_acceptor(rule=rule)
    torch.manual_seed(0)
    logits = torch.zeros(64 * WIDTH, VOCABULARY)
    accepted = accept(acceptor, batch_of(*[SAMPLED] * 64), cycle_of(layout), block, logits)
    assert (accepted.accept_len == WIDTH - 1).all()
    assert torch.equal(accepted.tokens[:, :-1], block.tokens[:, 1:])


def test_arguments_of_the_rule(noted, monkeypatch):
    """Uniforms are independent of each other, and masks take a rectangle of probabilities."""
    layout = VerifyLayout(2, WIDTH, np.array([1, 3]))
    masks = MagicMock(are_requested=True)
    monkeypatch.setattr(acceptor_module, "SamplingMasks", lambda *_: masks)
    block, logits = drawn_evenly(2), torch.randn(layout.num_rows, VOCABULARY)
    expected = logits.softmax(dim=-1)
    accept(make_acceptor(rule="standard"), batch_of(SAMPLED, SAMPLED), cycle_of(layout), block, logits)
    assert noted.draft is block.probs
    torch.testing.assert_close(noted.target_probs, expected)
    _, drawn, probs = masks.output.call_args.args
    assert drawn is None
    torch.testing.assert_close(probs, expected[layout.slots])
    assert noted.accept_uniforms.shape == (2, WIDTH - 1) and noted.final_uniforms.shape == (2,)
    uniforms = torch.cat([noted.accept_uniforms.flatten(), noted.final_uniforms])
    assert len(uniforms.unique()) == 2 * WIDTH


class SecondRank(OneRank):
    """A synchronisation that gets rank 0's decision: nothing accepted, and tokens of 3."""

    def enabled(self, site):
        return True

    def sync(self, site, values):
        decided = torch.full_like(values, 3)
        decided[:, -1] = 0
        return decided


@pytest.mark.usefixtures("noted")
def test_the_first_rank_decides():
    block, layout = drawn_evenly(2), whole_blocks(2, WIDTH)
    acceptor, logits = make_acceptor(sync=SecondRank(), rule="standard"), torch.zeros(2 * WIDTH, VOCABULARY)
    accepted = accept(acceptor, batch_of(SAMPLED, SAMPLED), cycle_of(layout), block, logits)
    assert accepted.accept_len.tolist() == [0, 0] and (accepted.tokens == 3).all()


@pytest.mark.parametrize("by_blocks", [True, False])
def test_the_rule_is_the_servers_choice(by_blocks):
    spec = SimpleNamespace(
        speculative_use_rejection_sampling=False, speculative_use_block_verification=by_blocks
    )
    assert not rejection_rule(spec)
    spec.speculative_use_rejection_sampling = True
    assert rejection_rule(spec) == ("block" if by_blocks else "standard")


def test_which_batches_are_drawn():
    """Seeded draws are the target's alone, and rules for drawn blocks know no caps."""
    fallbacks = []
    metrics = SimpleNamespace(count_fallback=lambda reason, blocks: fallbacks.append((reason, blocks)))
    acceptor = make_acceptor(rule="standard", metrics=metrics)
    seeded = sampling_info(GREEDY, SAMPLED, seeds=[1, 2])
    assert acceptor.draws_drafts(sampling_info(GREEDY, SAMPLED))
    assert not acceptor.draws_drafts(sampling_info(GREEDY, GREEDY))
    assert not fallbacks
    assert not acceptor.draws_drafts(seeded)
    assert not acceptor.draws_drafts(sampling_info(SAMPLED), is_capped=True)
    assert fallbacks == [("sampling_seed", 2), ("speculative_max_tokens", 1)]
    assert not make_acceptor().draws_drafts(sampling_info(SAMPLED))


def test_only_drawn_tokens_are_sent_to_other_ranks():
    """All ranks draft the same argmax."""
    block, sync = drawn_evenly(2), OneRank()
    acceptor = make_acceptor(sync=sync, rule="standard")
    acceptor.broadcast_drafts(DraftBlock(block.tokens))
    assert not sync.sent
    acceptor.broadcast_drafts(block)
    [(site, tokens)] = sync.sent
    assert site is SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE and tokens is block.tokens


@pytest.mark.parametrize("requests", [[GREEDY] * 3, [GREEDY, SAMPLED, GREEDY]])
def test_a_request_accepts_no_more_than_it_verifies(requests):
    lengths = np.array([1, 3, 0])
    layout, logits = VerifyLayout(3, WIDTH, lengths), torch.zeros(7, VOCABULARY)
    logits[:, 5] = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 1.0]) if SAMPLED in requests else 1.0
    block = DraftBlock(torch.full((3, WIDTH), 5))
    accepted = accept(make_acceptor(Sampler()), batch_of(*requests), cycle_of(layout), block, logits)
    assert accepted.accept_len.tolist() == lengths.tolist() and accepted.bonus.tolist() == [5] * 3


def test_a_cap_cuts_the_accepted_prefix_and_keeps_the_targets_token():
    logits = torch.full((8, VOCABULARY), -5.0)
    target = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    logits.scatter_(1, target.view(-1, 1), 5.0)
    block = DraftBlock(torch.tensor([[0, 1, 2, 3], [0, 5, 6, 7]]))
    batch, cycle = batch_of(GREEDY, GREEDY), cycle_of(whole_blocks(2, WIDTH))
    accepted = accept(make_acceptor(), batch, cycle, block, logits, np.array([1, 3]))
    assert (accepted.accept_len.tolist(), accepted.bonus.tolist()) == ([1, 3], [2, 8])
    assert accepted.accept_len.dtype == torch.int32 and accepted.committed.tolist() == [12, 24]


@pytest.mark.parametrize("has_masks", [False, True])
def test_the_sampler_gets_each_rows_position_and_its_own_filters(has_masks, monkeypatch):
    """A mask tells what a greedy request was drawn from too, so its filter must stay."""
    layout, sampler = VerifyLayout(2, WIDTH, np.array([1, 3])), Sampler()
    cycle, logits = cycle_of(layout), torch.randn(layout.num_rows, VOCABULARY)
    block, batch = DraftBlock(torch.zeros(2, WIDTH, dtype=torch.int64)), batch_of(GREEDY, SAMPLED)
    batch.sampling_info.has_custom_logit_processor = True
    if has_masks:
        masks = MagicMock(sampler_fields=dict)
        monkeypatch.setattr(acceptor_module, "SamplingMasks", lambda *_: masks)
    accept(make_acceptor(sampler), batch, cycle, block, logits)
    assert sampler.positions.tolist() == [100, 101, 104, 105, 106, 107]
    assert sampler.info.need_top_k_sampling == has_masks
    assert not sampler.info.has_custom_logit_processor, "processors have run already"


@pytest.mark.parametrize("is_drawn", [False, True])
def test_logits_that_are_still_to_be_read_are_kept(is_drawn):
    block, layout = drawn_evenly(2), whole_blocks(2, WIDTH)
    logits = torch.randn(2 * WIDTH, VOCABULARY)
    before, acceptor = logits.clone(), make_acceptor(Sampler(), rule="standard")
    batch = batch_of(SAMPLED, GREEDY, return_logprob=True)
    accept(acceptor, batch, cycle_of(layout), block if is_drawn else DraftBlock(block.tokens), logits)
    assert torch.equal(logits, before)


@pytest.mark.usefixtures("noted")
@pytest.mark.parametrize("how", ["drawn", "capped", "greedy"])
def test_every_way_of_accepting_relays_lengths_and_bonus_tokens(how):
    tables = [torch.zeros(9, dtype=torch.int64) for _ in range(2)]
    relay = SimpleNamespace(new_seq_lens=tables[0], output_tokens=tables[1])
    acceptor = make_acceptor(Sampler(), rule="standard", relay=relay)
    block, rows = drawn_evenly(2), torch.tensor([7, 2])
    request = SAMPLED if how == "drawn" else GREEDY
    caps = [np.array([0, 0])] if how == "capped" else []
    accepted = accept(
        acceptor,
        batch_of(request, request, req_pool_indices=rows),
        cycle_of(whole_blocks(2, WIDTH)),
        block if how == "drawn" else DraftBlock(block.tokens),
        torch.eye(VOCABULARY)[3].repeat(2 * WIDTH, 1),
        *caps,
    )
    assert relay.published_seq_lens is accepted.committed and relay.published_bonus is accepted.bonus
    for table, wanted in zip(tables, (accepted.committed, accepted.bonus), strict=True):
        assert table[rows].tolist() == wanted.tolist() and wanted.any()


@pytest.mark.skipif(not hasattr(overlap_utils, "FutureRelayBuffers"), reason="SGLang 0.5.22 takes no tables")
@pytest.mark.parametrize("reason", ["", "another size", "basic mode"])
def test_the_scheduler_reads_what_acceptance_wrote(reason, monkeypatch):
    """It takes no tables of another size, and is offered none in basic mode."""
    monkeypatch.setattr(overlap_utils, "_offered_relay", None)
    monkeypatch.setattr(spec_utils, "spec_need_hidden_states", lambda: False)
    monkeypatch.setenv("SGLANG_DFLASH_BASIC", "1" if reason == "basic mode" else "0")
    rows, num_rows, is_adopted = torch.tensor([7, 2]), 9, not reason
    acceptor = make_acceptor(relay=make_relay(num_rows + (reason == "another size"), "cpu"))
    assert (overlap_utils._offered_relay is None) == (reason == "basic mode")
    pool = SimpleNamespace(req_to_token=torch.zeros(num_rows, 64, dtype=torch.int32))
    relay = overlap_utils.FutureMap("cpu", SpeculativeAlgorithm.DFLASH, pool, needs_cpu_seq_lens=False)
    assert (relay._relay is not None) == is_adopted
    batch, cycle = batch_of(GREEDY, GREEDY, req_pool_indices=rows), cycle_of(whole_blocks(2, 3))
    block, logits = torch.tensor([[5, 1, 2], [5, 9, 2]]), torch.eye(VOCABULARY)[[1, 2, 3, 1, 2, 3]]
    accepted = accept(acceptor, batch, cycle, DraftBlock(block), logits)
    assert accepted.committed.tolist() == [13, 21] and accepted.bonus.tolist() == [3, 1]
    if is_adopted:
        assert relay.new_seq_lens_buf[rows].tolist() == [13, 21], "before SGLang publishes"
    relay.publish(rows, accepted.committed)
    draft_input = DFlashDraftInput(accepted.bonus, accepted.committed)
    relay.stash(rows, overlap_utils.RelayPayload.from_draft_input(draft_input))
    assert relay.new_seq_lens_buf[rows].tolist() == [13, 21]
    assert relay.output_tokens_buf[rows].tolist() == [3, 1]
    # A prefill's lengths are other tensors, which SGLang copies as before.
    relay.publish(rows, torch.tensor([4, 5]))
    assert relay.new_seq_lens_buf[rows].tolist() == [4, 5]


SIMULATION = Simulation(torch.full((2, 9), WIDTH - 1, dtype=torch.int32), WIDTH)


@pytest.mark.parametrize("is_drawn", [False, True])
def test_simulated_blocks_end_no_request(is_drawn):
    """Random weights may give any logits, which would end requests as broken."""
    acceptor = make_acceptor(Sampler(), rule="standard", simulation=SIMULATION)
    block, logits = drawn_evenly(2), torch.full((2 * WIDTH, VOCABULARY), torch.nan)
    request = SAMPLED if is_drawn else GREEDY
    batch, cycle = batch_of(request, request), cycle_of(whole_blocks(2, WIDTH))
    accepted = accept(acceptor, batch, cycle, block if is_drawn else DraftBlock(block.tokens), logits)
    assert accepted.accept_len.tolist() == [WIDTH - 1, WIDTH - 1]
    assert torch.equal(accepted.reported, accepted.tokens)
    assert torch.equal(decide(accepted.accept_len, accepted.tokens).bonus, accepted.bonus)


@pytest.mark.parametrize("is_drawn", [False, True])
def test_simulated_lengths_are_cut_at_what_is_verified_and_at_caps(is_drawn):
    layout, caps = VerifyLayout(3, WIDTH, np.array([1, 3, 3])), np.array([3, 3, 2])
    acceptor = make_acceptor(Sampler(), rule="standard", simulation=SIMULATION)
    block = drawn_evenly(3) if is_drawn else DraftBlock(drawn_evenly(3).tokens)
    batch = batch_of(*[SAMPLED if is_drawn else GREEDY] * 3)
    logits = torch.randn(layout.num_rows, VOCABULARY)
    accepted = accept(acceptor, batch, cycle_of(layout), block, logits, caps)
    assert accepted.accept_len.tolist() == [1, 3, 2]
    assert accepted.committed.tolist() == [12, 24, 33]


def launches_of(simulation: Any, layout: VerifyLayout, monkeypatch) -> Counter[str]:
    """Return the operations of a greedy acceptance after the first one, `accept_blocks` as one."""
    decided = AcceptedBlocks(*torch.zeros(6, layout.bs, 1, dtype=torch.int64))
    operations = launches._Operations()

    def accept_blocks(*_, **__):
        operations.seen["accept_blocks"] += 1
        return decided

    monkeypatch.setattr(acceptor_module, "accept_blocks", accept_blocks)
    acceptor = make_acceptor(Sampler(), simulation=simulation)
    block, batch = DraftBlock(drawn_evenly(layout.bs).tokens), batch_of(*[GREEDY] * layout.bs)
    for _ in range(2):
        cycle, logits = cycle_of(layout), torch.randn(layout.num_rows, VOCABULARY)
        operations.seen.clear()
        with operations:
            accept(acceptor, batch, cycle, block, logits)
    return Counter(name.split(" <- ")[0] for name in operations.seen.elements())


def test_simulated_cycles_launch_what_real_ones_do(monkeypatch):
    """They add a read of their table of lengths. Nothing is launched that is thrown away."""
    count = functools.partial(launches_of, monkeypatch=monkeypatch)
    whole, ragged = whole_blocks(2, WIDTH), VerifyLayout(2, WIDTH, np.array([1, 3]))
    real, of_ragged = count(None, whole), count(None, ragged)
    assert real["accept_blocks"] == 1 and real["max"] == 1 and not of_ragged <= real
    read = Counter(["index_select"])
    assert count(SIMULATION, whole) == real + read
    compared = Counter(["eq", "cumprod", "sum"])
    assert count(SIMULATION, ragged) == of_ragged - compared + read


def masks_of(rows: list[int], captured: list[int] | None = None) -> SamplingMasks:
    """Make the masks of these requests. captured: those among them that return log probabilities too."""
    info = SimpleNamespace(
        sampling_mask_batch_indices=torch.tensor(rows),
        sampling_mask_top_ks=[2] * len(rows),
        sampling_support_logprobs_capture_indices=None if captured is None else torch.tensor(captured),
    )
    masks = SamplingMasks(info, WIDTH)
    assert masks.are_requested
    return masks


def test_who_returns_masks():
    assert not SamplingMasks(SimpleNamespace(sampling_mask_batch_indices=None), WIDTH).are_requested
    assert not SamplingMasks(SimpleNamespace(), WIDTH).are_requested


def test_the_sampler_captures_every_slot_of_a_masked_request():
    fields = masks_of([0, 2]).sampler_fields()
    assert fields["sampling_mask_batch_indices"].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert fields["sampling_support_logprobs_capture_indices"] is None
    fields = masks_of([1, 3], [1]).sampler_fields()
    assert fields["sampling_mask_batch_indices"].tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    assert fields["sampling_support_logprobs_capture_indices"].tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("is_captured", [False, True])
def test_masks_of_the_sampler_are_cut_to_what_each_request_emits(is_captured):
    """The sampler's rows become blocks, and each request gets its own commit length."""
    masks = masks_of([0, 2], [1] if is_captured else None)
    slots = 2 * WIDTH
    drawn = SamplingMaskOutput(
        token_ids=torch.arange(2 * slots, dtype=torch.int32).view(slots, 2),
        lengths=torch.arange(slots),
        selected_logprobs=-torch.arange(slots).float(),
        support_logprobs=torch.arange(2.0 * WIDTH).view(WIDTH, 2) if is_captured else None,
        statuses=10 * torch.arange(slots),
    )
    accepted = accepted_blocks(
        torch.tensor([1, 3, 0], dtype=torch.int32), torch.zeros(3, WIDTH, dtype=torch.int64)
    )
    found = masks.output(accepted, drawn)
    assert found.num_accept_tokens.tolist() == [2, 1]
    assert found.token_ids.tolist() == drawn.token_ids.view(2, WIDTH, 2).tolist()
    assert found.lengths.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found.selected_logprobs.tolist() == [[0, -1, -2, -3], [-4, -5, -6, -7]]
    assert found.statuses.tolist() == [[0, 10, 20, 30], [40, 50, 60, 70]]
    support = found.support_logprobs
    assert support.tolist() == [[[0, 1], [2, 3], [4, 5], [6, 7]]] if is_captured else support is None


def test_masks_of_greedy_blocks_are_their_tokens():
    """SGLang's sampler draws nothing if all requests of a batch are greedy."""
    tokens = torch.arange(3 * WIDTH).view(3, WIDTH)
    accepted = accepted_blocks(torch.tensor([1, 3, 0], dtype=torch.int32), tokens)
    found = masks_of([0, 2], [1]).output(accepted)
    assert found.num_accept_tokens.tolist() == [2, 1]
    assert found.token_ids.tolist() == tokens[[0, 2], :, None].tolist()
    assert found.lengths.tolist() == [[1] * WIDTH] * 2
    assert found.selected_logprobs.tolist() == [[0.0] * WIDTH] * 2
    assert found.support_logprobs.tolist() == [[[0.0]] * WIDTH]


def test_masks_of_drawn_drafts_hold_the_tokens_of_each_slot():
    """Slot k's mask is that of the distribution after position k, of which the emitted token is a member."""
    masks, generator = masks_of([0, 2], [1]), torch.Generator().manual_seed(4)
    tokens = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:WIDTH] for _ in range(3)])
    others = (tokens + 1) % VOCABULARY
    shares = torch.linspace(0.55, 0.95, 3 * WIDTH).view(3, WIDTH, 1)
    probs = torch.zeros(3, WIDTH, VOCABULARY)
    probs = probs.scatter(2, tokens[..., None], shares).scatter(2, others[..., None], 1 - shares)
    found = masks.output(accepted_blocks(torch.tensor([1, 3, 0], dtype=torch.int32), tokens), probs=probs)
    assert found.num_accept_tokens.tolist() == [2, 1]
    assert found.lengths.tolist() == [[2] * WIDTH] * 2
    assert found.token_ids.tolist() == torch.stack((tokens, others), dim=2)[[0, 2]].tolist()
    torch.testing.assert_close(found.selected_logprobs, shares[[0, 2], :, 0].log())
    torch.testing.assert_close(found.support_logprobs, torch.cat((shares, 1 - shares), dim=2)[[2]].log())
