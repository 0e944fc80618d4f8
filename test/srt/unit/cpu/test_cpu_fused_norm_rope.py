"""The CPU runtime's norm and rotation are SGLang's own, bit by bit."""

import inspect
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
import torch

from sglang_dflash.srt.hardware_backend.cpu.speedups import fused_rms_norm, fused_rotation


def norm(dtype, **changes):
    fields = dict(
        hidden_size=64, variance_epsilon=1e-6, variance_size_override=None, override_orig_dtype=None
    )
    fields |= dict(cast_x_before_out_mul=False, fp32_residual=False)
    return SimpleNamespace(weight=torch.randn(64, dtype=dtype), **{**fields, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, {"variance_size_override": 32}, {"cast_x_before_out_mul": True}, {"fp32_residual": True}]
)
@pytest.mark.parametrize("num_added", [0, 1, 2])
def test_norm(dtype, changes, num_added):
    from sglang.srt.layers.layernorm import RMSNorm

    torch.manual_seed(0)
    layer = norm(dtype, **changes)
    x, *added = torch.randn(1 + num_added, 7, 64, dtype=dtype).mul(3).unbind()
    original = inspect.unwrap(RMSNorm.forward_native)
    expected = original(layer, x, *added)
    found = fused_rms_norm(original, layer, x, *added)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_norm_of_another_size_is_refused_as_before():
    from sglang.srt.layers.layernorm import RMSNorm

    with pytest.raises(ValueError, match="hidden_size"):
        fused_rms_norm(inspect.unwrap(RMSNorm.forward_native), norm(torch.float32), torch.randn(2, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_neox_style, rotary_dim", [(True, 16), (True, 8), (False, 16)])
def test_rotation(dtype, is_neox_style, rotary_dim):
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.utils import apply_rotary_emb

    torch.manual_seed(0)
    rope = SimpleNamespace(
        cos_sin_cache=torch.randn(50, rotary_dim),
        head_size=16,
        rotary_dim=rotary_dim,
        is_neox_style=is_neox_style,
        _apply_rotary_emb_wrapped=apply_rotary_emb,
    )
    positions = torch.randint(50, (7,))
    query, key = torch.randn(7, 4 * 16, dtype=dtype), torch.randn(7, 2 * 16, dtype=dtype)
    original = inspect.unwrap(RotaryEmbedding.forward_native)
    expected = original(rope, positions, query, key)
    found = fused_rotation(original, rope, positions, query, key)
    assert [t.shape for t in found] == [query.shape, key.shape]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
