"""The width as the worker knows it: settings, asking and telling, and ranks that agree. Without an engine."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_dflash.srt.speculative.width.adaptive import AdaptiveWidth, FixedWidth
from sglang_dflash.srt.speculative.width.chooser import WidthChooser
from sglang_dflash.srt.speculative.width.clock import CycleClock, Lap
from sglang_dflash.srt.speculative.width.costs import CostTable
from sglang_dflash.srt.speculative.width.estimates import MODES, SurvivalEstimate
from sglang_dflash.srt.speculative.width.settings import VARIABLE, AdaptiveSettings

WIDTHS = (1, 2, 4, 8)


# -- settings


@pytest.mark.parametrize(
    ("block_size", "widths"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (10, (1, 2, 4, 8, 10)),
        (16, (1, 2, 4, 8, 16)),
    ],
)
def test_default_widths(block_size, widths):
    assert AdaptiveSettings().widths(block_size) == widths


def test_settings_reach_the_other_processes(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert AdaptiveSettings.from_environment() is None
    path = tmp_path / "widths.json"
    path.write_text(json.dumps({"candidate_steps": [0, 2, 5], "patience": 0.2, "schedule": [2, 0]}))
    monkeypatch.setenv(VARIABLE, "")
    settings = AdaptiveSettings.read(str(path))
    settings.to_environment()
    assert AdaptiveSettings.from_environment() == settings
    assert settings.constants.patience == 0.2
    assert AdaptiveSettings.of({"candidate_steps": [0, 2, 5]}).widths(8) == (1, 3, 6)
    assert settings.widths(8) == (1, 3)
    AdaptiveSettings().to_environment()
    assert AdaptiveSettings.from_environment() == AdaptiveSettings()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ("not JSON",)),
        ("[0, 1]", ("JSON object", "candidate_steps")),
        ('{"1": {"candidate_steps": [0, 1]}}', ("batch sizes", "EAGLE")),
        ('{"candidate_step": [0]}', ("candidate_step", "known are")),
        ('{"candidate_steps": [3, 1]}', ("ascend", "[3, 1]")),
        ('{"candidate_steps": [1, 1]}', ("ascend",)),
        ('{"candidate_steps": []}', ("not be empty",)),
        ('{"candidate_steps": [-1, 1]}', ("none negative", "-1")),
        ('{"candidate_steps": [0, true]}', ("list of numbers",)),
        ('{"candidate_steps": 3}', ("list of numbers",)),
        ('{"patience": -1}', ("patience", "-1")),
        ('{"patience": "much"}', ("patience", "much")),
        ('{"patience": NaN}', ("patience",)),
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
        AdaptiveSettings.of({"candidate_steps": [0, 9]}).widths(8)


# -- asking and telling


class Clock(CycleClock):
    """Cycles take as long as the test says."""

    def __init__(self, costs):
        super().__init__("cpu")
        self.seconds = dict(zip(WIDTHS, costs, strict=True))

    def finished(self):
        laps = [
            Lap(lap.num_requests, lap.width, lap.num_tokens, self.seconds[lap.width], None)
            for lap in super().finished()
        ]
        return laps


def request(slot: int, grammar=None, **params) -> SimpleNamespace:
    defaults = dict(
        logit_bias=None, min_new_tokens=0, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0
    )
    return SimpleNamespace(
        kv=SimpleNamespace(req_pool_idx=slot, kv_committed_len=100),
        output_ids=[],
        grammar=grammar,
        sampling_params=SimpleNamespace(**defaults | {"top_k": 1} | params),
    )


def adaptive(schedule=(), group=None, costs=(1.0, 1.2, 1.3, 1.6), **more) -> AdaptiveWidth:
    table = CostTable(np.array([1, 64]), np.array(WIDTHS), np.array([costs, costs]))
    states = SimpleNamespace(applied=[])
    states.apply = lambda width, n: states.applied.append((width, n))
    group = group or SimpleNamespace(world_size=1, rank_in_group=0)
    chooser = WidthChooser(table, SurvivalEstimate(32, 7))
    return AdaptiveWidth(chooser, states, Clock(costs), 32, group, schedule, **more)


def test_what_a_cycle_kept_is_told_one_cycle_late():
    width, batch = adaptive(), SimpleNamespace(reqs=[request(slot) for slot in range(4)])
    width.on_prefill(batch, num_running=0)
    asked = []
    for cycle in range(60):
        asked.append(width.choose_width(batch, draws_drafts=False))
        width.on_launched()
        if cycle:
            assert width.on_accept_lens([0, 0, 0, 0]) == asked[cycle - 1] - 1
    assert asked[0] == 8 and asked[-20:].count(1) > 15, (
        "a draft of which nothing is kept ends as plain decoding"
    )
    assert width._states.applied == [(w, 4) for w in asked]
    report = width.report()
    assert report["width"] == asked[-1] and sum(report["cycles_per_width"].values()) == 60
    json.dumps(report)


def test_what_cycles_took_is_told_some_at_a_time_and_by_kind(monkeypatch):
    width, batch, told = adaptive(schedule=(7, 7, 1)), SimpleNamespace(reqs=[request(0), request(1)]), []
    monkeypatch.setattr(width._chooser, "on_cycle_time", lambda *lap: told.append(lap) or 0.0)
    for _ in range(17):
        width.choose_width(batch, draws_drafts=False)
        width.on_launched()
    assert [(num_requests, verified, cycles) for num_requests, verified, _, cycles, _ in told[:5]] == [
        (2, 8, 2),
        (2, 2, 1),
        (2, 8, 2),
        (2, 2, 1),
        (2, 8, 2),
    ]
    assert sum(cycles for _, _, _, cycles, _ in told) == 16
    assert all(
        (seconds, tokens) == (pytest.approx({8: 1.6, 2: 1.2}[verified]), 200)
        for _, verified, seconds, _, tokens in told
    )


def test_a_new_request_in_an_old_ones_row_is_not_blamed():
    width = adaptive(schedule=(7,))
    old, new = SimpleNamespace(reqs=[request(3)]), SimpleNamespace(reqs=[request(3)])
    width.on_prefill(old, 0)
    for _ in range(30):
        width.choose_width(old, False)
        width.on_launched()
    for _ in range(29):
        width.on_accept_lens([0])
    width.on_prefill(new, 0)  # under overlap scheduling, before the old one's last cycle is known
    width.on_accept_lens([0])
    own = width._chooser.estimate.accept_probs(np.array([3, 5]), np.array([0, 0]))
    assert (own[0] == own[1]).all()


def test_requests_that_have_not_changed_are_not_looked_at_again():
    width = adaptive(schedule=(7,))
    first, second = request(0), request(1)
    for reqs in ([first, second], [first, second], [second], [second, first]):
        width.choose_width(SimpleNamespace(reqs=reqs), False)
    width.on_prefill(SimpleNamespace(reqs=[request(1)]), 0)
    width.choose_width(SimpleNamespace(reqs=[second, first]), False)
    width.choose_width(SimpleNamespace(reqs=[second, first]), True)
    asked = [entry.requests for entry in width._under_way]
    assert asked[0] is asked[1] and len(set(map(id, asked))) == 5
    assert [entry.rows for entry in asked[1:]] == [[0, 1], [1], [1, 0], [1, 0], [1, 0]]
    assert asked[3].births.tolist() == [0, 0] and asked[4].births.tolist() == [1, 0]


def test_tokens_in_the_log_are_of_the_requests_decided_for(caplog):
    """A decision holds while a fourth joins three."""
    caplog.set_level("INFO")
    width, reqs = adaptive(log_every=1), [request(slot) for slot in range(4)]
    width.on_prefill(SimpleNamespace(reqs=reqs[:3]), 0)
    for _ in range(36):
        width.choose_width(SimpleNamespace(reqs=reqs[:3]), False)
        width.on_launched()
        width.on_accept_lens([7] * 3)
    width.on_prefill(SimpleNamespace(reqs=reqs[3:]), 0)
    width.choose_width(SimpleNamespace(reqs=reqs), False)
    before, after = caplog.messages[-2:]
    assert "8 for 3 requests: 7." in before and "8 for 4 requests: 7." in after


def test_running_requests_of_a_mixed_batch_are_not_new():
    width = adaptive(schedule=(7,))
    running = SimpleNamespace(reqs=[request(1)])
    width.on_prefill(running, 0)
    width.choose_width(running, False)
    width.on_launched()
    width.on_prefill(SimpleNamespace(reqs=[request(2), request(1)]), num_running=1)
    width.on_accept_lens([0])
    running, new = (width._chooser.estimate.accept_probs(np.array([slot]), np.array([0])) for slot in (1, 2))
    assert (running < new).all()


def test_a_request_that_was_retracted_before_its_first_cycle():
    width = adaptive()
    width.on_prefill(SimpleNamespace(reqs=[request(None), request(5)]), num_running=0)
    assert width._births[5] == 1 and width._births.sum() == 1


def test_modes():
    width = adaptive(schedule=(3,))
    reqs = [
        request(0),
        request(1, top_k=50),
        request(2, grammar=object()),
        request(3, repetition_penalty=1.1),
        request(4, min_new_tokens=3),
        request(5, logit_bias={"3": 1.0}),
    ]
    for draws, sampled in ((False, "sampled"), (True, "drawn")):
        width.choose_width(SimpleNamespace(reqs=reqs), draws)
        wanted = ["greedy", sampled, *["constrained"] * 4]
        assert [MODES[mode] for mode in width._under_way[-1].requests.modes] == wanted


def test_ranks_take_what_rank_0_chose(monkeypatch):
    """A rank that would have chosen otherwise, and does not even ask itself."""
    import torch

    told = []
    monkeypatch.setattr(
        torch.distributed,
        "broadcast",
        lambda values, src, group: told.append((src, group)) or values.fill_(4),
    )
    group = SimpleNamespace(world_size=2, rank_in_group=1, ranks=[6, 7], cpu_group="host")
    width = adaptive(group=group)
    assert width.choose_width(SimpleNamespace(reqs=[request(0)]), False) == 4
    assert told == [(6, "host")] and width._states.applied == [(4, 1)]


def test_a_clock_on_the_host():
    clock = CycleClock("cpu")
    for lap in ((2, 4, 50), (3, 1, 70)):
        clock.start()
        clock.stop(*lap)
    first, second = clock.finished()
    assert (first.num_requests, first.width, first.num_tokens, first.gap) == (2, 4, 50, None)
    assert second.gap >= 0 and second.after == 4
    clock.interrupt()
    clock.start()
    clock.stop(1, 1, 20)
    assert clock.finished()[0].gap is None and clock.finished() == []


def test_a_fixed_width_says_the_same_every_time():
    width, batch = FixedWidth(8), SimpleNamespace(reqs=[request(0)])
    width.on_prefill(batch, 0)
    assert width.choose_width(batch, True) == 8 and width.on_accept_lens([3]) == 7 and width.report() == {}
