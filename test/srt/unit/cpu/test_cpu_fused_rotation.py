"""The CPU runtime's rotation is SGLang's own, bit by bit."""

import inspect
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules
import torch

from sglang_dflash.srt.hardware_backend.cpu.speedups import fused_rotation


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
