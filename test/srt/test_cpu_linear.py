"""float32 linears on oneDNN against PyTorch's own, and everything else left alone."""

from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
import torch

from sglang_dflash.srt.hardware_backend.cpu import linear


@pytest.fixture(scope="module")
def apply():
    return linear.linear_on_onednn()


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 384])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_pytorchs_linear(rows, has_bias, dtype, apply):
    torch.manual_seed(0)
    layer = SimpleNamespace(weight=torch.randn(96, 64, dtype=dtype))
    x, bias = torch.randn(rows, 64, dtype=dtype), torch.randn(96, dtype=dtype) if has_bias else None
    found, expected = apply(None, layer, x, bias), torch.nn.functional.linear(x, layer.weight, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 0)


def test_which_runs_on_onednn(apply, monkeypatch):
    """Many rows of float32, and nothing else."""
    called = []
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda x, *rest: called.append(tuple(x.shape)))
    for dtype, shape in ((torch.float32, (16, 8)), (torch.float32, (15, 8)), (torch.bfloat16, (16, 8)), (torch.float32, (2, 16, 8))):
        apply(None, SimpleNamespace(weight=torch.randn(4, 8, dtype=dtype)), torch.randn(shape, dtype=dtype))
    assert called == [(16, 8)]


def test_installing_twice_wraps_once(monkeypatch):
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    original = UnquantizedLinearMethod.apply
    monkeypatch.setattr(UnquantizedLinearMethod, "apply", linear.linear_on_onednn())
    again = linear.linear_on_onednn()
    assert again.__wrapped__ is original or again.__wrapped__ is getattr(original, "__wrapped__", None)
