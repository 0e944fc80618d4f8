"""`SGLANG_SIMULATE_ACC_LEN` gives the lengths and tokens of SGLang's workers."""

import pytest
import torch
from sglang.srt.environ import envs
from support.decisions import decide

from sglang_dflash.srt.speculative.acceptance.acceptor import FIXED_TOKEN_ID, simulate_acceptance

BLOCK = torch.tensor([[7, 11, 12, 13], [8, 21, 22, 23]])
TARGET_TOKENS = torch.tensor([[31, 32, 33, 34], [41, 42, 43, 44]])


@pytest.fixture(autouse=True)
def real_tokens():
    with envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.override("real-draft-token"):
        yield


def test_real_tokens_are_the_drafted_ones_and_the_targets_after_them():
    with envs.SGLANG_SIMULATE_ACC_LEN.override(3.0):
        verdict = decide(*simulate_acceptance(TARGET_TOKENS, BLOCK))
    assert verdict.accept_len.tolist() == [2, 2]
    assert verdict.out_tokens[:, :3].tolist() == [[11, 12, 33], [21, 22, 43]]
    assert verdict.bonus.tolist() == [33, 43]


def test_the_fixed_token():
    with (
        envs.SGLANG_SIMULATE_ACC_LEN.override(1.0),
        envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.override("fixed"),
    ):
        verdict = decide(*simulate_acceptance(TARGET_TOKENS, BLOCK))
    assert verdict.accept_len.tolist() == [0, 0]
    assert verdict.out_tokens.unique().tolist() == verdict.bonus.unique().tolist() == [FIXED_TOKEN_ID]


@pytest.mark.parametrize("wanted, lengths", [(2.5, {2, 3}), (9.0, {4}), (4.0, {4})])
def test_lengths_average_out_within_the_block(wanted, lengths):
    torch.manual_seed(0)
    with envs.SGLANG_SIMULATE_ACC_LEN.override(wanted):
        found = [int(simulate_acceptance(TARGET_TOKENS, BLOCK)[0][0]) + 1 for _ in range(200)]
    assert set(found) == lengths
    # Half of 200 draws, give or take six standard deviations.
    assert sum(found) / 200 == pytest.approx(min(wanted, 4.0), abs=0.22)
