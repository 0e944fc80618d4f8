"""Quantized drafts: read as their library does, checked at start-up, refused by tensor and reason."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from serving import DRAFT
from sglang.srt.configs.model_config_parser_registry import _MODEL_CONFIG_PARSER_REGISTRY as PARSERS
from sglang.srt.utils.hf_transformers_utils import get_config
from support.engine import build
from support.quantized_drafts import SCHEMES, quantize, quantize_for_modelopt, quantize_plain_fp8, write

from sglang_dflash.srt.arg_groups.resolve import check_draft_tensors
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.configs.fields import DraftConfigError
from sglang_dflash.srt.configs.quantization import Scheme, flag_problem, quantization_of
from sglang_dflash.srt.layers.dequantize import QuantizedModule
from sglang_dflash.srt.models.dflash import DFlashDraftModel

WEIGHTS = load_file(DRAFT / "model.safetensors")
# One layer, so that each format takes little time.
SMALL = {name: tensor for name, tensor in WEIGHTS.items() if "layers." not in name or "layers.0." in name}


@pytest.fixture(autouse=True)
def parser(monkeypatch):
    monkeypatch.setitem(PARSERS, "hf", DraftConfigParser)


def read_hf_config(folder, **changes):
    config = get_config(str(folder), trust_remote_code=False, revision=None, model_override_args={})
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def one_layer(folder):
    return read_hf_config(folder, num_hidden_layers=1, layer_types=["full_attention"])


def quantized_draft(tmp_path, scheme: str):
    """Return the folder of a quantized draft of one layer, its tensors, and those of the library."""
    others = {
        "ModelOpt": quantize_for_modelopt,
        "plain FP8": lambda tensors: quantize_plain_fp8(tensors, in_blocks=False),
        "plain FP8 in blocks": lambda tensors: quantize_plain_fp8(tensors, in_blocks=True),
    }
    writer = others.get(scheme) or (lambda tensors: quantize(tensors, scheme))
    quantized, quantization, dequantized = writer(SMALL)
    return write(tmp_path / "draft", DRAFT, quantized, quantization), quantized, dequantized


@pytest.mark.parametrize("scheme", [*SCHEMES, "ModelOpt", "plain FP8", "plain FP8 in blocks"])
def test_a_quantized_draft_is_what_its_library_dequantizes(scheme, tmp_path):
    """Equal to the library's own weights up to bfloat16's rounding, which is the library's."""
    folder, quantized, dequantized = quantized_draft(tmp_path, scheme)
    config = one_layer(folder)
    check_draft_tensors(str(folder), config, DFlashDraftConfig.parse(config, "draft"))
    model = build(DFlashDraftModel, config, iter(quantized.items()))
    dense = build(DFlashDraftModel, one_layer(DRAFT), iter(dequantized.items()))
    found, expected = dict(model.named_parameters()), dict(dense.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2**-7, atol=1e-6)
    model.stack_kv_weights()
    dense.stack_kv_weights()
    torch.testing.assert_close(model.kv_weight, dense.kv_weight, rtol=2**-7, atol=1e-6)


def test_an_order_of_columns():
    """`weight_g_idx` names the group of each column."""
    scheme = Scheme("pack-quantized", 4, "group", 2, has_order=True)
    values = torch.tensor([[1, -2, 3, -4, 5, -6, 7, -8]])
    words = sum(((values[0, i] + 8) << 4 * i) for i in range(8)).to(torch.int64)
    parts = {
        "weight_packed": torch.tensor([[words - 2**32 if words >= 2**31 else words]]).to(torch.int32),
        "weight_scale": torch.tensor([[1.0, 10.0, 100.0, 1000.0]]),
        "weight_shape": torch.tensor([1, 8]),
        "weight_g_idx": torch.tensor([3, 2, 1, 0, 0, 1, 2, 3]),
    }
    weight = QuantizedModule("fc", scheme, 1, 8, parts).dequantize(torch.device("cpu"))
    factors = torch.tensor([1000, 100, 10, 1, 1, 10, 100, 1000])
    assert torch.equal(weight, (values * factors).float())
    parts["weight_g_idx"][0] = 4
    with pytest.raises(ValueError, match="fc.weight_g_idx points outside"):
        QuantizedModule("fc", scheme, 1, 8, parts).dequantize(torch.device("cpu"))


@pytest.fixture(scope="module")
def checked():
    """Return a W4A16 draft of one layer."""
    quantized, quantization, _ = quantize(SMALL, "W4A16")
    return SimpleNamespace(quantization=quantization, quantized=quantized)


UP = "layers.0.mlp.up_proj"


def _without(part):
    return lambda tensors, config: tensors.pop(f"{UP}.{part}")


def _set(part, change):
    return lambda tensors, config: tensors.update({f"{UP}.{part}": change(tensors[f"{UP}.{part}"])})


def _weights(**changes):
    return lambda tensors, config: config["config_groups"]["group_0"]["weights"].update(changes)


def _dense(tensors, config):
    for name in [name for name in tensors if name.startswith(UP)]:
        del tensors[name]
    tensors[f"{UP}.weight"] = SMALL[f"{UP}.weight"]


BAD = {
    "no scales": (_without("weight_scale"), f"model.safetensors: {UP}.weight_scale: missing, W4 needs it"),
    "no quantized tensor": (_without("weight_packed"), f"{UP}.weight_packed: missing"),
    "scales of another width": (
        _set("weight_scale", lambda t: t[:, :1].contiguous()),
        rf"{UP}.weight_scale is \(\d+, 1\), expected \(\d+, 2\) of W4",
    ),
    "transposed scales": (
        _set("weight_scale", lambda t: t.t().contiguous()),
        rf"{UP}.weight_scale is \(2, 512\), expected \(512, 2\)",
    ),
    "integer scales": (
        _set("weight_scale", lambda t: t.to(torch.int32)),
        f"{UP}.weight_scale is I32, expected BF16",
    ),
    "packed as bytes": (_set("weight_packed", lambda t: t.view(torch.uint8)), "is U8, expected I32"),
    "another layer's shape": (
        _set("weight_shape", lambda t: t + 8),
        rf"{UP}.weight_shape holds \(520, 264\), expected \(512, 256\)",
    ),
    "another number of bits": (_weights(num_bits=8), "weight_packed is .*, expected .* of W8"),
    "another group size": (_weights(group_size=64), "weight_scale is .*, expected .* of W4"),
    "a size that does not divide": (_weights(group_size=100), "group size 100 does not divide its 256 col"),
    "a group size of zero": (_weights(group_size=0), "group_size 0, which must be a positive integer"),
    "three bits": (_weights(num_bits=3), "num_bits 3, type 'int': not served"),
    "no config": (
        lambda tensors, config: config.clear(),
        "weight_packed .I32.: the config names no quantization for it",
    ),
    "another library": (
        lambda tensors, config: config.update(quant_method="gptq"),
        "quant_method 'gptq' is not served",
    ),
    "rotated": (
        lambda tensors, config: config.update(transform_config={"config_groups": {"u": {}}}),
        "transform_config.*weights are rotated",
    ),
    "a layer that is ignored and quantized": (
        lambda tensors, config: config["ignore"].append(UP),
        f"{UP}.weight_packed .I32.: the config names no quantization for it",
    ),
    "a dense layer": (_dense, f"{UP}.weight is dense, but the quantization config names it"),
    "a tensor of another scheme": (
        lambda tensors, config: tensors.update({f"{UP}.weight_global_scale": torch.ones(1)}),
        f"{UP}.weight_global_scale: W4 has no such tensor",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_is_refused_by_its_header(fault, checked, tmp_path):
    """File, tensor and reason, before anything is allocated."""
    tensors, quantization = dict(checked.quantized), copy.deepcopy(checked.quantization)
    spoil, words = BAD[fault]
    spoil(tensors, quantization)
    folder = write(tmp_path / "draft", DRAFT, tensors, quantization)
    config = one_layer(folder)
    draft = DFlashDraftConfig.parse(config, "draft")
    with pytest.raises(DraftConfigError, match=words):
        check_draft_tensors(str(folder), config, draft)


@pytest.mark.parametrize(
    "scheme, part, value, words",
    [
        ("W4A16", "weight_scale", torch.nan, "weight_scale holds 1 values that are not finite"),
        ("FP8", "weight", torch.nan, "weight holds 1 values"),
        ("MXFP4A16", "weight_scale", 255, "weight_scale holds 1 values"),
        ("NVFP4A16", "weight_global_scale", 0, "weight_global_scale is zero throughout"),
        ("W4A16", "weight_shape", 8, r"weight_shape holds \(8, 256\)"),
    ],
)
def test_a_bad_value_is_refused_when_it_is_loaded(scheme, part, value, words, tmp_path):
    folder, quantized, _ = quantized_draft(tmp_path, scheme)
    quantized[f"{UP}.{part}"] = quantized[f"{UP}.{part}"].clone()
    quantized[f"{UP}.{part}"].view(-1)[0] = value
    with pytest.raises(ValueError, match=f"{UP}.{words}"):
        build(DFlashDraftModel, one_layer(folder), iter(quantized.items()))


def test_modelopts_own_file(tmp_path):
    """Some exports have `hf_quant_config.json` alone; names may hold wildcards."""
    folder, *_ = quantized_draft(tmp_path, "ModelOpt")
    config = read_hf_config(folder)
    quantization = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    quantization["exclude_modules"] = ["layers.1*", "model.fc"]
    plain = write(tmp_path / "plain", DRAFT, SMALL, None)
    text = json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization})
    (plain / "hf_quant_config.json").write_text(text)
    found = quantization_of(read_hf_config(plain))
    assert found.scheme_of("layers.0.mlp.up_proj") == quantization_of(config).scheme_of("fc")
    assert found.scheme_of("fc") is None and found.scheme_of("layers.1.mlp.up_proj") is None
    assert quantization_of(read_hf_config(write(tmp_path / "dense", DRAFT, SMALL, None))) is None


def test_groups_win_in_order():
    """A group's own format, targets by name and by expression, and what no group names."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
    groups = {
        "a": {"targets": ["fc"], "weights": weights | {"num_bits": 8}},
        "b": {
            "targets": ["re:.*mlp.*"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "format": "float-quantized",
        },
    }
    raw = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    found = quantization_of(SimpleNamespace(draft_quantization=raw))
    schemes = map(found.scheme_of, ("fc", "layers.0.mlp.up_proj", "layers.0.self_attn.q_proj"))
    assert [scheme and scheme.name for scheme in schemes] == ["W8", "FP8", None]


@pytest.mark.parametrize(
    "named, is_refused", [(None, False), ("packed", True), ("compressed-tensors", False), ("fp8", True)]
)
def test_the_flag(named, is_refused, checked):
    """Unset and "unquant", which SGLang turns into None, fit every draft."""
    found = quantization_of(SimpleNamespace(draft_quantization=checked.quantization))
    problem = flag_problem(named, found) or ""
    assert ("quantized by compressed-tensors" in problem and "are dequantized" in problem) == is_refused
    assert ("for a draft that is not quantized" in (flag_problem(named, None) or "")) == (named is not None)


def test_the_flag_of_plain_fp8():
    quantization = quantize_plain_fp8(SMALL, in_blocks=True)[1]
    assert flag_problem("fp8", quantization_of(SimpleNamespace(draft_quantization=quantization))) is None


def test_modelopts_blocks_under_another_name(tmp_path):
    """ModelOpt's config does not say which shape its FP8 scales have; the file does."""
    tensors, _, dequantized = quantize_plain_fp8(SMALL, in_blocks=True)
    renamed = {
        name.replace("weight_scale_inv", "weight_scale"): (
            value[:, None, :, None] if name.endswith("weight_scale_inv") else value
        )
        for name, value in tensors.items()
    }
    exclude = ["lm_head", "*norm", "*kernel_projection", "candidate_selector*"]
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": exclude}
    folder = write(tmp_path / "draft", DRAFT, renamed, quantization)
    model = build(DFlashDraftModel, one_layer(folder), iter(renamed.items()))
    assert torch.equal(model.fc.weight.bfloat16(), dequantized["fc.weight"])


PLAIN_FP8 = {
    "no blocks": ({"weight_block_size": None}, "weight_scale_inv: FP8 has no such tensor"),
    "other blocks": ({"weight_block_size": [64, 128]}, r"weight_scale_inv is .*, expected .* of FP8"),
    "a size that is none": ({"weight_block_size": [0, 128]}, "must be two positive integers"),
    "another type": ({"fmt": "e5m2"}, "fmt 'e5m2': not served"),
    "a layer that is not converted": (
        {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp"]},
        "mlp.gate_proj.weight.*: the config names no quantization for it",
    ),
}


@pytest.mark.parametrize("fault", PLAIN_FP8)
def test_bad_plain_fp8(fault, tmp_path):
    changes, words = PLAIN_FP8[fault]
    quantized, quantization, _ = quantize_plain_fp8(SMALL, in_blocks=True)
    folder = write(tmp_path / "draft", DRAFT, quantized, quantization | changes)
    with pytest.raises(DraftConfigError, match=words):
        config = one_layer(folder)
        check_draft_tensors(str(folder), config, DFlashDraftConfig.parse(config, "draft"))
