"""Simulated accept lengths: SGLang's one length for all requests, and ours by request."""

import pytest
import torch
from sglang.srt.environ import envs
from support.decisions import decide

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.speculative.acceptance.simulation import (
    FIXED_TOKEN_ID,
    LengthForAll,
    LengthsByRequest,
    accept_prob,
    simulation_of_server,
)

BLOCK = torch.tensor([[7, 11, 12, 13], [8, 21, 22, 23]])
TARGET_TOKENS = torch.tensor([[31, 32, 33, 34], [41, 42, 43, 44]])
ROWS = torch.tensor([1, 2])

# -- one length for all requests


def test_real_tokens_are_the_drafted_ones_and_the_targets_after_them():
    verdict = decide(*LengthForAll(3.0, "match-expected", True).decide(ROWS, TARGET_TOKENS, BLOCK))
    assert verdict.accept_len.tolist() == [2, 2]
    assert verdict.out_tokens[:, :3].tolist() == [[11, 12, 33], [21, 22, 43]]
    assert verdict.bonus.tolist() == [33, 43]


def test_the_fixed_token():
    verdict = decide(*LengthForAll(1.0, "match-expected", False).decide(ROWS, TARGET_TOKENS, BLOCK))
    assert verdict.accept_len.tolist() == [0, 0]
    assert verdict.out_tokens.unique().tolist() == verdict.bonus.unique().tolist() == [FIXED_TOKEN_ID]


@pytest.mark.parametrize("wanted, lengths", [(2.5, {2, 3}), (9.0, {4}), (4.0, {4})])
def test_lengths_average_out_within_the_block(wanted, lengths):
    torch.manual_seed(0)
    simulation = LengthForAll(wanted, "match-expected", True)
    found = [int(simulation.decide(ROWS, TARGET_TOKENS, BLOCK)[0][0]) + 1 for _ in range(200)]
    assert set(found) == lengths
    # Half of 200 draws, give or take six standard deviations.
    assert sum(found) / 200 == pytest.approx(min(wanted, 4.0), abs=0.22)


# -- lengths by request

MEANS, WIDTH, CYCLES = (8.2, 4.2, 1.8, 1.05), 16, 1000


def accepted_by(simulation: LengthsByRequest, rows: torch.Tensor, width: int = WIDTH) -> torch.Tensor:
    """Return the accepted drafted tokens of these rows in many cycles. [cycles, rows]"""
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    return torch.stack([simulation.decide(rows, tokens, tokens)[0] for _ in range(CYCLES)])


def assert_mean(found: torch.Tensor, wanted: float, variance: float) -> None:
    """Compare a mean over cycles with its expectation, within three standard deviations."""
    assert found.float().mean().item() == pytest.approx(wanted, abs=3 * (variance / CYCLES) ** 0.5)


@pytest.mark.parametrize("row", range(2, 10))
def test_a_row_has_its_own_geometric_lengths(row):
    """Its mean is its entry's in whole blocks, and each drafted token is accepted equally often."""
    mean = MEANS[row % 4]
    found = accepted_by(LengthsByRequest(MEANS, 11, WIDTH, "cpu"), torch.tensor([row]))[:, 0]
    reached = [accept_prob(mean, WIDTH) ** k for k in range(WIDTH)]  # probability of k tokens or more
    assert sum(reached) == pytest.approx(mean)
    square = sum((2 * k - 1) * reached[k] for k in range(1, WIDTH))
    assert_mean(found + 1, mean, square - (mean - 1) ** 2)
    for k in range(1, WIDTH):
        assert_mean(found >= k, reached[k], max(reached[k] * (1 - reached[k]), 0.01))


def test_a_narrower_cycle_cuts_lengths():
    whole, narrow = (LengthsByRequest(MEANS, 5, WIDTH, "cpu") for _ in range(2))
    rows = torch.tensor([3, 0, 4])
    wanted = accepted_by(whole, rows)
    assert wanted.max() == WIDTH - 1
    assert torch.equal(accepted_by(narrow, rows, width=5), wanted.clamp(max=4))


def test_ranks_draw_the_same_and_requests_do_not():
    drawn = []
    for seed in (1, 2):  # ranks may have drawn other numbers before
        torch.manual_seed(seed)
        drawn.append(accepted_by(LengthsByRequest((4.2,), 3, WIDTH, "cpu"), torch.tensor([1, 2])))
    assert torch.equal(*drawn)
    first, second = drawn[0].float().T
    assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1]) < 3 / CYCLES**0.5
    assert abs(torch.corrcoef(torch.stack((first[1:], first[:-1])))[0, 1]) < 3 / CYCLES**0.5


@pytest.mark.parametrize("mean, accepted", [(1.0, 0), (16.0, 15)])
def test_the_ends_of_the_range(mean, accepted):
    assert (accepted_by(LengthsByRequest((mean,), 2, WIDTH, "cpu"), torch.tensor([1])) == accepted).all()


def test_a_block_of_the_anchor_alone():
    simulation = LengthsByRequest((1.0,), 2, 1, "cpu")
    assert simulation.decide(ROWS[:1], BLOCK[:1, :1], BLOCK[:1, :1])[0].tolist() == [0]


@pytest.mark.parametrize(
    "average, means, kind", [(-1, "", None), (3.5, "", LengthForAll), (-1, "4,2", LengthsByRequest)]
)
def test_the_environment_asks_for_it_and_the_log_says_so(monkeypatch, caplog, average, means, kind):
    monkeypatch.setenv(DFlashOptions.SIMULATE_ACC_LENS.variable, means)
    with envs.SGLANG_SIMULATE_ACC_LEN.override(average):
        simulation = simulation_of_server(9, 16, "cpu")
    if kind is None:
        assert simulation is None and not caplog.records
        return
    assert isinstance(simulation, kind)
    [record] = caplog.records
    assert record.levelname == "WARNING" and "not the target's" in record.getMessage()
    assert ("SIMULATE_ACC_LENS=4.0,2.0" if means else "SIMULATE_ACC_LEN=3.5") in record.getMessage()
