"""Simulated accept lengths: SGLang's one length for all requests, and ours by request."""

from collections.abc import Callable

import pytest
import torch
from sglang.srt.environ import envs
from support.decisions import decide

from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.speculative.acceptance.simulation import (
    FIXED_TOKEN_ID,
    Simulation,
    accept_probs,
    simulation_of_server,
)

BLOCK = torch.tensor([[7, 11, 12, 13], [8, 21, 22, 23]])
TARGET_TOKENS = torch.tensor([[31, 32, 33, 34], [41, 42, 43, 44]])
ROWS = torch.tensor([1, 2])
MEANS, WIDTH, CYCLES = (8.2, 4.2, 1.8, 1.05), 16, 1000


@pytest.fixture
def simulated(monkeypatch) -> Callable[..., Simulation | None]:
    """Make a server's simulation of one average, or of several means."""

    def make(*means: float, num_rows: int = 9, block_size: int = WIDTH, mode: str = "fixed"):
        variable = DFlashOptions.SIMULATE_ACC_LENS.variable
        monkeypatch.setenv(variable, ",".join(map(str, means)) if len(means) > 1 else "")
        average = means[0] if len(means) == 1 else -1
        with envs.SGLANG_SIMULATE_ACC_LEN.override(average):
            with envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.override(mode):
                return simulation_of_server(num_rows, block_size, "cpu")

    return make


# -- one length for all requests


def test_real_tokens_are_the_drafted_ones_and_the_targets_after_them(simulated):
    simulation = simulated(3.0, block_size=4, mode="real-draft-token")
    verdict = decide(*simulation.decide(ROWS, TARGET_TOKENS, BLOCK))
    assert verdict.accept_len.tolist() == [2, 2]
    assert verdict.out_tokens[:, :3].tolist() == [[11, 12, 33], [21, 22, 43]]
    assert verdict.bonus.tolist() == [33, 43]


def test_the_fixed_token(simulated):
    verdict = decide(*simulated(1.0, block_size=4).decide(ROWS, TARGET_TOKENS, BLOCK))
    assert verdict.accept_len.tolist() == [0, 0]
    assert verdict.out_tokens.unique().tolist() == verdict.bonus.unique().tolist() == [FIXED_TOKEN_ID]


@pytest.mark.parametrize("wanted, lengths", [(2.5, {2, 3}), (9.0, {4}), (4.0, {4})])
def test_lengths_average_out_within_the_block(wanted, lengths, simulated):
    found = accepted_by(simulated(wanted, block_size=4), ROWS, width=4) + 1
    assert set(found.flatten().tolist()) == lengths and (found[:, 0] == found[:, 1]).all()
    assert_mean(found[:, 0], min(wanted, 4.0), 0.25)


# -- lengths by request


def accepted_by(simulation: Simulation, rows: torch.Tensor, width: int = WIDTH) -> torch.Tensor:
    """Return the accepted drafted tokens of these rows in many cycles. [cycles, rows]"""
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    return torch.stack([simulation.decide(rows, tokens, tokens)[0] for _ in range(CYCLES)])


def assert_mean(found: torch.Tensor, wanted: float, variance: float) -> None:
    """Compare a mean over cycles with its expectation, within three standard deviations."""
    assert found.float().mean().item() == pytest.approx(wanted, abs=3 * (variance / CYCLES) ** 0.5)


@pytest.mark.parametrize("row", range(2, 10))
def test_a_row_has_its_own_geometric_lengths(row, simulated):
    """Its mean is its entry's in whole blocks, and each drafted token is accepted equally often."""
    mean = MEANS[row % 4]
    found = accepted_by(simulated(*MEANS, num_rows=11), torch.tensor([row]))[:, 0]
    [prob] = accept_probs((mean,), WIDTH).tolist()
    reached = [prob**k for k in range(WIDTH)]  # probability of k tokens or more
    assert sum(reached) == pytest.approx(mean)
    square = sum((2 * k - 1) * reached[k] for k in range(1, WIDTH))
    assert_mean(found + 1, mean, square - (mean - 1) ** 2)
    for k in range(1, WIDTH):
        assert_mean(found >= k, reached[k], max(reached[k] * (1 - reached[k]), 0.01))


def test_a_narrower_cycle_cuts_lengths(simulated):
    rows = torch.tensor([3, 0, 4])
    wanted = accepted_by(simulated(*MEANS), rows)
    assert wanted.max() == WIDTH - 1
    assert torch.equal(accepted_by(simulated(*MEANS), rows, width=5), wanted.clamp(max=4))


@pytest.mark.parametrize("means", [(4.2, 4.2), (4.5,)])
def test_ranks_draw_the_same_and_leave_the_generator_as_it_was(means, simulated):
    drawn = []
    for seed in (1, 2):  # ranks may have drawn other numbers before
        torch.manual_seed(seed)
        drawn.append(accepted_by(simulated(*means), torch.tensor([1, 2])))
        after = torch.rand(1)
        torch.manual_seed(seed)
        assert after == torch.rand(1)
    assert torch.equal(*drawn)
    first, second = drawn[0].float().T
    if len(means) > 1:
        assert abs(torch.corrcoef(torch.stack((first, second)))[0, 1]) < 3 / CYCLES**0.5
    assert abs(torch.corrcoef(torch.stack((first[1:], first[:-1])))[0, 1]) < 3 / CYCLES**0.5


@pytest.mark.parametrize("mean, accepted", [(1.0, 0), (16.0, 15)])
def test_the_ends_of_the_range(mean, accepted, simulated):
    assert (accepted_by(simulated(mean, mean), torch.tensor([1])) == accepted).all()


def test_a_block_of_the_anchor_alone(simulated):
    simulation = simulated(1.0, 1.0, block_size=1)
    assert simulation.decide(ROWS[:1], BLOCK[:1, :1], BLOCK[:1, :1])[0].tolist() == [0]


@pytest.mark.parametrize("means, name", [((), None), ((3.5,), "LEN=3.5"), ((4.0, 2.0), "LENS=4.0,2.0")])
def test_the_environment_asks_for_it_and_the_log_says_so(caplog, means, name, simulated):
    if name is None:
        assert simulated() is None and not caplog.records
        return
    assert simulated(*means) is not None
    [record] = caplog.records
    assert record.levelname == "WARNING" and "not the target's" in record.getMessage()
    assert f"SIMULATE_ACC_{name}: " in record.getMessage()
