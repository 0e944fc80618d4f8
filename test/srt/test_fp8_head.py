"""The FP8 copy of an LM head: its rounding, its limits, and weight updates that it follows."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.srt.layers.fp8_head import Fp8Head, quantize_rows, reason_against
from sglang_dflash.srt.speculative.targets.weight_updates import route_weight_updates

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


def test_heads_that_cannot_be_copied_are_named():
    packed = SimpleNamespace(weight=torch.zeros(8, 8, dtype=torch.int8))
    assert "no plain weight" in reason_against(packed)
    small = SimpleNamespace(weight=torch.zeros(8, 8).to(torch.float8_e4m3fn))
    assert "quantized already" in reason_against(small)
    assert "no plain weight" in reason_against(SimpleNamespace())
    assert reason_against(new_head()) is None


class Updater:
    """SGLang's WeightUpdater, as far as it is called here."""

    def __init__(self, log: list[str]):
        self._log = log

    def __getattr__(self, name):
        return lambda *args: self._log.append(name)


@pytest.mark.parametrize(
    "way", ["update_weights_from_tensor", "load_weights_from_distributed", "end_weight_update"]
)
def test_every_way_of_updating_weights_renews_the_copy(way):
    log: list[str] = []
    runners = [SimpleNamespace(weight_updater=Updater(log), model_config=None) for _ in range(2)]
    runners[1].model = SimpleNamespace(refresh_fp8_head=lambda: log.append("renewed"), no_update_reason=None)
    route_weight_updates(*runners)
    getattr(runners[0].weight_updater, way)("weights")
    assert log == [way, "renewed"]
    runners[0].weight_updater.init_weights_update_group("group")
    assert log[2:] == ["init_weights_update_group"]
