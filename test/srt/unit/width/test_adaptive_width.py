"""The worker's side of adaptive width, without an engine: settings, choosing, learning, agreeing ranks."""

import copy
import json
import logging
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout
from sglang_dflash.srt.speculative.cycle.plan import NO_WORK, CyclePlan, Proposals
from sglang_dflash.srt.speculative.cycle.ragged_graphs import AnyRows
from sglang_dflash.srt.speculative.drafters.copies import UNKNOWN
from sglang_dflash.srt.speculative.width import policy
from sglang_dflash.srt.speculative.width.break_even import AdaptiveFromBreakEven
from sglang_dflash.srt.speculative.width.controller import AdaptiveLengths, WholeBlocks
from sglang_dflash.srt.speculative.width.estimates import MODES, CostTable, CycleClock
from sglang_dflash.srt.speculative.width.measure import make_planner, settings_of_adaptive_lengths
from sglang_dflash.srt.speculative.width.policy import HOLD, LengthChooser
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings
from sglang_dflash.srt.speculative.width.timers import seconds_overlapped

WIDTHS = (1, 2, 4, 8)


# -- settings


@pytest.mark.parametrize(
    ("block_size", "on_cpu", "on_gpu"),
    [
        (1, (1,), (1,)),
        (2, (1, 2), (1, 2)),
        (3, (1, 2, 3), (1, 3)),
        (8, (1, 2, 4, 8), (1, 4, 8)),
        (10, (1, 2, 4, 8, 10), (1, 5, 10)),
        (16, (1, 2, 4, 8, 16), (1, 8, 16)),
    ],
)
def test_default_widths(block_size, on_cpu, on_gpu):
    assert AdaptiveSettings().verify_lens(block_size, "cpu") == on_cpu
    assert AdaptiveSettings().verify_lens(block_size, "cuda") == on_gpu


def test_whole_blocks_while_kv_slots_have_no_memory(monkeypatch, caplog):
    """Start-up would measure on slots that SGLang backs with memory after all graphs exist."""
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(DFlashOptions.ADAPTIVE.variable, "{}")
    runner = SimpleNamespace(token_to_kv_pool=SimpleNamespace(post_capture_active=True))
    worker = SimpleNamespace(block_size=8, device="cuda", target_worker=SimpleNamespace(model_runner=runner))
    settings = settings_of_adaptive_lengths(worker)
    assert settings is None and isinstance(make_planner(worker, settings, 1, None, None), WholeBlocks)
    assert "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING" in caplog.text


def test_the_first_of_overlapping_cycles_is_not_timed(monkeypatch):
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    worker = SimpleNamespace(device="cuda", observers=[])

    def run(seconds):
        Event.wait(seconds - 1)
        for observer in worker.observers:
            observer.on_drafted(None, None, None)
        Event.wait(1)

    # Each record of an event takes a second, of which a draft has its last.
    cycle, draft = seconds_overlapped(worker, run, [50, 3, 5])
    assert (cycle, draft) == pytest.approx((6.5, 4.0)) and worker.observers == []


def test_settings_reach_the_other_processes(tmp_path, monkeypatch):
    monkeypatch.delenv(DFlashOptions.ADAPTIVE.variable, raising=False)
    assert AdaptiveSettings.from_environment() is None
    path = tmp_path / "widths.json"
    path.write_text(json.dumps({"candidate_steps": [0, 2, 5], "probe_share": 0.01}))
    monkeypatch.setenv(DFlashOptions.ADAPTIVE.variable, "")
    settings = AdaptiveSettings.read(str(path))
    settings.to_environment()
    assert AdaptiveSettings.from_environment() == settings
    assert settings.probe_share == 0.01
    assert settings.verify_lens(8, "cpu") == (1, 3, 6)
    AdaptiveSettings().to_environment()
    assert AdaptiveSettings.from_environment() == AdaptiveSettings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ("Invalid JSON",)),
        ("[0, 1]", ("JSON object", "candidate_steps")),
        ('{"candidate_step": [0]}', ("candidate_step: Unexpected", "with any of")),
        ('{"candidate_steps": [3, 1]}', ("ascend", "[3, 1]")),
        ('{"candidate_steps": [3]}', ("two steps", "--speculative-num-draft-tokens")),
        ('{"candidate_steps": [-1, 1]}', ("candidate_steps.0", "greater than or equal to 0", "-1")),
        ('{"candidate_steps": [0, true]}', ("candidate_steps.1", "valid integer", "True")),
        ('{"candidate_steps": 3}', ("candidate_steps", "valid array")),
        ('{"probe_share": -1}', ("probe_share", "-1")),
        ('{"probe_share": true}', ("probe_share", "True")),
        ('{"probe_share": NaN}', ("probe_share",)),
        (
            '{"probe_share": -1, "candidate_steps": 3}',
            ("probe_share", "-1", "candidate_steps", "valid array"),
        ),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(text, words, tmp_path):
    path = tmp_path / "widths.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        AdaptiveSettings.read(str(path))
    assert all(word in str(caught.value) for word in (*words, str(path)))


def test_more_than_the_block_holds():
    with pytest.raises(ValueError, match="9 drafted tokens .* block of 8"):
        AdaptiveSettings(candidate_steps=(0, 9)).verify_lens(8, "cpu")


# -- choosing and learning


class Clock(CycleClock):
    """Cycles take twice what is expected of them."""

    def __init__(self, costs: CostTable):
        super().__init__("cpu")
        self.costs, self.timings = costs, []

    def stop(self, work=None):
        self.timings.append((work, 2 * self.costs.expected(work) if work.requests else 1.0))

    def finished(self):
        timings, self.timings = self.timings, []
        return timings


def request(row: int, grammar=None, **params) -> SimpleNamespace:
    defaults = dict(
        logit_bias=None, min_new_tokens=0, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0
    )
    return SimpleNamespace(
        row=row,
        kv=SimpleNamespace(req_pool_idx=None, kv_committed_len=100),  # as if it had just ended
        output_ids=[],
        grammar=grammar,
        sampling_params=SimpleNamespace(**defaults | {"top_k": 1} | params),
    )


def batch_of(*reqs: SimpleNamespace, has_processor: bool = False) -> SimpleNamespace:
    info = SimpleNamespace(has_custom_logit_processor=has_processor)
    return SimpleNamespace(reqs=list(reqs), sampling_info=info, req_pool_indices_cpu=rows_of(reqs))


def rows_of(reqs: Sequence[SimpleNamespace]) -> torch.Tensor:
    return torch.tensor([req.row for req in reqs])


def prompts_of(*reqs: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(new_reqs=reqs, table_rows=rows_of(reqs).numpy())


def adaptive(group=None, row=0.06, log_every=40, backends=None, table=None) -> AdaptiveLengths:
    """Make one. row: seconds of a slot, unless a table of costs is given."""
    costs = 1.0 + row * (np.array(WIDTHS) - 1)
    table = table or CostTable(
        np.array([1, 64]), np.array(WIDTHS), np.stack([costs, costs]), np.array([0.1, 0.1])
    )
    group = group or SimpleNamespace(world_size=1, rank_in_group=0)
    clock, metrics = Clock(copy.deepcopy(table)), DFlashMetrics(7, None)
    return AdaptiveLengths(LengthChooser(table, 32), backends or AnyRows(), clock, group, metrics, log_every)


def choose(width: AdaptiveLengths, batch, draws=False, matches=0, caps=7) -> CyclePlan:
    """Plan a cycle. matches, caps: of each request, or of all."""
    n = len(batch.reqs)
    return width.choose(batch, draws, np.broadcast_to(matches, n), np.broadcast_to(caps, n))


def run(width: AdaptiveLengths, batch, cycles: int, kept, **options) -> list[CyclePlan]:
    """Run cycles whose accept lengths arrive one late. kept: plan -> accept lengths."""
    plans: list[CyclePlan] = []
    for _ in range(cycles):
        plans.append(choose(width, batch, **options))
        width.on_launched(plans[-1])
        if len(plans) > 1:
            width.on_accept_lens(plans[-2], kept(plans[-2]), None)
    return plans


def test_a_choice_is_held_until_something_longer_matches():
    """Of a held cycle that drafts nothing, nothing is learned; another batch ends the hold."""
    width, batch = adaptive(), batch_of(request(0), request(1))
    width.begin_prefill(prompts_of(*batch.reqs))
    drafting = choose(width, batch, matches=5)
    held = [choose(width, batch, matches=5) for _ in range(HOLD - 1)]
    assert all(plan.layout is drafting.layout and plan.work == drafting.work for plan in held)
    assert not any(plan.matches.size for plan in held), "copies that are not made are not compared"
    assert choose(width, batch, matches=5).matches.size
    run(width, batch, 160, lambda plan: [0] * 2)
    width.chooser._probe_share = 0.0
    while choose(width, batch).work == NO_WORK:
        pass
    rest = [choose(width, batch) for _ in range(HOLD - 1)]
    assert all(plan.work == NO_WORK and plan.verify_len == 1 for plan in rest)
    assert choose(width, batch).work != NO_WORK
    assert choose(width, batch).work == NO_WORK
    assert choose(width, batch, matches=9).work != NO_WORK
    assert choose(width, batch_of(request(2))).work != NO_WORK


def test_blocks_of_one_length_beside_a_custom_logit_processor():
    reqs, caps = [request(row) for row in range(4)], np.array([0, 7, 7, 7], dtype=np.int32)
    assert choose(adaptive(), batch_of(*reqs), caps=caps).layout.num_draft_tokens[0] == 0
    plan = choose(adaptive(), batch_of(*reqs, has_processor=True), caps=caps)
    assert set(plan.layout.num_draft_tokens.tolist()) == {plan.verify_len - 1} and plan.verify_len > 1
    assert plan.max_accept[0] == 0


class WidenedRows:
    """A backend that verifies one more token of each request than is chosen, as one that fills a graph."""

    def select(self, lengths: np.ndarray, needs_rectangle: bool = False) -> VerifyLayout:
        return AnyRows().select(np.minimum(lengths + 1, 7))


@pytest.mark.parametrize(("backends", "fits"), [(AnyRows(), True), (WidenedRows(), False)])
def test_draft_blocks_are_as_wide_as_what_is_verified(backends, fits):
    """Else labels of the narrow blocks' estimate would be of slots that those do not have."""
    costs, draft = np.array([1.0, 1.1, 1.2, 9.0]), np.array([0.1, 0.9])
    table = CostTable(np.array([1]), np.array(WIDTHS), costs[None], draft[None], draft_slots=[3, 7])
    width = adaptive(backends=backends, table=table)
    batch = batch_of(request(0, grammar=True))
    assert width._describe(batch, False).modes.tolist() == [len(MODES) - 1]
    width.begin_prefill(prompts_of(*batch.reqs))
    plans = run(width, batch, 60, lambda plan: plan.layout.num_draft_tokens)
    assert any(plan.draft_slots == 3 and plan.verify_len == 4 for plan in plans) == fits
    assert all(
        plan.draft_slots in (0, 3) and plan.verify_len <= (plan.draft_slots or 7) + 1 for plan in plans
    )
    assert any(plan.verify_len == 5 for plan in plans) != fits


def test_accept_lengths_of_a_rows_previous_request_are_dropped():
    width, old, new = adaptive(), batch_of(request(3)), batch_of(request(3))
    width.begin_prefill(prompts_of(*old.reqs))
    plans = run(width, old, 30, lambda plan: [0])
    # Under overlap scheduling, before the old one's last cycle is known.
    width.begin_prefill(prompts_of(*new.reqs))
    width.on_accept_lens(plans[-1], [0], None)
    found = width.chooser.drafts.prefix_accept_probs(np.array([3, 5]), np.array([0, 0]))
    assert (found[0] == found[1]).all()


def test_an_unchanged_batch_is_described_once():
    width, first, second = adaptive(), request(0), request(1)
    batches = [
        choose(width, batch_of(*reqs)).requests
        for reqs in ([first, second], [first, second], [second], [second, first])
    ]
    assert batches[0] is batches[1] and len(set(map(id, batches))) == 3
    assert [batch.rows.tolist() for batch in batches[1:]] == [[0, 1], [1], [1, 0]]
    width.begin_prefill(prompts_of(request(1)))
    assert choose(width, batch_of(second, first)).requests is not batches[-1]


def test_running_requests_of_a_mixed_batch_are_not_new():
    width, running = adaptive(), batch_of(request(1))
    width.begin_prefill(prompts_of(*running.reqs))
    plan = choose(width, running)
    width.on_launched(plan)
    width.begin_prefill(prompts_of(request(2)))
    width.on_accept_lens(plan, [0], None)
    known, new = width.chooser.drafts.prefix_accept_probs(np.array([1, 2]), np.array([0, 0]))
    assert known[0] < new[0]


def proposals(lengths: list[int], right: list[int]):
    """Make the outcome of a cycle's copies, as `CopySource.record` does."""
    return Proposals(torch.tensor(lengths, dtype=torch.int32), torch.tensor(right))


def test_copies_teach_their_own_estimate(monkeypatch):
    """With own lengths every match is compared with the output, used or not."""
    monkeypatch.setenv(DFlashOptions.COPY_AHEAD.variable, "1")
    monkeypatch.setattr(policy, "HOLD", 1)
    width, batch = adaptive(), batch_of(*(request(row) for row in range(3)))
    width.begin_prefill(prompts_of(*batch.reqs))
    for _ in range(60):
        plan = choose(width, batch, matches=np.array([9, 12, 0]))
        plan = plan._replace(layout=VerifyLayout(3, 8, np.array([7, 0, 7])))
        width.on_accept_lens(plan, [7, 0, 2], proposals([9, -12, 0], [7, 0, 0]))
    copies, drafts = width.chooser.copies.averages[0], width.chooser.drafts.averages[0]
    assert copies[9] > 0.9 and copies[14] > 0.9 and copies[12] < 0.6
    assert drafts[1] > 0.9 and drafts[2] < 0.1, "of the third request's draft alone"
    plan = choose(width, batch, matches=np.array([9, 0, 0]))
    assert plan.copies.tolist() == [True, False, False] and plan.layout.num_draft_tokens[0] == 7
    assert width.report()["copy_accept_probs"]["greedy"][9 - 3] > 0.9


def test_late_knowledge_teaches_what_may_be_a_match():
    """With own lengths on a GPU: a request that copies was not drafted for, and may have had no match."""
    width, batch = adaptive(), batch_of(*(request(row) for row in range(3)))
    width.begin_prefill(prompts_of(*batch.reqs))
    before = width.chooser.drafts.averages
    for _ in range(60):
        plan = choose(width, batch, matches=UNKNOWN)
        assert plan.matches.tolist() == [1, 1, 1]
        plan = plan._replace(
            layout=VerifyLayout(3, 8, np.array([7, 7, 0])), copies=np.array([True, True, False])
        )
        width.on_accept_lens(plan, [2, 0, 0], proposals([9, 0, 0], [2, 0, 0]))
    assert (width.chooser.drafts.averages == before).all(), "nothing was drafted"
    copies = width.chooser.copies.averages[0]
    assert 0.2 < copies[1] < 0.45, "a third of what may be a match is one"
    plan = plan._replace(layout=VerifyLayout(3, 8, np.array([2, 7, 0])))
    width.on_accept_lens(plan, [2, 0, 0], proposals([9, 0, -5], [7, 0, 1]))
    assert choose(width, batch, matches=UNKNOWN).matches.tolist() == [16, 1, 6], (
        "whole copies go on, used or not"
    )


def test_modes():
    batch = batch_of(
        request(0),
        request(1, top_k=50),
        request(2, grammar=object()),
        request(3, repetition_penalty=1.1),
        request(4, min_new_tokens=3),
        request(5, logit_bias={"3": 1.0}),
    )
    width = adaptive()
    for draws_drafts, sampled in ((False, "sampled"), (True, "drawn")):
        modes = choose(width, batch, draws_drafts).requests.modes
        assert [MODES[mode] for mode in modes] == ["greedy", sampled, *["constrained"] * 4]


def test_ranks_take_what_rank_0_chose(monkeypatch):
    """A rank other than 0 does not choose, and has no expectations to log."""
    broadcasts, chosen = [], [[3, 3], [0, 1], [0, 0], [0, 0]]

    def broadcast(values, src, group):
        broadcasts.append((src, group))
        values.copy_(torch.tensor(chosen))

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    group = SimpleNamespace(world_size=2, rank_in_group=1, ranks=[6, 7], cpu_group="host")
    width = adaptive(group=group, log_every=1)
    plan = choose(width, batch_of(request(0), request(1)))
    assert broadcasts == [(6, "host")] and plan.verify_len == 4
    assert plan.layout.num_draft_tokens.tolist() == [3, 3] and plan.copies.tolist() == [False, True]
    width.on_launched(plan)
    assert width.report()["measured_over_expected_time"] is None
    # If rank 0 chooses for several cycles, all ranks run them without asking.
    chosen[:] = [[0, 0], [0, 0], [3, 3], [0, 0]]
    next_batch = batch_of(request(2), request(3))
    plans = [choose(width, next_batch) for _ in range(4)]
    assert [plan.verify_len for plan in plans] == [1] * 4 and len(broadcasts) == 3


# -- whole blocks of few requests


def note(asked: list[str], owner, name: str) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: asked.append(name) or original(*args))


def from_three() -> tuple[AdaptiveFromBreakEven, list[str]]:
    """Make a planner that is adaptive from three requests on, and a log of what it asks for."""
    plain, asked = adaptive(), []
    width = AdaptiveFromBreakEven(
        3,
        WholeBlocks(8),
        chooser=plain.chooser,
        backends=plain._backends,
        clock=plain._clock,
        tp_group=plain._tp_group,
        metrics=plain._metrics,
        log_every=40,
    )
    for owner, name in (
        (width.chooser, "choose"),
        (width._clock, "stop"),
        (width._clock, "interrupt"),
        (width._backends, "select"),
    ):
        note(asked, owner, name)
    return width, asked


def test_few_requests_cost_what_whole_blocks_cost():
    width, asked = from_three()
    few, many = batch_of(request(0), request(1)), batch_of(*map(request, range(3)))
    width.begin_prefill(prompts_of(*many.reqs))
    asked.clear()
    averages = width.chooser.drafts.averages
    plans = run(width, few, 20, lambda plan: [0, 0])
    assert asked == [] and (width.chooser.drafts.averages == averages).all()
    assert all(plan.layout.is_rectangle and plan.verify_len == 8 for plan in plans)
    assert plans[0].copies_each_match, "a request's record decides what it copies, as without adaptive width"


def test_lengths_are_adaptive_between_two_pauses():
    width, asked = from_three()
    few, many = batch_of(request(0), request(1)), batch_of(*map(request, range(3)))
    width.begin_prefill(prompts_of(*many.reqs))
    late = choose(width, few)
    width.on_launched(late)
    plans = run(width, many, 120, lambda plan: [0] * 3)
    width.on_accept_lens(late, [7, 7], None)
    assert [plan.verify_len for plan in plans[-40:]].count(1) > 20, "a useless draft ends as plain decoding"
    assert asked.count("stop") == 120
    for _ in range(2):
        asked.clear()
        assert choose(width, few).verify_len == 8
        assert asked == ["interrupt", "select"], "no time passes for a cycle, and graphs have whole blocks"
        assert choose(width, few).verify_len == 8 and len(asked) == 2
        assert choose(width, many).work != NO_WORK, "no hold outlives a pause"


def test_start_up_runs_both_kinds_of_cycles():
    width, asked = from_three()
    unlike, whole = width.plans_of_each_layout(4)
    assert unlike.layout.num_draft_tokens.tolist() == [7, 0, 7] and len(unlike.copies) == 3
    assert whole.verify_len == 8 and whole.copies_each_match and asked == ["select", "interrupt", "select"]


class Event:
    """A CUDA event, over at once. Each record takes a second."""

    made = seconds = 0

    def __init__(self, enable_timing):
        assert enable_timing
        Event.made += 1

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


def test_a_clock_on_a_gpu_records_its_events_again(monkeypatch):
    monkeypatch.setattr("torch.cuda.Event", Event)
    clock, before = CycleClock("cuda"), Event.made
    clock.start()
    for _ in range(20):
        for work in ("first", "second"):  # launched before the first is read
            clock.stop(work)
        assert clock.finished() == [("first", 1.0), ("second", 1.0)]
    assert Event.made == before + 3, "two cycles and the end of the one before"


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
