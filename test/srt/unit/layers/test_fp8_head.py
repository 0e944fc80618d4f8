"""The FP8 copy of an LM head: its rounding, its limits, its memory, and an update that it follows."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.srt.layers import fp8_head
from sglang_dflash.srt.layers.fp8_head import Fp8Head, quantize_rows, reason_against

VOCAB, HIDDEN = 160, 64


def new_head(dtype=torch.bfloat16, seed=0):
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)
    # Rows of very different size: one scale for the whole weight would flush the small ones to zero.
    weight *= torch.logspace(-4, 2, VOCAB, dtype=torch.float32).to(dtype)[:, None]
    return SimpleNamespace(weight=weight)


def dequantized(values: torch.Tensor) -> torch.Tensor:
    rows, scale = quantize_rows(values)
    return rows.double() * scale.double()


def test_rows_lose_no_more_than_four_bits_allow():
    """E4M3 has three bits after the leading one, so half a step is 1/16 of the value."""
    values = new_head().weight
    largest = values.abs().amax(dim=1, keepdim=True)
    error = (dequantized(values) - values.double()).abs()
    assert (error <= values.abs() / 16 + largest * 2.0**-16).all()
    assert torch.equal(dequantized(values).abs().amax(dim=1).argmax(), largest.argmax())


def test_zeros_stay_zeros():
    rows, scale = quantize_rows(torch.zeros(3, 8))
    assert not rows.float().any() and scale.isfinite().all()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_logits_are_those_of_the_rounded_factors(dtype, tolerance):
    head = new_head(dtype)
    hidden = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = dequantized(hidden) @ dequantized(head.weight).T
    logits = Fp8Head(head)(hidden)
    assert logits.dtype == dtype
    torch.testing.assert_close(
        logits.double(), expected, rtol=tolerance, atol=tolerance * expected.abs().max()
    )
    assert not torch.allclose(logits.double(), hidden.double() @ head.weight.double().T, rtol=1e-3, atol=0)


def test_an_update_is_followed_in_place():
    head = new_head()
    copy = Fp8Head(head)
    address = copy.weight.data_ptr()
    hidden = torch.randn(5, HIDDEN).bfloat16()
    head.weight = new_head(seed=9).weight
    before = copy(hidden)
    copy.refresh()
    assert torch.equal(copy(hidden), Fp8Head(head)(hidden)) and not torch.equal(copy(hidden), before)
    assert copy.weight.data_ptr() == address


class LargestResult(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operator makes, views and results in place aside."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        if isinstance(result, torch.Tensor) and returned[0].alias_info is None:
            self.size = max(self.size, result.nbytes)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, VOCAB])
def test_a_head_is_quantized_in_slices_bit_by_bit_as_at_once(dtype, rows, monkeypatch):
    """Float32 copies of a whole head of 248k tokens would take 12.8 GB at each weight update."""
    monkeypatch.setattr(fp8_head, "_SLICE", rows * HIDDEN)
    head = new_head(dtype)
    copy = Fp8Head(head)
    head.weight = new_head(dtype, seed=9).weight
    with LargestResult() as largest:
        copy.refresh()
    values, scale = quantize_rows(head.weight)
    assert torch.equal(copy.weight, values.to(dtype)) and torch.equal(copy.scale, scale)
    assert largest.size == rows * HIDDEN * 4


def test_heads_that_cannot_be_copied_are_named():
    quantized = SimpleNamespace(weight=torch.zeros(8, 8, dtype=torch.int8))
    assert "no plain weight" in reason_against(quantized)
    small = SimpleNamespace(weight=torch.zeros(8, 8).to(torch.float8_e4m3fn))
    assert "quantized already" in reason_against(small)
    assert "no plain weight" in reason_against(SimpleNamespace())
    assert reason_against(new_head()) is None
