"""The convolution along a block against its twin, on a GPU or in the interpreter.

The twin is compared with reference_dflash2.py in test_dflash2_model.py.
"""

import pytest
import torch
from support.kernel_inputs import random_convolution
from support.triton_interpreter import DEVICE, against_twin

from sglang_dflash.kernels.ops.speculative import block_conv as kernels


@against_twin
@pytest.mark.parametrize(
    "blocks, width, hidden, groups, taps",
    [(3, 5, 48, 6, 2), (1, 8, 40, 5, 3), (2, 3, 16, 1, 5), (2, 4, 8, 8, 1), (2, 1, 1032, 129, 2)],
)
def test_the_kernel_equals_its_twin(blocks, width, hidden, groups, taps):
    x, base, deltas = random_convolution(blocks, width, hidden, groups, taps)
    want = kernels.block_conv_torch(x, base, deltas, width)
    got = kernels.block_conv.__wrapped__(x.to(DEVICE), base.to(DEVICE), deltas.to(DEVICE), width)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=1e-5)


@against_twin
def test_bfloat16_equals_its_twin():
    """The kernel rounds once, bfloat16 PyTorch several times."""
    x, base, deltas = random_convolution(2, 8, 64, 4, 2, torch.bfloat16)
    want = kernels.block_conv_torch(x.float(), base.float(), deltas.float(), 8)
    got = kernels.block_conv.__wrapped__(x.to(DEVICE), base.to(DEVICE), deltas.to(DEVICE), 8)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float().cpu(), want, rtol=0.01, atol=0.01)
