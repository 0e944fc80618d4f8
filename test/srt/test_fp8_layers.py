"""FP8 copies of a draft's linear layers: what they change, and what they leave as it is."""

import pytest
import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from support.draft_cases import Case

from sglang_dflash.srt.layers.fp8_head import quantize_rows
from sglang_dflash.srt.layers.fp8_layers import Fp8Linear

NAME = "attention bias"
LINEAR_LAYERS = 4  # of a draft layer: queries, keys and values; attention's output; two of the MLP


@pytest.fixture
def case(tmp_path) -> Case:
    return Case.variant(NAME, tmp_path)


def linears(case: Case) -> list:
    return [layer for layer in case.model.layers.modules() if isinstance(layer, LinearBase)]


def test_blocks_change_a_little_and_context_does_not(case):
    aux_hidden = case.aux_hidden(20, seed=3)
    context, exact = case.context_kv(aux_hidden), case.compare_blocks([23, 9])
    assert case.model.use_fp8_layers() is None
    assert len(linears(case)) == LINEAR_LAYERS * case.config["num_hidden_layers"]
    assert all(isinstance(layer.quant_method, Fp8Linear) for layer in linears(case))
    assert all(map(torch.equal, case.context_kv(aux_hidden), context))
    assert exact < 1e-4 < 1e-2 < case.compare_blocks([23, 9]) < 1


def test_a_layer_multiplies_the_rounded_factors(case):
    case.model.use_fp8_layers()
    layer = case.model.layers[0].self_attn.qkv_proj
    rows = torch.randn(5, layer.weight.shape[1], generator=torch.Generator().manual_seed(1))
    factors = [values.double() * scale for values, scale in map(quantize_rows, (rows, layer.weight))]
    expected = factors[0] @ factors[1].T + layer.bias.double()
    assert layer.bias.any()
    torch.testing.assert_close(layer(rows)[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_copies_follow_a_weight_update(case):
    case.model.use_fp8_layers()
    layer = case.model.layers[0].mlp.down_proj
    rows, copy = torch.ones(1, layer.weight.shape[1]), layer.quant_method.copy
    before, address = layer(rows)[0], copy.weight.data_ptr()
    case.model.load_weights((name, 2 * weight) for name, weight in case.weights.items())
    assert torch.equal(layer(rows)[0], before)
    case.model.refresh_fp8_copies()
    assert torch.equal(layer(rows)[0], 2 * before) and copy.weight.data_ptr() == address


def test_one_layer_that_cannot_be_copied_leaves_all_as_they_are(case):
    last = linears(case)[-1]
    last.weight.data = last.weight.data.to(torch.float8_e4m3fn)
    reason = case.model.use_fp8_layers()
    assert "mlp.down_proj is quantized already" in reason
    assert all(type(layer.quant_method) is UnquantizedLinearMethod for layer in linears(case))
