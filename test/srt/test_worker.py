"""Decisions of the worker, with all its collaborators mocked."""

import contextlib
import logging
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from support.engine import start

from sglang_dflash.kernels.ops.speculative.accept import settle
from sglang_dflash.srt.models.dflash import DFlashDraftModel
from sglang_dflash.srt.speculative import dflash_utils, dflash_worker
from sglang_dflash.srt.speculative.acceptance import constraints
from sglang_dflash.srt.speculative.acceptance.greedy import Verdict
from sglang_dflash.srt.speculative.cycle.verify_tail import VerifyTail
from sglang_dflash.srt.speculative.dflash_info import packed_ranges
from sglang_dflash.srt.speculative.dflash_utils import (
    PhaseClock,
    graph_output_for_runner,
    has_room_for_draft_graphs,
)
from sglang_dflash.srt.speculative.dflash_worker import DFlashWorker
from sglang_dflash.srt.speculative.drafters.base import DraftBlock
from sglang_dflash.srt.speculative.width.adaptive import FixedWidth


def worker(**fields) -> DFlashWorker:
    made = object.__new__(DFlashWorker)
    vars(made).update(
        {"_target_worker": MagicMock(), "device": "cpu", "_gpu_id": 0, "verify_width": 4, **fields}
    )
    return made


def test_grammars_run_beside_verify(monkeypatch):
    """The copy of the drafted chain to the host starts before verify is launched.

    Behind verify in the stream it would arrive only after verify, and the GPU would wait for the grammars.
    """
    events = []
    verdict = Verdict(
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, 4, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
    )
    accepted = verdict, settle(verdict, torch.zeros(1, 4), torch.tensor([7]), broken_token=99)
    monkeypatch.setattr(DFlashWorker, "_begin_cycle", lambda *_: MagicMock(bs=1))
    monkeypatch.setattr(DFlashWorker, "_verify", lambda *_: events.append("verify") or MagicMock())
    monkeypatch.setattr(DFlashWorker, "_accept", lambda *_: events.append("accept") or accepted)
    # A tree is any object here.
    monkeypatch.setattr(
        dflash_worker.GrammarTree, "from_linear_chain", lambda tokens: events.append("copy") or object()
    )
    monkeypatch.setattr(dflash_worker.Penalties, "are_asked_for", lambda info: False)
    mask = MagicMock(side_effect=lambda **_: events.append("mask"))
    monkeypatch.setattr(constraints, "build_grammar_vocab_mask", mask)
    drafter = MagicMock()
    drafter.propose.return_value = DraftBlock(torch.zeros(1, 4, dtype=torch.int64))
    states = MagicMock()
    made = worker(
        _clock=PhaseClock(None), _drafter=drafter, _rejection_rule=None, _width=FixedWidth(4),
        _target_states=states, verify_tail=MagicMock(), _penalties=MagicMock(),
    )  # fmt: skip
    info = SimpleNamespace(logit_bias=None, is_all_greedy=True)
    made._decode(MagicMock(has_grammar=True, sampling_info=info, return_logprob=False), None, None)
    assert events == ["copy", "verify", "mask", "accept"]


class Sync:
    """Synchronization of a rank other than the first."""

    def __init__(self, rank_0: Verdict | None, free_gb: float = 0.0):
        self.rank_0, self.free_gb, self.broadcasts = rank_0, free_gb, 0

    def enabled(self, site) -> bool:
        return self.rank_0 is not None

    def sync(self, site, values):
        self.broadcasts += 1
        return torch.cat((self.rank_0.out_tokens, self.rank_0.accept_len[:, None]), dim=1).to(values.dtype)

    def available_memory_gb(self, *_, **__) -> float:
        return self.free_gb


@pytest.mark.parametrize("one_naming", [True, False])
def test_the_verify_graph_absorbs_the_commit(one_naming):
    """Nothing is left to commit if the verify graph has written the draft's KV."""
    drafter, states = MagicMock(), torch.zeros(8, 4)
    runners = [MagicMock(capture_tail_hooks=[]) for _ in range(2)]
    for runner, write in zip(runners, (None, None if one_naming else object())):
        runner.kv_index_translator.space.return_value = SimpleNamespace(write=write)
    target = runners[0]
    tail = VerifyTail(drafter, *runners)
    output = SimpleNamespace(hidden_states=states)
    by_graph, eager = (
        SimpleNamespace(logits_output=output, can_run_cuda_graph=graph) for graph in (True, False)
    )
    assert tail.left_to_commit(by_graph) is states  # a graph without our tail
    batch = SimpleNamespace(positions=object(), out_cache_loc=object())
    for hook in target.capture_tail_hooks:
        hook(target.decode_cuda_graph_runner, output, batch, 6)
    assert len(drafter.absorb.mock_calls) == one_naming
    if one_naming:
        absorbed, *where = drafter.absorb.call_args.args
        assert torch.equal(absorbed, states[:6]) and where == [batch.positions, batch.out_cache_loc]
    assert (tail.left_to_commit(by_graph) is None) == one_naming
    assert tail.left_to_commit(eager) is states
    target.decode_cuda_graph_runner = MagicMock()  # another width's, made by others
    assert tail.left_to_commit(by_graph) is states


def test_ranks_agree_on_a_verdict_in_one_broadcast():
    out = torch.arange(8).view(2, 4)
    mine = Verdict(torch.tensor([3, 0], dtype=torch.int32), out + 100, torch.tensor([103, 104]))
    theirs = Verdict(torch.tensor([1, 2], dtype=torch.int32), out, torch.tensor([1, 6]))
    sync = Sync(theirs)
    agreed = worker(_tp_sync=sync)._agree(mine)
    for name in ("accept_len", "out_tokens", "bonus"):
        got, want = getattr(agreed, name), getattr(theirs, name)
        assert torch.equal(got, want) and got.dtype == want.dtype
    assert sync.broadcasts == 1
    assert worker(_tp_sync=Sync(None))._agree(mine) is mine


def test_a_draft_gets_graphs_if_there_is_room(monkeypatch, caplog):
    monkeypatch.setattr(dflash_utils, "get_parallel", MagicMock)
    assert has_room_for_draft_graphs(Sync(None), "cpu", 0)
    assert has_room_for_draft_graphs(Sync(None, free_gb=1.5), "cuda", 0)
    with caplog.at_level(logging.WARNING):
        assert not has_room_for_draft_graphs(Sync(None, free_gb=0.25), "cuda", 0)
    assert "0.25 GB" in caplog.text and "--mem-fraction-static" in caplog.text


@pytest.mark.parametrize("verify_width", [1, 4])
def test_nothing_is_captured_if_nothing_is_drafted(verify_width, monkeypatch):
    ranks = SimpleNamespace(as_draft=contextlib.nullcontext, may_capture=lambda *_: True)
    monkeypatch.setattr(DFlashWorker, "_draft_width", lambda self: contextlib.nullcontext())
    made = worker(verify_width=verify_width, _tp_sync=Sync(None), _draft_worker=MagicMock(), _ranks=ranks)
    made.init_cuda_graphs()
    made._draft_worker.init_cuda_graphs.assert_called_once_with(capture_decode_cuda_graph=verify_width > 1)


def test_a_drafts_graphs_hold_no_logits(monkeypatch):
    """SGLang's float32 buffer [requests * block rows, vocab] would take 0.4 GB.

    This is P-EAGLE at bs 48, B 8 and V = 152k.
    """
    monkeypatch.setattr(GraphSharedOutput, "create_for_model_runner", lambda runner: "SGLang's")
    create = graph_output_for_runner()
    assert create(SimpleNamespace(is_draft_worker=False)) == "SGLang's"
    buffer = create(SimpleNamespace(is_draft_worker=True, device="cpu")).get_logits_buffer(
        151_936, rows=48 * 14
    )
    assert buffer.untyped_storage().nbytes() == 0 and buffer[:14].shape == (0, 151_936)


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


def test_packed_ranges():
    assert packed_ranges([5, 0, 7], [3, 1, 2], torch.device("cpu")).tolist() == [5, 6, 7, 0, 7, 8]
    assert packed_ranges([4], [0], torch.device("cpu")).tolist() == []


def test_only_small_copies_leave_the_host(monkeypatch):
    """A copy from pageable host memory is asynchronous up to 64 KB.

    The longest prefill chunks have 16,384 tokens.
    """
    copied = []
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor,
        "to",
        lambda self, *args, **kwargs: copied.append(self.nbytes) or to(self, *args, **kwargs),
    )
    assert packed_ranges([0], [16_384], torch.device("cpu")).numel() == 16_384
    assert copied and max(copied) < 1024
