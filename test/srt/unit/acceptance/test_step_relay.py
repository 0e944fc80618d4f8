"""Lengths and bonus tokens that acceptance relays to SGLang's next step."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers import overlap_utils
from sglang.srt.speculative import spec_utils
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from support.acceptors import accept, make_acceptor
from support.sampling_parameters import VOCABULARY, sampling_info

from sglang_dflash.srt.speculative.acceptance.acceptor import Acceptor, make_relay
from sglang_dflash.srt.speculative.cycle.block import DraftBlock
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks
from sglang_dflash.srt.speculative.dflash_info import DFlashDraftInput

ROWS = 9

pytestmark = pytest.mark.skipif(
    not hasattr(overlap_utils, "FutureRelayBuffers"), reason="SGLang 0.5.22 takes no tables"
)


def future_map() -> overlap_utils.FutureMap:
    pool = SimpleNamespace(req_to_token=torch.zeros(ROWS, 64, dtype=torch.int32))
    return overlap_utils.FutureMap("cpu", SpeculativeAlgorithm.DFLASH, pool, needs_cpu_seq_lens=False)


def accept_two(acceptor: Acceptor, rows: torch.Tensor):
    block = torch.tensor([[5, 1, 2], [5, 9, 2]])
    logits = torch.zeros(6, VOCABULARY)
    logits[torch.arange(6), torch.tensor([1, 2, 3, 1, 2, 3])] = 1.0
    cycle = SimpleNamespace(
        committed=torch.tensor([10, 20]),
        layout=whole_blocks(2, 3),
        positions=torch.zeros(2, 3, dtype=torch.int64),
    )
    batch = SimpleNamespace(
        req_pool_indices=rows, return_logprob=False, sampling_info=sampling_info({"top_k": 1}, {"top_k": 1})
    )
    return accept(acceptor, batch, cycle, DraftBlock(block), logits)


@pytest.mark.parametrize("is_adopted", [True, False])
def test_the_scheduler_reads_what_acceptance_wrote(is_adopted, monkeypatch):
    monkeypatch.setattr(overlap_utils, "_offered_relay", None)
    monkeypatch.setattr(spec_utils, "spec_need_hidden_states", lambda: False)
    acceptor = make_acceptor(relay=make_relay(ROWS if is_adopted else ROWS + 1, "cpu"))
    relay, rows = future_map(), torch.tensor([7, 2])
    assert (relay._relay is not None) == is_adopted
    accepted = accept_two(acceptor, rows)
    assert accepted.committed.tolist() == [13, 21] and accepted.bonus.tolist() == [3, 1]
    if is_adopted:
        assert relay.new_seq_lens_buf[rows].tolist() == [13, 21], "before SGLang publishes"
    relay.publish(rows, accepted.committed)
    payload = overlap_utils.RelayPayload.from_draft_input(
        DFlashDraftInput(accepted.bonus, accepted.committed)
    )
    relay.stash(rows, payload)
    assert relay.new_seq_lens_buf[rows].tolist() == [13, 21]
    assert relay.output_tokens_buf[rows].tolist() == [3, 1]
    # A prefill's lengths are other tensors, which SGLang copies as before.
    relay.publish(rows, torch.tensor([4, 5]))
    assert relay.new_seq_lens_buf[rows].tolist() == [4, 5]
