"""Decisions of the worker that no run on a CPU shows, and refusals at its start."""

import logging
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from support.decisions import accepted_blocks
from support.engine import start

from sglang_dflash.srt.models.dflash import DFlashDraftModel
from sglang_dflash.srt.speculative import dflash_utils, dflash_worker
from sglang_dflash.srt.speculative.acceptance import constraints
from sglang_dflash.srt.speculative.cycle.block import Cycle, DraftBlock
from sglang_dflash.srt.speculative.cycle.host import ragged_ranges
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks
from sglang_dflash.srt.speculative.cycle.plan import CyclePlan
from sglang_dflash.srt.speculative.dflash_info import DFlashVerifyInput
from sglang_dflash.srt.speculative.dflash_utils import has_room_for_draft_graphs
from sglang_dflash.srt.speculative.dflash_worker import DFlashWorker
from sglang_dflash.srt.speculative.drafters.copies import CopySource
from sglang_dflash.srt.speculative.kv_pool import check_shares_slots


def worker(**fields) -> DFlashWorker:
    """Make a worker without its constructor."""
    made = object.__new__(DFlashWorker)
    defaults = {"_target_worker": MagicMock(), "device": "cpu", "gpu_id": 0, "block_size": 4, "observers": ()}
    vars(made).update({**defaults, **fields})
    return made


def test_grammars_run_beside_verify(monkeypatch):
    """The copy of the drafted chain to the host starts before verify is launched.

    Behind verify in the stream it would arrive only after verify, and the GPU would wait for the grammars.
    """
    events = []
    accepted = accepted_blocks(torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int64))
    monkeypatch.setattr(Cycle, "begin", lambda *_: MagicMock(bs=1, verify_len=4))
    monkeypatch.setattr(dflash_worker, "verify", lambda *_: events.append("verify") or MagicMock())
    # A tree is any object here.
    monkeypatch.setattr(
        dflash_worker.GrammarTree, "from_linear_chain", lambda tokens: events.append("copy") or object()
    )
    monkeypatch.setattr(dflash_worker.Penalties, "are_requested", lambda info: False)
    mask = MagicMock(side_effect=lambda **_: events.append("mask"))
    monkeypatch.setattr(constraints, "build_grammar_vocab_mask", mask)
    drafter, acceptor = MagicMock(), MagicMock()
    drafter.propose.return_value = DraftBlock(torch.zeros(1, 4, dtype=torch.int64))
    acceptor.accept.side_effect = lambda *_, **__: events.append("accept") or accepted
    made = worker(
        drafter=drafter, acceptor=acceptor, target_states=MagicMock(), verify_tail=MagicMock(),
        penalties=MagicMock(), copies=CopySource(4, MagicMock()),
    )  # fmt: skip
    info = SimpleNamespace(logit_bias=None, is_all_greedy=True, has_custom_logit_processor=False)
    batch = MagicMock(has_grammar=True, sampling_info=info, return_logprob=False)
    batch.spec_info.arriving_lens = None
    made.run_cycle(batch, CyclePlan(whole_blocks(1, 4)), made.copies.look_up(batch))
    assert events == ["copy", "verify", "mask", "accept"]


def test_a_draft_gets_graphs_if_there_is_room(monkeypatch, caplog):
    monkeypatch.setattr(dflash_utils, "get_parallel", MagicMock)

    def has_room(device: str, free_gb: float) -> bool:
        sync = SimpleNamespace(available_memory_gb=lambda *_, **__: free_gb)
        return has_room_for_draft_graphs(sync, device, 0)

    assert has_room("cpu", 0.0) and has_room("cuda", 1.5)
    with caplog.at_level(logging.WARNING):
        assert not has_room("cuda", 0.25)
    assert "0.25 GB" in caplog.text and "--mem-fraction-static" in caplog.text


@pytest.mark.parametrize(
    ("pool", "word"),
    [
        (
            SimpleNamespace(k_buffer=[torch.zeros(8, 2, 4).transpose(0, 1)] * 2, dtype=torch.float32),
            "row per slot",
        ),
        (SimpleNamespace(full_kv_pool=None), "SimpleNamespace"),
    ],
    ids=["hnd", "a pool of pools"],
)
def test_a_kv_pool_that_cannot_be_written_is_refused_at_start_up(pool, word):
    start()
    pool.v_buffer = getattr(pool, "k_buffer", None)
    with pytest.raises(ValueError, match=word):
        DFlashDraftModel.use_pool(MagicMock(), pool)


def test_the_drafts_kv_has_the_targets_slots():
    nine, eight = (SimpleNamespace(token_to_kv_pool=SimpleNamespace(size=size)) for size in (9, 8))
    check_shares_slots(eight, eight)
    with pytest.raises(RuntimeError, match="target and draft pool hold 9 and 8"):
        check_shares_slots(nine, eight)


def test_blocks_carry_no_mask():
    """SGLang would fill one of bs * B * context entries in every cycle, which no backend reads."""
    verify = DFlashVerifyInput(8, CaptureHiddenMode.FULL, custom_mask=torch.ones(3, dtype=torch.bool))
    assert verify.custom_mask is None


def test_ragged_ranges():
    assert ragged_ranges([5, 0, 7], [3, 1, 2], torch.device("cpu")).tolist() == [5, 6, 7, 0, 7, 8]
    assert ragged_ranges([4], [0], torch.device("cpu")).tolist() == []
