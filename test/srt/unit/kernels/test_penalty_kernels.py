"""Penalty kernels against their PyTorch twins, on a GPU or interpreted."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_inputs import random_output, random_penalties
from support.triton_interpreter import DEVICE, against_twin

from sglang_dflash.kernels.ops.speculative import penalties

VOCABULARY = 1030  # two tiles, the second nearly empty


@against_twin
@given(
    st.integers(0, 2**31),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
    st.booleans(),
)
def test_penalize_block_equals_its_twin(seed, bs, width, dtype, has_stops, is_ragged):
    arguments = seed, bs, width, VOCABULARY, DEVICE, dtype, has_stops, is_ragged
    mine, twins = random_penalties(*arguments), random_penalties(*arguments)
    penalties.penalize_block.__wrapped__(*mine)
    penalties.penalize_block_torch(*twins)
    torch.testing.assert_close(mine[0], twins[0], rtol=1e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)


@against_twin
@given(st.integers(0, 2**31), st.integers(0, 5), st.integers(1, 9))
def test_count_tokens_equals_its_twin(seed, bs, width):
    mine, twins = (random_output(seed, bs, width, VOCABULARY, DEVICE) for _ in range(2))
    penalties.count_tokens.__wrapped__(*mine)
    penalties.count_tokens_torch(*twins)
    assert torch.equal(mine[0], twins[0])
