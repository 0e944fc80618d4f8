"""Packed layers of quantized drafts: the choice of SGLang's method, its parameters, the check at start-up.

On a CPU, with stand-ins for what needs a GPU (support/packed_kernels.py). No kernel runs here.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from serving import DRAFT
from sglang.srt.configs.model_config_parser_registry import _MODEL_CONFIG_PARSER_REGISTRY as PARSERS
from sglang.srt.layers import linear
from sglang.srt.layers.linear import QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16 import (
    WNA16_SUPPORTED_TYPES_MAP,
    WNA16_ZP_SUPPORTED_TYPES_MAP,
)
from sglang.srt.layers.quantization.marlin_utils import query_marlin_supported_quant_types
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.utils.hf_transformers_utils import get_config
from support.engine import build, start
from support.packed_drafts import SCHEMES, pack, pack_for_modelopt, pack_plain_fp8, write
from support.packed_kernels import use_stand_ins

from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
from sglang_dflash.srt.configs.quantization import ALL_LINEAR, DraftQuantization, Group, Scheme
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.dequantize import PackedModule, dequantize
from sglang_dflash.srt.models import quantized_linear
from sglang_dflash.srt.models.dflash import DFlashDraftModel
from sglang_dflash.srt.models.loading import load_packed_modules
from sglang_dflash.srt.models.quantized_linear import Kernel, PackedLayers, choose_kernel, run_row_checks

WEIGHTS = load_file(DRAFT / "model.safetensors")
SMALL = {name: tensor for name, tensor in WEIGHTS.items() if "layers." not in name or "layers.0." in name}
ADA = (8, 9)
FORMATS = [*SCHEMES, "ModelOpt", "plain FP8", "plain FP8 in blocks"]
WITHOUT_KERNEL = ("W8A8", "MXFP4A16")
LAYERS = ("fc", "layers.0.self_attn.qkv_proj", "layers.0.self_attn.o_proj")
LAYERS += ("layers.0.mlp.gate_up_proj", "layers.0.mlp.down_proj")


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch):
    """Read drafts as SGLang does, in the type in which it runs packed layers."""
    monkeypatch.setitem(PARSERS, "hf", DraftConfigParser)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def packed(name: str, tensors=SMALL, shared: bool = True):
    if name == "ModelOpt":
        return pack_for_modelopt(tensors, shared)
    if name.startswith("plain FP8"):
        return pack_plain_fp8(tensors, in_blocks=name.endswith("blocks"))
    return pack(tensors, name, shared)


def build_draft(folder, tensors, quantization):
    """Load a draft of one layer as SGLang's loader does."""
    write(folder, DRAFT, tensors, quantization)
    config = get_config(str(folder), trust_remote_code=False, revision=None, model_override_args={})
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    return build(DFlashDraftModel, config, iter(tensors.items()))


def product(model, name: str) -> torch.Tensor:
    layer = model.get_submodule(name)
    rows = torch.randn(5, layer.input_size, generator=torch.Generator().manual_seed(4))
    return layer.quant_method.apply(layer, rows.bfloat16()).float()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("name", FORMATS)
def test_layers_multiply_what_their_file_holds(name, tmp_path, monkeypatch, caplog):
    """Parameters are SGLang's, filled by its loaders; the context's K and V rows are dequantized."""
    caplog.set_level(logging.INFO)
    tensors, quantization, _ = packed(name)
    dense = build_draft(tmp_path / "dense", tensors, quantization)
    assert dense.packed_layers is None
    use_stand_ins(monkeypatch, ADA)
    model = build_draft(tmp_path / "packed", tensors, quantization)
    layers = model.packed_layers.layers
    assert set(layers) == set(LAYERS)
    has_kernel = name not in WITHOUT_KERNEL
    assert model.packed_layers.has_kernels == has_kernel
    run_row_checks(model.row_checks)
    assert len(model.row_checks) == 8
    for layer in LAYERS:
        module = model.get_submodule(layer)
        assert hasattr(module, "unpacked_weight") == has_kernel
        assert isinstance(module.quant_method, UnquantizedLinearMethod) != has_kernel
        limit = layers[layer].kernel.limit if has_kernel else 0.01
        assert relative(product(model, layer), product(dense, layer)) < limit
    for draft in (model, dense):
        draft.stack_kv_weights()
    torch.testing.assert_close(model.kv_weight, dense.kv_weight, rtol=2**-7, atol=1e-6)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    warnings = [text for text in warnings if "are dequantized" in text]
    assert len(warnings) == (not has_kernel)
    if not has_kernel:
        assert "SGLang has no kernel for" in warnings[0] and "layers.0.mlp.down_proj" in warnings[0]


def transposed(parts):
    scale = parts["weight_scale"]
    return parts | {"weight_scale": scale.t().contiguous().view(scale.shape)}


def another_group_size(parts):
    """The kernel takes groups of half the size: columns read the scales of others."""
    scale = parts["weight_scale"]
    return parts | {"weight_scale": scale.repeat_interleave(2, 1)[:, : scale.shape[1]]}


FAULTS = {
    "transposed scales": transposed,
    "another group size": another_group_size,
    "scales of the next group": lambda parts: parts | {"weight_scale": parts["weight_scale"].roll(1, 1)},
    "scales of the next row": lambda parts: parts | {"weight_scale": parts["weight_scale"].roll(1, 0)},
    "scales halved": lambda parts: parts | {"weight_scale": parts["weight_scale"] * 0.5},
}
# A module of the file -> rows and columns of the layer of the model that holds it.
SHAPES = {"fc": (256, 1024), "layers.0.self_attn.q_proj": (512, 256), "layers.0.mlp.down_proj": (256, 512)}
WRONG = [("W4A16", fault, module) for fault in FAULTS for module in SHAPES]
WRONG += [(name, fault, "fc") for name in ("W8A16", "FP8_BLOCK") for fault in FAULTS]


@pytest.mark.parametrize("name, fault, module", WRONG)
def test_a_wrong_kernel_is_refused_by_the_layers_name(name, fault, module, tmp_path, monkeypatch):
    tensors, quantization, _ = packed(name)
    model_layer, _ = quantized_linear.model_layer(module)
    use_stand_ins(monkeypatch, ADA, {SHAPES[module]: FAULTS[fault]})
    model = build_draft(tmp_path / "draft", tensors, quantization)
    with pytest.raises(ValueError, match=rf"- {module} \(.*\) differs by") as caught:
        run_row_checks(model.row_checks)
    text = str(caught.value)
    assert "Without --speculative-draft-model-quantization packed, all layers are dequantized" in text
    named = [line for line in text.splitlines() if " differs by " in line]
    assert all(quantized_linear.model_layer(line.split()[1])[0] == model_layer for line in named)


def test_a_kernel_that_raises_is_refused_by_the_layers_name(tmp_path, monkeypatch):
    """The other layers are still checked."""
    tensors, quantization, _ = packed("W4A16")
    use_stand_ins(monkeypatch, ADA, {SHAPES["layers.0.mlp.down_proj"]: FAULTS["scales halved"]})
    model = build_draft(tmp_path / "draft", tensors, quantization)

    def panic(*_):
        raise RuntimeError("Unsupported shapes: MNK = [4, 256, 1024]")

    monkeypatch.setattr(model.fc.quant_method, "apply", panic)
    with pytest.raises(ValueError, match=r"- fc \(.*Marlin\) fails with RuntimeError: Unsupported") as caught:
        run_row_checks(model.row_checks)
    assert "- layers.0.mlp.down_proj" in str(caught.value)
    assert "Without --speculative-draft-model-quantization packed" in str(caught.value)


def test_different_global_scales_are_dequantized(tmp_path, monkeypatch, caplog):
    """The kernel takes one for fused modules; SGLang's ModelOpt method would take the largest."""
    for name in ("NVFP4A16", "ModelOpt"):
        caplog.clear()
        tensors, quantization, _ = packed(name, shared=False)
        use_stand_ins(monkeypatch, ADA)
        model = build_draft(tmp_path / name, tensors, quantization)
        fused = {"layers.0.self_attn.qkv_proj", "layers.0.mlp.gate_up_proj"}
        dense = {layer for layer, found in model.packed_layers.layers.items() if found.kernel is None}
        assert dense == fused
        run_row_checks(model.row_checks)
        model.stack_kv_weights()
        [warning] = [r.getMessage() for r in caplog.records if "are dequantized" in r.getMessage()]
        assert "different global scales" in warning and "gate_up_proj" in warning and "fc" not in warning


def test_modelopts_blocks_under_another_name(tmp_path, monkeypatch):
    """ModelOpt's config does not say which shape its FP8 scales have; the file does."""
    tensors, _, unpacked = pack_plain_fp8(SMALL, in_blocks=True)
    renamed = {
        name.replace("weight_scale_inv", "weight_scale"): (
            value[:, None, :, None] if name.endswith("weight_scale_inv") else value
        )
        for name, value in tensors.items()
    }
    exclude = ["lm_head", "*norm", "*kernel_projection", "candidate_selector*"]
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": exclude}
    use_stand_ins(monkeypatch, ADA)
    model = build_draft(tmp_path / "draft", renamed, quantization)
    assert not model.packed_layers.has_kernels
    run_row_checks(model.row_checks)
    assert torch.equal(model.fc.weight, unpacked["fc.weight"])


@pytest.mark.parametrize("name, value", [("DRAFT_PACKED", ""), ("PLAIN_CYCLE", "1")])
def test_a_draft_is_dequantized_unless_kernels_were_asked_for(name, value, tmp_path, monkeypatch):
    tensors, quantization, _ = packed("W4A16")
    use_stand_ins(monkeypatch, ADA)
    monkeypatch.setenv(getattr(DFlashOptions, name).variable, value)
    model = build_draft(tmp_path / "draft", tensors, quantization)
    assert model.packed_layers is None and model.fc.weight.dtype == torch.bfloat16


def test_a_mixed_layer_is_dequantized(tmp_path, monkeypatch):
    """One kernel multiplies q, k and v; here v is dense, and the MLP has two schemes."""
    tensors, quantization, unpacked = packed("W4A16")
    name = "layers.0.self_attn.v_proj"
    tensors = {key: value for key, value in tensors.items() if not key.startswith(f"{name}.")}
    tensors[f"{name}.weight"] = unpacked[f"{name}.weight"]
    quantization["ignore"].append(name)
    use_stand_ins(monkeypatch, ADA)
    model = build_draft(tmp_path / "draft", tensors, quantization)
    layers = model.packed_layers.layers
    assert "stored differently" in layers["layers.0.self_attn.qkv_proj"].reason
    assert layers["fc"].kernel is not None
    run_row_checks(model.row_checks)
    dense = model.get_submodule("layers.0.self_attn.qkv_proj").weight
    rows = unpacked[f"{name}.weight"].shape[0]
    assert torch.equal(dense[-rows:], unpacked[f"{name}.weight"])


def test_a_weight_update_is_refused(tmp_path, monkeypatch):
    tensors, quantization, _ = packed("W4A16")
    use_stand_ins(monkeypatch, ADA)
    model = build_draft(tmp_path / "draft", tensors, quantization)
    with pytest.raises(ValueError, match="a weight update cannot replace"):
        model.load_weights(iter(tensors.items()))


W4 = Scheme("packed", 4, "group", 128)
FP8_ROWS, FP8_BLOCKS = Scheme("fp8", 8, "channel"), Scheme("fp8", 8, "block")
NVFP4 = Scheme("nvfp4", 4, "group", 16)
CHOICES = {
    "four bits": (W4, (8, 0), "Marlin"),
    "eight bits per row": (Scheme("packed", 8, "channel"), (9, 0), "Marlin"),
    "asymmetric": (Scheme("packed", 4, "group", 32, is_symmetric=False), (8, 0), "Marlin"),
    "FP8 on Ampere": (FP8_ROWS, (8, 6), "Marlin FP8"),
    "FP8 on Ada": (FP8_ROWS, (8, 9), "FP8"),
    "FP8 of ModelOpt": (Scheme("modelopt-fp8", 8, "tensor"), (9, 0), "FP8"),
    "blocks on Hopper": (FP8_BLOCKS, (9, 0), "FP8 in blocks"),
    "NVFP4": (NVFP4, (8, 0), "FP4 weights"),
    "NVFP4 of ModelOpt": (Scheme("modelopt-nvfp4", 4, "group", 16), (10, 0), "FP4 weights"),
}
REASONS = {
    "a CPU": (W4, None, "no kernels for quantized layers"),
    "Turing": (W4, (7, 5), "need compute capability 8.0, this GPU has 7.5"),
    "an order of columns": (Scheme("packed", 4, "group", 128, has_order=True), (8, 0), "one order"),
    "groups of 16 integers": (Scheme("packed", 4, "group", 16), (8, 0), "no groups of 16"),
    "zero points of eight bits": (
        Scheme("packed", 8, "channel", is_symmetric=False),
        (9, 0),
        "zero points of 4 bits, not of 8",
    ),
    "one scale of integers": (Scheme("packed", 8, "tensor"), (8, 0), "not per tensor"),
    "blocks on Ampere": (FP8_BLOCKS, (8, 6), "need compute capability 8.9, this GPU has 8.6"),
    "other blocks": (Scheme("fp8", 8, "block", block=(64, 64)), (9, 0), "not 64 by 64"),
    "wide groups of FP4": (Scheme("nvfp4", 4, "group", 32), (10, 0), "groups of 16, not 32"),
    "MXFP4": (Scheme("mxfp4", 4, "group", 32), (10, 0), "no kernel for MXFP4"),
    "INT8": (Scheme("int8", 8, "channel"), (9, 0), "no kernel for INT8"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_choice(case):
    scheme, capability, name = CHOICES[case]
    kernel = choose_kernel(scheme, capability, torch.bfloat16)
    assert isinstance(kernel, Kernel) and kernel.name == name
    assert kernel.shape_problem(5120, 5120, [17408, 17408]) is None
    assert "100" in kernel.shape_problem(5120, 100, [64])
    assert kernel.shape_problem(5120, 5120, [100]) is not None
    assert "not float32" in choose_kernel(scheme, capability, torch.float32)


@pytest.mark.parametrize("case", REASONS)
def test_the_reason_against(case):
    scheme, capability, words = REASONS[case]
    reason = choose_kernel(scheme, capability, torch.bfloat16)
    assert isinstance(reason, str) and words in reason


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_integers_have_a_kernel_where_sglang_has_one(bits, is_symmetric):
    scheme = Scheme("packed", bits, "group", 128, is_symmetric=is_symmetric)
    types = WNA16_SUPPORTED_TYPES_MAP if is_symmetric else WNA16_ZP_SUPPORTED_TYPES_MAP
    compiled = query_marlin_supported_quant_types(not is_symmetric, device_capability=90)
    has_kernel = isinstance(choose_kernel(scheme, (9, 0), torch.bfloat16), Kernel)
    assert has_kernel == (types[bits] in compiled)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["W4A16", "W8A16", "FP8", "NVFP4A16"])
def test_the_shares_of_two_ranks(name, rank, monkeypatch):
    """Heads, KV heads that both ranks have in common, and inputs, through SGLang's own loaders."""
    start()
    use_stand_ins(monkeypatch, ADA)
    for module in (linear, quantized_linear):
        monkeypatch.setattr(module, "get_group_rank_size", lambda group: (rank, 2))
    generator = torch.Generator().manual_seed(0)
    rows = {"q_proj": 256, "k_proj": 32, "v_proj": 32, "o_proj": 128}
    dense = {
        f"layers.0.self_attn.{part}.weight": torch.randn(count, 512, generator=generator).bfloat16()
        for part, count in rows.items()
    }
    tensors, quantization, _ = packed(name, dense)
    scheme = quantized_linear.quantization_of(SimpleNamespace(draft_quantization=quantization))
    scheme = scheme.scheme_of("layers.0.self_attn.q_proj")
    layers = PackedLayers(DraftQuantization("", (), (Group(ALL_LINEAR, scheme),)), ADA)
    attention = torch.nn.Module()
    options = dict(bias=False, quant_config=layers)
    name = "layers.0.self_attn"
    attention.qkv_proj = QKVParallelLinear(512, 32, 8, 1, **options, prefix=f"{name}.qkv_proj")
    attention.o_proj = RowParallelLinear(512, 128, **options, prefix=f"{name}.o_proj")
    attention.context_rows = {}
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module()])
    model.layers[0].self_attn = attention
    model.norm = torch.nn.LayerNorm(4)
    model.packed_layers, model.needs_context_rows = layers, True
    modules = []
    for part, count in rows.items():
        own = f"{name}.{part}."
        parts = {key.removeprefix(own): value for key, value in tensors.items() if key.startswith(own)}
        modules.append(PackedModule(f"{name}.{part}", scheme, count, 512, parts))
    checks = load_packed_modules(model, modules, lambda *_: pytest.fail("a layer is dense"))
    for layer in (attention.qkv_proj, attention.o_proj):
        layer.quant_method.process_weights_after_loading(layer)
    run_row_checks(checks)
    assert attention.qkv_proj.unpacked_weight.shape == (128 + 2 * 32, 512)
    assert attention.o_proj.unpacked_weight.shape == (128, 256)
    kept = attention.context_rows["v"]
    assert torch.equal(kept, dequantize(modules[2].parts, scheme, 32, 512).bfloat16())
    attention.qkv_proj.unpacked_weight[:128] = attention.qkv_proj.unpacked_weight[:128].roll(1, 0)
    with pytest.raises(ValueError, match="q_proj") as caught:
        run_row_checks(checks)
    assert "k_proj" not in str(caught.value)
