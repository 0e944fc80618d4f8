"""The load from which rows cost on a GPU, without one."""

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_dflash.srt.speculative.width import measure
from sglang_dflash.srt.speculative.width.break_even import break_even
from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings

ALONE = SimpleNamespace(world_size=1, rank_in_group=0)


@pytest.mark.parametrize(
    ("loads", "milliseconds", "expected"),
    [
        ([1, 16, 48, 96], [7.0, 7.2, 20, 41], 48),
        ([1, 2, 4, 8], [7.0, 7.0, 7.1, 7.2], math.inf),
        ([1, 2, 4, 8], [7.0, 7.0, 7.1, 7.6], 8),
        # A load of one costs if the next one shows that its rows do.
        ([1, 2, 4], [10, 19, 36], 1),
        # Nothing is known below the first load but how time grows behind it.
        ([48, 96], [24, 47], 48),
        ([4, 8], [7.0, 7.1], math.inf),
        ([8], [7.0], math.inf),
        # A peak at 2 is noise, as 4 takes no longer than 1.
        ([1, 2, 4, 8], [7.0, 9.0, 7.0, 7.1], math.inf),
        ([1, 2, 4, 8], [7.0, 9.0, 7.0, 12.0], 8),
    ],
)
def test_rows_cost_if_half_of_them_save_a_twentieth(loads, milliseconds, expected):
    assert break_even(loads, [1e-3 * ms for ms in milliseconds]) == expected


def worker_with(graphs: list[int], most: int) -> SimpleNamespace:
    runner = SimpleNamespace(
        max_running_requests=most, decode_cuda_graph_runner=SimpleNamespace(capture_bs=graphs)
    )
    return SimpleNamespace(device="cuda", target_worker=SimpleNamespace(model_runner=runner))


@pytest.mark.parametrize(
    ("most", "least", "said"),
    [
        (48, 25, "free up to 24 requests"),  # the graph of 32; 24 was captured and not measured
        (16, math.inf, "free up to 16 requests"),
    ],
)
def test_start_up_finds_the_least_load(most, least, said, monkeypatch, caplog):
    def of_loads(worker, loads):
        return np.array([7e-3 if n < 32 else n * 3e-4 for n in loads])

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(measure, "_seconds_of_whole_blocks", of_loads)
    worker = worker_with([1, 2, 4, 8, 12, 16, 24, 32, 48], most)
    assert measure.least_adaptive_load(worker, AdaptiveSettings(), ALONE) == least
    assert said in caplog.text and "[1, 2, 4, 8, 16" in caplog.text and "[7.0, 7.0" in caplog.text


def test_named_candidates_and_a_cpu_need_no_measurement():
    named = AdaptiveSettings(candidate_steps=(0, 7))
    assert measure.least_adaptive_load(worker_with([1, 2], 2), named, ALONE) == 1
    on_cpu = worker_with([], 2)
    on_cpu.target_worker.model_runner.decode_cuda_graph_runner = None
    assert measure.least_adaptive_load(on_cpu, AdaptiveSettings(), ALONE) == 1
    assert measure.least_adaptive_load(on_cpu, None, ALONE) == math.inf


def test_ranks_take_the_seconds_of_rank_0(monkeypatch):
    def broadcast(seconds, src, group):
        assert (src, group) == (6, "host")
        seconds.copy_(torch.tensor([7.0, 7.1, 12.0], dtype=torch.float64))

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    monkeypatch.setattr(measure, "_seconds_of_whole_blocks", lambda *_: np.array([7.0, 7.0, 7.0]))
    group = SimpleNamespace(world_size=2, rank_in_group=1, ranks=[6, 7], cpu_group="host")
    worker = worker_with([1, 2, 4], 4)
    assert measure.least_adaptive_load(worker, AdaptiveSettings(), group) == 3
    assert measure.least_adaptive_load(worker, AdaptiveSettings(), ALONE) == math.inf
