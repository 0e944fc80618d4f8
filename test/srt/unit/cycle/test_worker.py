"""Decisions of the worker, with all its collaborators mocked."""

import contextlib
import logging
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from support.acceptors import accept, make_acceptor
from support.decisions import Decision, accepted_blocks, decide
from support.draft_probs import one_hot
from support.engine import start
from support.sampling_parameters import VOCABULARY, sampling_info

from sglang_dflash.srt.models.dflash import DFlashDraftModel
from sglang_dflash.srt.speculative import dflash_utils, dflash_worker
from sglang_dflash.srt.speculative import request_fields as caps_module
from sglang_dflash.srt.speculative.acceptance import constraints
from sglang_dflash.srt.speculative.cycle.block import DraftBlock
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks
from sglang_dflash.srt.speculative.cycle.plan import CyclePlan
from sglang_dflash.srt.speculative.cycle.prompts import packed_ranges
from sglang_dflash.srt.speculative.dflash_info import DFlashVerifyInput
from sglang_dflash.srt.speculative.dflash_utils import check_kv_budget, has_room_for_draft_graphs
from sglang_dflash.srt.speculative.dflash_worker import DFlashWorker
from sglang_dflash.srt.speculative.drafters.base import VerifyTail
from sglang_dflash.srt.speculative.drafters.copies import CopySource
from sglang_dflash.srt.speculative.request_fields import requested_caps


def worker(**fields) -> DFlashWorker:
    """Make a worker without its constructor."""
    made = object.__new__(DFlashWorker)
    defaults = {
        "_target_worker": MagicMock(),
        "device": "cpu",
        "gpu_id": 0,
        "block_size": 4,
        "observers": (),
    }
    vars(made).update({**defaults, **fields})
    return made


def test_grammars_run_beside_verify(monkeypatch):
    """The copy of the drafted chain to the host starts before verify is launched.

    Behind verify in the stream it would arrive only after verify, and the GPU would wait for the grammars.
    """
    events = []
    accepted = accepted_blocks(torch.zeros(1, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int64))
    monkeypatch.setattr(dflash_worker.Cycle, "begin", lambda *_: MagicMock(bs=1, verify_len=4))
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
    made.run_cycle(batch, CyclePlan(whole_blocks(1, 4)))
    assert events == ["copy", "verify", "mask", "accept"]


class Sync:
    """Synchronization of a rank other than the first."""

    def __init__(self, rank_0: Decision | None, free_gb: float = 0.0):
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
    assert tail.states_to_commit(by_graph) is states  # a graph without our tail
    batch = SimpleNamespace(positions=object(), out_cache_loc=object(), batch_size=2)
    for hook in target.capture_tail_hooks:
        hook(target.decode_cuda_graph_runner, output, batch, 6)
    assert len(drafter.write_context_in_graph.mock_calls) == one_naming
    if one_naming:
        absorbed, *where = drafter.write_context_in_graph.call_args.args
        assert torch.equal(absorbed, states[:6]) and where == [batch.positions, batch.out_cache_loc]
    assert (tail.states_to_commit(by_graph) is None) == one_naming
    assert tail.states_to_commit(eager) is states
    target.decode_cuda_graph_runner = MagicMock()  # another width's, made by others
    assert tail.states_to_commit(by_graph) is states


@pytest.mark.parametrize(("defers", "by_rows"), [(True, False), (False, False), (True, True)])
def test_the_graph_of_plain_cycles_leaves_deferred_context_to_the_commit(defers, by_rows):
    """A graph of 6 rows for up to 6 requests also runs blocks of fewer requests, so it absorbs."""
    drafter, runner = MagicMock(defers_plain_cycles=defers), MagicMock(capture_tail_hooks=[])
    runner.decode_cuda_graph_runner.ragged_verify_mode = by_rows
    defers = defers and not by_rows
    runner.kv_index_translator.space.return_value = SimpleNamespace(write=None)
    tail = VerifyTail(drafter, runner, runner)
    output = SimpleNamespace(hidden_states=torch.zeros(8, 4))
    [hook] = runner.capture_tail_hooks
    hook(runner.decode_cuda_graph_runner, output, MagicMock(batch_size=6), 6)
    target_out = SimpleNamespace(logits_output=output, can_run_cuda_graph=True)
    assert (drafter.write_context_in_graph.mock_calls == []) == defers
    assert (tail.states_to_commit(target_out) is output.hidden_states) == defers


@pytest.mark.parametrize("agrees", [True, False])
def test_ranks_agree_on_a_verdict_in_one_broadcast(agrees):
    out = torch.arange(8).view(2, 4)
    mine = decide(torch.tensor([3, 0], dtype=torch.int32), out + 100)
    theirs = decide(torch.tensor([1, 2], dtype=torch.int32), out)
    sync = Sync(theirs if agrees else None)
    rule = lambda *_, **__: (mine.accept_len, mine.out_tokens)  # noqa: E731
    acceptor = make_acceptor(vocab_size=1000, sync=sync, rule=rule)
    info = sampling_info({"temperature": 0.7}, {"temperature": 0.7})
    batch = SimpleNamespace(sampling_info=info, return_logprob=False)
    block = torch.zeros(2, 4, dtype=torch.int64)
    drawn = DraftBlock(block, one_hot(block[:, 1:]))
    cycle = SimpleNamespace(layout=whole_blocks(2, 4), committed=torch.tensor([5, 7]))
    agreed = accept(acceptor, batch, cycle, drawn, torch.zeros(8, VOCABULARY))
    want = theirs if agrees else mine
    for got, wanted in zip((agreed.accept_len, agreed.tokens, agreed.bonus), want, strict=True):
        assert torch.equal(got, wanted) and got.dtype == wanted.dtype
    assert sync.broadcasts == agrees


def test_caps_of_a_batch(monkeypatch):
    monkeypatch.setattr(caps_module, "runs_per_slot", lambda serialized: serialized == "of SGLang")

    def caps_of(*params, processor=None):
        reqs = [
            SimpleNamespace(
                sampling_params=SimpleNamespace(custom_params=custom), custom_logit_processor=processor
            )
            for custom in params
        ]
        return requested_caps(reqs, 8).tolist()

    assert caps_of(None, {}, {"other": 1}) == [7] * 3
    assert caps_of({"speculative_max_tokens": 0}, None, {"speculative_max_tokens": 9}) == [0, 7, 7]
    assert caps_of(None, {}, processor="serialized") == [0, 0]
    assert caps_of(None, {}, processor="of SGLang") == [7, 7]


def test_a_draft_gets_graphs_if_there_is_room(monkeypatch, caplog):
    monkeypatch.setattr(dflash_utils, "get_parallel", MagicMock)
    assert has_room_for_draft_graphs(Sync(None), "cpu", 0)
    assert has_room_for_draft_graphs(Sync(None, free_gb=1.5), "cuda", 0)
    with caplog.at_level(logging.WARNING):
        assert not has_room_for_draft_graphs(Sync(None, free_gb=0.25), "cuda", 0)
    assert "0.25 GB" in caplog.text and "--mem-fraction-static" in caplog.text


@pytest.mark.parametrize(
    ("asked", "verified", "narrows", "num_slots"),
    [
        (None, 1, True, 8),
        (2, 1, True, 3),
        (2, 5, True, 6),  # what is verified was drafted
        (7, 7, True, 8),
        (2, 1, False, 8),
    ],
)
def test_slots_that_the_draft_fills(asked, verified, narrows, num_slots, monkeypatch):
    begun = []
    monkeypatch.setattr(dflash_worker.Cycle, "begin", lambda *args: begun.append(args[-1]) or MagicMock())
    monkeypatch.setattr(dflash_worker, "draft_subset", MagicMock())
    drafter = MagicMock(narrows_blocks=narrows, to_draft=lambda rows, verified, wanted: wanted)
    made = worker(block_size=8, drafter=drafter, copies=MagicMock(), acceptor=MagicMock())
    layout = VerifyLayout(2, verified + 1, np.array([0, verified]))
    plan = CyclePlan(layout, copies=np.zeros(2, dtype=bool), draft_slots=asked)
    made._draft(SimpleNamespace(req_pool_indices_cpu=torch.arange(2)), plan)
    assert begun == [num_slots]


@pytest.mark.parametrize("block_size, local_dp", [(1, False), (4, False), (4, True)])
def test_nothing_is_captured_if_nothing_is_drafted_or_ranks_differ(block_size, local_dp, monkeypatch):
    layout = SimpleNamespace(local_dp=local_dp)
    monkeypatch.setattr(dflash_worker, "as_draft", contextlib.nullcontext)
    monkeypatch.setattr(dflash_worker, "has_room_for_draft_graphs", lambda *_: True)
    monkeypatch.setattr(dflash_worker, "get_spec", MagicMock())
    monkeypatch.setattr(dflash_worker, "get_parallel", MagicMock())
    draft_worker = MagicMock()
    made = worker(
        block_size=block_size, drafter=MagicMock(num_draft_rows=block_size), tp_sync=Sync(None),
        _draft_worker=draft_worker, draft_parallel_layout=layout, metrics=None, penalties=None,
    )  # fmt: skip
    made.init_cuda_graphs()
    draft_worker.init_cuda_graphs.assert_called_once_with(
        capture_decode_cuda_graph=block_size > 1 and not local_dp
    )


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


@pytest.mark.parametrize(
    ("slots", "budgeted", "words"),
    [
        (8, 64, None),
        (8, 63, "takes 64.0 bytes a token, but 63 were budgeted"),
        (8, None, "but None were budgeted"),
        (9, 64, "target and draft pool hold 9 and 8"),
    ],
)
def test_the_drafts_kv_has_the_targets_slots_and_what_was_budgeted(slots, budgeted, words):
    keys = [torch.zeros(9, 2, 4)] * 2  # two layers of 8 bf16 elements, for K and V, on 8 slots and padding
    draft = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(
            size=8, k_buffer=keys, get_kv_size_bytes=lambda: (9 * 2 * 8 * 2, 9 * 2 * 8 * 2)
        )
    )
    target = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(size=slots),
        kv_cache_configurator=SimpleNamespace(dflash_draft_cell_size_per_token=budgeted),
    )
    with contextlib.nullcontext() if words is None else pytest.raises(RuntimeError, match=words):
        check_kv_budget(target, draft)


def test_blocks_carry_no_mask():
    """SGLang would fill one of bs * B * context entries in every cycle, which no backend reads."""
    verify = DFlashVerifyInput(8, CaptureHiddenMode.FULL, custom_mask=torch.ones(3, dtype=torch.bool))
    assert verify.custom_mask is None


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
