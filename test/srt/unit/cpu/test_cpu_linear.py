"""float32 linears on oneDNN against PyTorch's own; all other linears stay unchanged."""

import functools
import inspect
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_dflash.srt.hardware_backend.cpu import speedups


@pytest.fixture
def as_if(monkeypatch):
    """Return `apply` as it is on a CPU of this kind."""

    def of(has_avx512: bool, multiplies_bfloat16: bool):
        monkeypatch.setattr(speedups, "has_avx512", lambda: has_avx512)
        monkeypatch.setattr(speedups, "multiplies_bfloat16", lambda: multiplies_bfloat16)
        original = inspect.unwrap(UnquantizedLinearMethod.apply)
        return functools.partial(speedups.linear_for_this_cpu, original)

    return of


def product(
    rows: int, has_bias: bool, dtype: torch.dtype
) -> tuple[SimpleNamespace, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(0)
    layer = SimpleNamespace(weight=torch.randn(96, 64, dtype=dtype))
    return layer, torch.randn(rows, 64, dtype=dtype), torch.randn(96, dtype=dtype) if has_bias else None


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 384])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_pytorchs_linear(rows, has_bias, dtype, as_if):
    layer, x, bias = product(rows, has_bias, dtype)
    found = as_if(True, True)(None, layer, x, bias)
    expected = torch.nn.functional.linear(x, layer.weight, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if dtype == torch.float32 else 0)


@pytest.mark.parametrize("rows", [2, 17, 384])
@pytest.mark.parametrize("has_bias", [False, True])
def test_converted_bfloat16_is_rounded_once(rows, has_bias, as_if):
    layer, x, bias = product(rows, has_bias, torch.bfloat16)
    found = as_if(False, False)(None, layer, x, bias)
    exact = torch.nn.functional.linear(
        x.double(), layer.weight.double(), None if bias is None else bias.double()
    )
    assert found.dtype == torch.bfloat16
    # Half a unit in the last place, and the order of float32 additions.
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)


def test_which_runs_on_onednn(as_if, monkeypatch):
    """Only many rows of float32 on a CPU with AVX-512 do."""
    called = []
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda x, **_: called.append(tuple(x.shape)))
    cases = (
        (torch.float32, (16, 8)),
        (torch.float32, (15, 8)),
        (torch.bfloat16, (16, 8)),
        (torch.float32, (2, 16, 8)),
    )
    for has_avx512 in (True, False):
        apply = as_if(has_avx512, True)
        for dtype, shape in cases:
            apply(
                None, SimpleNamespace(weight=torch.randn(4, 8, dtype=dtype)), torch.randn(shape, dtype=dtype)
            )
    assert called == [(16, 8)]


def test_which_is_multiplied_in_float32(as_if, monkeypatch):
    calls, plain = [], torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda x, *rest: calls.append((x.shape[0], x.dtype)) or plain(x, *rest)
    )
    layer = SimpleNamespace(weight=torch.randn(4, 8, dtype=torch.bfloat16))
    for multiplies in (True, False):
        for rows in (1, 2):
            as_if(False, multiplies)(None, layer, torch.randn(rows, 8, dtype=torch.bfloat16))
    assert (2, torch.float32) in calls
    assert [dtype for _, dtype in calls].count(torch.float32) == 1
