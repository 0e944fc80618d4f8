"""The worker's side of adaptive width, without an engine: settings, choosing, learning, agreeing ranks."""

import json
import logging
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks
from sglang_dflash.srt.speculative.cycle.plan import CyclePlan, Proposals
from sglang_dflash.srt.speculative.cycle.ragged_graphs import AnyRows
from sglang_dflash.srt.speculative.drafters.copies import UNKNOWN
from sglang_dflash.srt.speculative.width import measure
from sglang_dflash.srt.speculative.width.controller import AdaptiveLengths, CycleClock, WholeBlocks
from sglang_dflash.srt.speculative.width.measure import (
    CycleTimer,
    _loads,
    lens_to_measure,
    make_chooser,
)
from sglang_dflash.srt.speculative.width.policy import Costs, Policy
from sglang_dflash.srt.speculative.width.settings import lens_to_verify, read_steps

WIDTHS = (1, 2, 4, 8)


# -- settings


@pytest.mark.parametrize(
    ("block_size", "lengths"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 3)), (8, (1, 4, 8)), (10, (1, 5, 10)), (16, (1, 8, 16))],
)
def test_default_widths(block_size, lengths):
    assert lens_to_verify(None, block_size) == lengths


@pytest.mark.parametrize(
    ("most", "captured", "loads"),
    [
        (48, None, [1, 4, 13, 48]),
        (2, None, [1, 2]),
        (1, None, [1]),
        (48, [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64], [1, 4, 16, 48]),
        (8, [4, 8], [4, 8]),
    ],
)
def test_start_up_measures_four_loads(most, captured, loads):
    graphs = captured and SimpleNamespace(capture_bs=captured)
    runner = SimpleNamespace(max_running_requests=most, decode_cuda_graph_runner=graphs)
    assert _loads(runner) == loads


def test_whole_blocks_while_kv_slots_have_no_memory(monkeypatch, caplog):
    """Start-up would measure on slots that SGLang backs with memory after all graphs exist."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(DFlashOptions.ADAPTIVE.variable, "1,4,8")
    runner = SimpleNamespace(token_to_kv_pool=SimpleNamespace(post_capture_active=True))
    worker = SimpleNamespace(block_size=8, device="cuda", target_worker=SimpleNamespace(model_runner=runner))
    assert lens_to_measure(worker) == () and isinstance(make_chooser(worker, (), None, None), WholeBlocks)
    assert "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING" in caplog.text


def test_a_cycle_is_timed_behind_one_that_is_not(monkeypatch):
    """Each record of an event takes a second. A draft has its last, and a cycle one more behind the draft."""
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(measure, "make_batch", lambda *_: next(seconds))
    worker = SimpleNamespace(
        device="cuda",
        observers=[],
        target_worker=SimpleNamespace(model_runner=None),
        copies=SimpleNamespace(look_up=lambda batch: None),
    )

    def run_cycle(seconds, plan, matches):
        Event.wait(seconds - 1)
        for observer in worker.observers:
            observer.on_drafted(None, None, None)
        Event.wait(1)

    worker.run_cycle, seconds = run_cycle, iter([50, 3])
    [[cycle], [draft]] = CycleTimer(worker, AnyRows())._time([(7,)], 1, 128)
    # The record that starts the draft and the one that ends it are two of the cycle's seconds.
    assert (cycle, draft) == pytest.approx((6.0, 3.0)) and worker.observers == []


@pytest.mark.parametrize(("budget", "measured"), [(0, 2), (9, 2), (10, 3), (31, 3), (1000, 4)])
def test_the_budget_leaves_out_larger_loads(budget, measured, monkeypatch):
    """Costs of two loads tell how these grow. A cycle of n requests takes n seconds, and half of it later."""
    now, table = [0.0], torch.zeros(48, 64, dtype=torch.int32)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def time_cycles(cycles, n, context):
        seconds = n if now[0] < 50 else n / 2
        now[0] += seconds
        return np.full((2, len(cycles)), seconds)

    pool, runner = SimpleNamespace(req_to_token=table), SimpleNamespace(page_size=1, max_total_num_tokens=99)
    runner.req_to_token_pool = pool
    timer = CycleTimer(
        SimpleNamespace(block_size=8, target_worker=SimpleNamespace(model_runner=runner)), None
    )
    monkeypatch.setattr(timer, "_time", time_cycles)
    seconds = timer.time_loads([(0,), (7,)], [1, 4, 13, 48], 16, budget)
    of_loads = np.array([1, 4, 13, 48]) / (2 if budget == 1000 else 1)
    assert seconds.shape == (2, measured, 2) and (seconds[0, :, 0] == of_loads[:measured]).all()
    assert not table.any()


def test_a_file_names_drafted_tokens(tmp_path):
    path = tmp_path / "widths.json"
    path.write_text(json.dumps({"candidate_steps": [0, 2, 5]}))
    assert lens_to_verify(read_steps(str(path)), 8) == (1, 3, 6)
    assert read_steps(None) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ("Expecting property name",)),
        ("[0, 1]", ("JSON object", "candidate_steps")),
        ("null", ("JSON object", "candidate_steps")),
        ('{"candidate_step": [0]}', ("candidate_step: unknown", "with candidate_steps or nothing")),
        ('{"candidate_steps": [3, 1]}', ("ascending", "[3, 1]")),
        ('{"candidate_steps": [1, 1]}', ("ascending", "[1, 1]")),
        ('{"candidate_steps": [3]}', ("two or more", "[3]", "--speculative-num-draft-tokens")),
        ('{"candidate_steps": [-1, 1]}', ("whole numbers from 0 on", "[-1, 1]")),
        ('{"candidate_steps": [0, true]}', ("whole numbers", "[0, True]")),
        ('{"candidate_steps": [0, 1.5]}', ("whole numbers", "[0, 1.5]")),
        ('{"candidate_steps": 3}', ("candidate_steps: 3 are not",)),
        ('{"probe_share": 0.01}', ("probe_share: this key is gone: probes are spaced by what they cost",)),
        ('{"probe_share": -1, "candidate_steps": 3}', ("probe_share: this key is gone", "steps: 3 are not")),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(text, words, tmp_path):
    path = tmp_path / "widths.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_steps(str(path))
    assert all(word in str(caught.value) for word in (*words, str(path)))


def test_more_than_the_block_holds():
    with pytest.raises(ValueError, match="9 drafted tokens .* block of 8"):
        lens_to_verify((0, 9), 8)


# -- choosing and learning


class Clock(CycleClock):
    """Cycles take twice what is expected of them."""

    def __init__(self):
        super().__init__("cpu")
        self.timings = []

    def stop(self, trial=None):
        self.timings.append((trial, 2 * trial.expected))

    def finished(self):
        timings, self.timings = self.timings, []
        return timings


def request(row: int) -> SimpleNamespace:
    kv = SimpleNamespace(req_pool_idx=None, kv_committed_len=100)  # as if it had just ended
    return SimpleNamespace(row=row, kv=kv, output_ids=[])


def batch_of(*reqs: SimpleNamespace, has_processor: bool = False) -> SimpleNamespace:
    info = SimpleNamespace(has_custom_logit_processor=has_processor)
    return SimpleNamespace(reqs=list(reqs), sampling_info=info, req_pool_indices_cpu=rows_of(reqs))


def rows_of(reqs: Sequence[SimpleNamespace]) -> torch.Tensor:
    return torch.tensor([req.row for req in reqs])


def prompts_of(*reqs: SimpleNamespace, running: Sequence[SimpleNamespace] = ()) -> SimpleNamespace:
    return SimpleNamespace(new_reqs=reqs, table_rows=rows_of([*reqs, *running]).numpy())


def adaptive(group=None, row=0.06, log_every=40, backends=None) -> AdaptiveLengths:
    """Make one. row: seconds of a slot."""
    seconds = 1.0 + row * (np.array(WIDTHS) - 1)
    costs = Costs([1, 64], WIDTHS, np.stack([seconds, seconds]), np.array([0.1, 0.1]))
    group = group or SimpleNamespace(world_size=1, rank_in_group=0)
    metrics = DFlashMetrics(7, None)
    return AdaptiveLengths(Policy(costs, 32), backends or AnyRows(), Clock(), group, metrics, log_every)


def choose(width: AdaptiveLengths, batch, draws=False, matches=0, caps=7) -> CyclePlan:
    """Plan a cycle. matches, caps: of each request, or of all."""
    n = len(batch.reqs)
    return width.choose(batch, draws, np.broadcast_to(matches, n), np.broadcast_to(caps, n))


def run(width: AdaptiveLengths, batch, cycles: int, kept, **options) -> list[CyclePlan]:
    """Run cycles whose accept lengths arrive one late. kept: plan -> accept lengths."""
    plans: list[CyclePlan] = []
    for _ in range(cycles):
        plans.append(choose(width, batch, **options))
        width.on_launched()
        if len(plans) > 1:
            width.on_accept_lens(kept(plans[-2]), None)
    return plans


@pytest.mark.parametrize(("accepted", "verify_len"), [(0, 1), (7, 8)])
def test_a_useless_draft_ends_as_plain_decoding_and_a_good_one_as_whole_blocks(accepted, verify_len):
    width, batch = adaptive(row=0.02), batch_of(request(0), request(1))
    width.begin_prefill(prompts_of(*batch.reqs))
    plans = run(width, batch, 120, lambda plan: plan.max_accept.clip(max=accepted))
    assert [plan.verify_len for plan in plans[-40:]].count(verify_len) > 30
    report = width.report()
    assert sum(report["blocks_per_length"].values()) == 240 and report["probes"] > 3
    assert sum(report["cycles_per_width"].values()) == 120 and report["candidates"] == [1, 2, 4, 8]


def test_blocks_of_one_length_beside_a_custom_logit_processor():
    reqs, caps = [request(row) for row in range(4)], np.array([0, 7, 7, 7], dtype=np.int32)
    assert choose(adaptive(), batch_of(*reqs), caps=caps).layout.num_draft_tokens[0] == 0
    plan = choose(adaptive(), batch_of(*reqs, has_processor=True), caps=caps)
    assert set(plan.layout.num_draft_tokens.tolist()) == {plan.verify_len - 1} and plan.verify_len > 1
    assert plan.max_accept[0] == 0


class Blocks(AnyRows):
    """Verifies blocks of 16, of which start-up measured 8."""

    def select(self, lengths, needs_rectangle=False):
        self.is_whole = needs_rectangle
        return whole_blocks(len(lengths), 16)


def test_rows_of_a_graph_beyond_the_longest_choice():
    """The last rows of a graph, or a rectangle, may verify more than `candidate_steps` names."""
    width, batch = adaptive(backends=Blocks()), batch_of(request(0), request(1))
    width.begin_prefill(prompts_of(*batch.reqs))
    assert width.backends.is_whole, "a prefill's graph is captured with the backend of whole blocks"
    [*_, plan] = run(width, batch, 20, lambda plan: plan.max_accept)
    assert plan.verify_len == 16 and not width.backends.is_whole


def test_accept_lengths_of_a_rows_previous_request_are_dropped():
    width, old, new = adaptive(), batch_of(request(3)), batch_of(request(3))
    width.begin_prefill(prompts_of(*old.reqs))
    plans = run(width, old, 30, lambda plan: plan.max_accept)
    assert plans[-1].max_accept[0] > 0, "the last cycle must say something"
    # Under overlap scheduling, before the old one's last cycle is known.
    width.begin_prefill(prompts_of(*new.reqs))
    width.on_accept_lens([0], None)
    of_new, of_all = width.policy.acceptance.survival(np.array([3, 5]))
    assert (of_new == of_all).all() and not width._trials


def test_running_requests_of_a_mixed_batch_are_not_new():
    width, running = adaptive(), batch_of(request(1))
    width.begin_prefill(prompts_of(*running.reqs))
    choose(width, running)
    width.on_launched()
    width.begin_prefill(prompts_of(request(2), running=running.reqs))
    width.on_accept_lens([0], None)
    known, new = width.policy.acceptance.survival(np.array([1, 2]))
    assert known[0] < new[0]


def test_accept_lengths_are_of_the_oldest_cycle():
    width, batches = adaptive(), [batch_of(request(1)), batch_of(request(2))]
    width.begin_prefill(prompts_of(request(1), request(2)))
    for batch in batches:
        choose(width, batch)
    width.on_accept_lens([0], None)
    first, second = width.policy.acceptance.survival(np.array([1, 2]))
    assert first[0] < second[0]


def test_copies_say_nothing_about_the_draft():
    width, batch = adaptive(), batch_of(*(request(row) for row in range(3)))
    width.begin_prefill(prompts_of(*batch.reqs))
    before = width.policy.acceptance.averages
    for _ in range(4):
        plan = choose(width, batch, matches=np.array([14, 0, 0]))
        assert plan.copies.tolist() == [True, False, False] and plan.layout.num_draft_tokens[0] == 7
        width.on_accept_lens([7, 0, 0], Proposals(torch.tensor([14, 0, 0]), True))
    assert (width.policy.acceptance.averages < before)[0]
    copied, drafted = width.policy.acceptance.survival(np.array([0, 1]))
    assert (copied == width.policy.acceptance.averages.cumprod()).all() and drafted[0] < copied[0]


def test_late_knowledge_tells_which_matches_to_expect():
    """On a GPU the host learns of a match with the cycle's accept lengths."""
    width, batch = adaptive(), batch_of(*(request(row) for row in range(4)))
    width.begin_prefill(prompts_of(*batch.reqs))
    plan = choose(width, batch, matches=UNKNOWN)
    assert not plan.copies.any(), "there may be a match, which is not enough"
    width.on_accept_lens([0] * 4, Proposals(torch.tensor([-14, 0, -5, -16]), True))
    assert width._expected_matches[:4].tolist() == [14, 1, 5, 16]
    plan = choose(width, batch, matches=UNKNOWN)
    assert plan.copies[[0, 3]].all() and not plan.copies[1]
    accepted = np.where([True, False, True, False], plan.max_accept, 0)
    width.on_accept_lens(accepted, Proposals(torch.tensor([9, 0, -6, 16]), True))
    assert width._expected_matches[:4].tolist() == [16, 1, 6 + accepted[2] * plan.copies[2], 1], (
        "whole copies go on, others have ended"
    )
    width.begin_prefill(prompts_of(request(0)))
    assert width._expected_matches[0] == 1


def test_ranks_take_what_rank_0_chose(monkeypatch):
    """A rank other than 0 does not choose, and has no expectations to log."""
    broadcasts, chosen = [], [[3, 3], [0, 1]]

    def broadcast(values, src, group):
        broadcasts.append((src, group))
        values.copy_(torch.tensor(chosen))

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    group = SimpleNamespace(world_size=2, rank_in_group=1, ranks=[6, 7], cpu_group="host")
    width = adaptive(group=group, log_every=1)
    monkeypatch.setattr(width.policy, "choose", None)
    plan = choose(width, batch_of(request(0), request(1)))
    assert broadcasts == [(6, "host")] and plan.verify_len == 4
    assert plan.layout.num_draft_tokens.tolist() == [3, 3] and plan.copies.tolist() == [False, True]


class Event:
    """A CUDA event, over at once. Each record takes a second."""

    seconds = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.wait(1)
        self.at = Event.seconds

    @classmethod
    def wait(cls, seconds):
        cls.seconds += seconds

    def query(self):
        return True

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def test_a_clock_on_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.Event", Event)
    clock = CycleClock("cuda")
    clock.start()
    for cycle in ("first", "second"):  # launched before the first is read
        clock.stop(cycle)
    assert clock.finished() == [("first", 1.0), ("second", 1.0)] and clock.finished() == []


def test_a_clock_on_the_host():
    clock = CycleClock("cpu")
    for work in ("the first, which begins nowhere", "this", None):
        clock.stop(work)
    (first, seconds), (second, _) = clock.finished()
    assert first == "this" and seconds >= 0 and second is None
    clock.interrupt()
    clock.stop()
    assert clock.finished() == []
    clock.start()
    clock.stop()
    assert len(clock.finished()) == 1 and clock.finished() == []
