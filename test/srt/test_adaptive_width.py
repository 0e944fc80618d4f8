"""The worker's side of adaptive width, without an engine: settings, choosing, learning, agreeing ranks."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.speculative.cycle.in_flight import CycleInFlight, CyclesInFlight
from sglang_dflash.srt.speculative.width import backends as width_backends
from sglang_dflash.srt.speculative.width.adaptive import AdaptiveWidth, FixedWidth, PlannedCycle
from sglang_dflash.srt.speculative.width.chooser import WidthChooser
from sglang_dflash.srt.speculative.width.clock import CycleClock, CycleTiming
from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import MODES, SurvivalEstimate
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings
from sglang_dflash.srt.speculative.width.start_up import _seconds_overlapped

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
    assert AdaptiveSettings().widths(block_size, "cpu") == on_cpu
    assert AdaptiveSettings().widths(block_size, "cuda") == on_gpu


@pytest.mark.parametrize(("free", "has_room"), [(3.9, False), (4.1, True)])
def test_whole_blocks_without_memory_for_more_graphs(free, has_room, monkeypatch, caplog):
    """Two widths beside the whole block, whose graphs take 1.5 GB, and a spare gigabyte."""
    monkeypatch.setattr(width_backends, "get_available_gpu_memory", lambda device, gpu_id: free)
    runner = SimpleNamespace(device="cuda", gpu_id=0, graph_memory_usage={"target_verify": 1.5})
    assert width_backends.has_room_for_widths(runner, 2, SimpleNamespace(world_size=1)) == has_room
    assert ("DFLASH verifies whole blocks: 3.90 GB" in caplog.text) != has_room
    runner.device = "cpu"
    assert width_backends.has_room_for_widths(runner, 2, SimpleNamespace(world_size=1))


def test_the_first_of_overlapping_cycles_is_not_timed(monkeypatch):
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    assert _seconds_overlapped(lambda seconds: Event.wait(seconds), [50, 3, 5]) == pytest.approx(4.5)


def test_settings_reach_the_other_processes(tmp_path, monkeypatch):
    monkeypatch.delenv(DFlashOptions.ADAPTIVE.variable, raising=False)
    assert AdaptiveSettings.from_environment() is None
    path = tmp_path / "widths.json"
    path.write_text(json.dumps({"candidate_steps": [0, 2, 5], "patience": 0.2, "schedule": [2, 0]}))
    monkeypatch.setenv(DFlashOptions.ADAPTIVE.variable, "")
    settings = AdaptiveSettings.read(str(path))
    settings.to_environment()
    assert AdaptiveSettings.from_environment() == settings
    assert settings.patience == 0.2
    assert AdaptiveSettings(candidate_steps=(0, 2, 5)).widths(8, "cpu") == (1, 3, 6)
    assert settings.widths(8, "cpu") == (1, 3)
    AdaptiveSettings().to_environment()
    assert AdaptiveSettings.from_environment() == AdaptiveSettings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ("Invalid JSON",)),
        ("[0, 1]", ("JSON object", "candidate_steps")),
        ('{"candidate_step": [0]}', ("candidate_step: Unexpected", "with any of")),
        ('{"candidate_steps": [3, 1]}', ("ascend", "[3, 1]")),
        ('{"candidate_steps": [1, 1]}', ("ascend", "[1, 1]")),
        ('{"candidate_steps": []}', ("not be empty",)),
        ('{"candidate_steps": [-1, 1]}', ("candidate_steps.0", "greater than or equal to 0", "-1")),
        ('{"candidate_steps": [0, true]}', ("candidate_steps.1", "valid integer", "True")),
        ('{"candidate_steps": 3}', ("candidate_steps", "valid array")),
        ('{"schedule": [1, -2]}', ("schedule.1", "greater than or equal to 0", "-2")),
        ('{"patience": -1}', ("patience", "-1")),
        ('{"patience": "much"}', ("patience", "much")),
        ('{"patience": true}', ("patience", "True")),
        ('{"patience": NaN}', ("patience",)),
        ('{"patience": -1, "schedule": 3}', ("patience", "-1", "schedule", "valid array")),
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
        AdaptiveSettings(candidate_steps=(0, 9)).widths(8, "cpu")


# -- choosing and learning


class Clock(CycleClock):
    """Cycles take as long as the test says."""

    def __init__(self, costs):
        super().__init__("cpu")
        self.seconds = dict(zip(WIDTHS, costs, strict=True))

    def finished(self):
        return [
            CycleTiming(
                timing.num_requests, timing.width, timing.num_tokens, self.seconds[timing.width], None
            )
            for timing in super().finished()
        ]


class Chooser(WidthChooser):
    """Notes what it is told."""

    def __init__(self, costs=(1.0, 1.2, 1.3, 1.6)):
        table = CostTable(np.array([1, 64]), np.array(WIDTHS), np.array([costs, costs]))
        super().__init__(table, SurvivalEstimate(32, 7))
        self.new_rows, self.batches, self.learned, self.cycle_times = [], [], [], []

    def on_prefill(self, rows, num_emitted=0):
        self.new_rows.append(rows.tolist())
        super().on_prefill(rows, num_emitted)

    def choose(self, rows, modes, num_tokens=None, caps=None):
        self.batches.append((rows, modes))
        return super().choose(rows, modes, num_tokens, caps)

    def on_accept_lens(self, rows, modes, width, accepted):
        self.learned.append((rows.tolist(), accepted.tolist()))
        super().on_accept_lens(rows, modes, width, accepted)

    def on_cycle_time(self, *timing):
        self.cycle_times.append(timing)
        return super().on_cycle_time(*timing)


class Backends:
    def __init__(self):
        self.applied = []

    def apply(self, width):
        self.applied.append(width)


def request(row: int | None, grammar=None, **params) -> SimpleNamespace:
    defaults = dict(
        logit_bias=None, min_new_tokens=0, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0
    )
    return SimpleNamespace(
        kv=SimpleNamespace(req_pool_idx=row, kv_committed_len=100),
        output_ids=[],
        grammar=grammar,
        sampling_params=SimpleNamespace(**defaults | {"top_k": 1} | params),
    )


def batch_of(*reqs: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(reqs=list(reqs))


def prompts_of(*reqs: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(new_reqs=reqs)


def adaptive(schedule=(), chooser=None, backends=None, group=None, **more) -> AdaptiveWidth:
    group = group or SimpleNamespace(world_size=1, rank_in_group=0)
    clock = Clock((1.0, 1.2, 1.3, 1.6))
    return AdaptiveWidth(chooser or Chooser(), backends or Backends(), clock, 32, group, schedule, **more)


def test_accept_lengths_arrive_one_cycle_late():
    backends = Backends()
    width, batch = adaptive(backends=backends), batch_of(*(request(row) for row in range(4)))
    width.begin_prefill(prompts_of(*batch.reqs))
    cycles = []
    for number in range(60):
        cycles.append(width.choose_width(batch, draws_drafts=False))
        width.on_launched(cycles[-1])
        if number:
            width.on_accept_lens(cycles[-2], [0, 0, 0, 0])
    chosen = [cycle.width for cycle in cycles]
    assert chosen[0] == 8 and chosen[-20:].count(1) > 15, "a useless draft ends as plain decoding"
    assert backends.applied == chosen
    report = width.report()
    assert report["width"] == chosen[-1] and sum(report["cycles_per_width"].values()) == 60
    json.dumps(report)


@pytest.mark.parametrize("cap, expected", [(0, 1), (1, 2), (7, 8)])
def test_no_more_is_verified_than_the_caps_let_through(cap, expected):
    """Without caps this perfect draft would get whole blocks. The other widths are probes."""
    width, batch, caps = adaptive(), batch_of(request(0), request(1)), np.array([cap, cap], dtype=np.int32)
    width.begin_prefill(prompts_of(*batch.reqs))
    chosen = []
    for _ in range(40):
        cycle = width.choose_width(batch, False, None, caps)
        width.on_launched(cycle)
        width.on_accept_lens(cycle, [min(cap, cycle.width - 1)] * 2)
        chosen.append(cycle.width)
    assert chosen.count(expected) > 30, chosen


def test_a_capped_block_teaches_only_what_it_could_accept():
    """All tokens before the cap were accepted: that is no rejection."""
    chooser = Chooser()
    width, batch = adaptive((7,), chooser), batch_of(request(0), request(1), request(2))
    width.begin_prefill(prompts_of(*batch.reqs))
    for _ in range(30):
        cycle = width.choose_width(batch, False, None, np.array([0, 3, 7], dtype=np.int32))
        width.on_accept_lens(cycle, [0, 3, 7])
    assert chooser.learned[:3] == [([0], [0]), ([1], [3]), ([2], [7])]
    averages = chooser.estimate.averages(0)
    assert all((probs > 0.7).all() for probs in averages.values()), averages


def test_cycle_times_are_learned_some_at_a_time_and_by_kind():
    chooser = Chooser()
    width, batch = adaptive((7, 7, 1), chooser), batch_of(request(0), request(1))
    for _ in range(17):
        width.on_launched(width.choose_width(batch, draws_drafts=False))
    times = chooser.cycle_times
    assert [(num_requests, verified, cycles) for num_requests, verified, _, cycles, *_ in times[:5]] == [
        (2, 8, 2),
        (2, 2, 1),
        (2, 8, 2),
        (2, 2, 1),
        (2, 8, 2),
    ]
    assert sum(cycles for _, _, _, cycles, *_ in times) == 16
    assert all(
        (seconds, tokens) == (pytest.approx({8: 1.6, 2: 1.2}[verified]), 200)
        for _, verified, seconds, _, tokens, _ in times
    )


def test_accept_lengths_of_a_rows_previous_request_are_dropped():
    chooser = Chooser()
    width, old, new = adaptive((7,), chooser), batch_of(request(3)), batch_of(request(3))
    width.begin_prefill(prompts_of(*old.reqs))
    cycles = [width.choose_width(old, False) for _ in range(30)]
    for cycle in cycles[:-1]:
        width.on_accept_lens(cycle, [0])
    width.begin_prefill(
        prompts_of(*new.reqs)
    )  # under overlap scheduling, before the old one's last cycle is known
    width.on_accept_lens(cycles[-1], [0])
    probs = chooser.estimate.accept_probs(np.array([3, 5]), np.array([0, 0]))
    assert (probs[0] == probs[1]).all()


def test_an_unchanged_batch_is_described_once():
    chooser = Chooser()
    width, first, second = adaptive((7,), chooser), request(0), request(1)
    cycles = []
    for reqs in ([first, second], [first, second], [second], [second, first]):
        cycles.append(width.choose_width(batch_of(*reqs), False))
    width.begin_prefill(prompts_of(request(1)))
    cycles.append(width.choose_width(batch_of(second, first), False))
    width.choose_width(batch_of(second, first), True)
    rows, modes = zip(*chooser.batches, strict=True)
    assert rows[0] is rows[1] and modes[0] is modes[1]
    assert len(set(map(id, rows))) == len(set(map(id, modes))) == 5
    assert [batch.tolist() for batch in rows[1:]] == [[0, 1], [1], [1, 0], [1, 0], [1, 0]]
    for cycle, accepted in zip(cycles, ([1, 2], [1, 2], [3], [4, 5], [6, 7]), strict=True):
        width.on_accept_lens(cycle, accepted)
    assert chooser.learned[2:] == [([0], [5]), ([1, 0], [6, 7])], "row 1 has a new request"


def test_tokens_in_the_log_are_of_the_requests_decided_for(caplog):
    """A decision holds while a fourth joins three."""
    caplog.set_level("INFO")
    width, reqs = adaptive(log_every=1), [request(row) for row in range(4)]
    width.begin_prefill(prompts_of(*reqs[:3]))
    for _ in range(36):
        cycle = width.choose_width(batch_of(*reqs[:3]), False)
        width.on_launched(cycle)
        width.on_accept_lens(cycle, [7] * 3)
    width.begin_prefill(prompts_of(*reqs[3:]))
    width.choose_width(batch_of(*reqs), False)
    before, after = caplog.messages[-2:]
    assert "8 for 3 requests: 7." in before and "8 for 4 requests: 7." in after


def test_running_requests_of_a_mixed_batch_are_not_new():
    chooser = Chooser()
    width, running = adaptive((7,), chooser), batch_of(request(1))
    width.begin_prefill(prompts_of(*running.reqs))
    cycle = width.choose_width(running, False)
    width.on_launched(cycle)
    width.begin_prefill(prompts_of(request(2)))
    width.on_accept_lens(cycle, [0])
    running, new = (chooser.estimate.accept_probs(np.array([row]), np.array([0])) for row in (1, 2))
    assert (running < new).all()


def test_a_request_that_was_retracted_before_its_first_cycle_has_no_row():
    chooser = Chooser()
    adaptive(chooser=chooser).begin_prefill(prompts_of(request(None), request(5)))
    assert chooser.new_rows == [[5]]


def test_modes():
    chooser = Chooser()
    batch = batch_of(
        request(0),
        request(1, top_k=50),
        request(2, grammar=object()),
        request(3, repetition_penalty=1.1),
        request(4, min_new_tokens=3),
        request(5, logit_bias={"3": 1.0}),
    )
    width = adaptive((3,), chooser)
    for draws_drafts, sampled in ((False, "sampled"), (True, "drawn")):
        width.choose_width(batch, draws_drafts)
        _, modes = chooser.batches[-1]
        assert [MODES[mode] for mode in modes] == ["greedy", sampled, *["constrained"] * 4]


def test_ranks_take_what_rank_0_chose(monkeypatch):
    """A rank other than 0 does not choose, and has no expectations to log."""
    broadcasts = []
    monkeypatch.setattr(
        torch.distributed,
        "broadcast",
        lambda values, src, group: broadcasts.append((src, group)) or values.copy_(torch.tensor([4, 0])),
    )
    group = SimpleNamespace(world_size=2, rank_in_group=1, ranks=[6, 7], cpu_group="host")
    backends, chooser = Backends(), Chooser()
    width = adaptive(chooser=chooser, backends=backends, group=group, log_every=1)
    cycle = width.choose_width(batch_of(request(0)), False)
    assert (cycle.width, cycle.drafts) == (4, False)
    assert broadcasts == [(6, "host")] and backends.applied == [4] and not chooser.batches
    assert width.report()["expected"] == {}


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
    for cycle in range(20):
        for _ in range(2):  # launched before the first is read
            clock.start()
            clock.stop(3, 8, 10)
        first, second = clock.finished()
        assert first.seconds == second.seconds == second.gap == 1.0
        assert first.gap == (1.0 if cycle else None)
    assert Event.made == before + 5, "two cycles and the end of the one before"


def test_a_clock_on_the_host():
    clock = CycleClock("cpu")
    for load in ((2, 4, 50), (3, 1, 70)):
        clock.start()
        clock.stop(*load)
    first, second = clock.finished()
    assert (first.num_requests, first.width, first.num_tokens, first.gap) == (2, 4, 50, None)
    assert second.gap >= 0 and second.previous_width == 4
    clock.interrupt()
    clock.start()
    clock.stop(1, 1, 20)
    assert clock.finished()[0].gap is None and clock.finished() == []


def test_a_fixed_width_is_always_the_same():
    width, batch = FixedWidth(8), batch_of(request(0))
    width.begin_prefill(prompts_of(*batch.reqs))
    cycle = width.choose_width(batch, True)
    width.on_launched(cycle)
    width.on_accept_lens(cycle, [3])
    assert cycle.width == 8 and width.report() == {}


def test_cycles_land_in_the_order_of_their_launch():
    cycles = CyclesInFlight()
    for num_requests, width in ((2, 8), (3, 1)):
        cycles.launch(CycleInFlight(num_requests, PlannedCycle(width, 0, None), None))
    assert cycles.land([0, 7]).num_drafted == 7
    with pytest.raises(AssertionError, match="once, in order"):
        cycles.land([0, 0])
