"""Quantized drafts, written by the compressed-tensors library itself or renamed to ModelOpt's layout."""

from pathlib import Path

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.utils import match_name
from safetensors.torch import load_file
from support.drafts import read_config, write_checkpoint

# What published drafts leave dense.
IGNORED = ("re:.*kernel_projection$", "re:.*candidate_selector.*", "re:.*norm$", "lm_head", "embed_tokens")
SCHEMES = (
    "W4A16",
    "W4A16_ASYM",
    "W8A16",
    "W8A8",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "NVFP4A16",
    "NVFP4",
    "MXFP4A16",
)


def quantize(tensors: dict, name: str) -> tuple[dict, dict, dict]:
    """Quantize a draft's linear layers.

    Returns the quantized tensors, the `quantization_config`, and the tensors as the library dequantizes them.
    """
    scheme = preset_name_to_scheme(name, ["Linear"])
    quantized, dequantized, form = {}, {}, None
    for key, tensor in tensors.items():
        module, _, last = key.rpartition(".")
        if last != "weight" or tensor.ndim != 2 or any(match_name(module, pattern) for pattern in IGNORED):
            quantized[key] = dequantized[key] = tensor
            continue
        form = _format(scheme)
        parts = _compressed(tensor, scheme, form)
        quantized |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
        dense = BaseCompressor.get_value_from_registry(form).decompress(parts, scheme)
        dequantized[key] = dense["weight"].to(tensor.dtype)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(IGNORED),
    )
    return quantized, config.model_dump(mode="json"), dequantized


def quantize_plain_fp8(tensors: dict, in_blocks: bool) -> tuple[dict, dict, dict]:
    """Quantize to FP8 as exports without a library's name do. Returns what `quantize` does."""
    quantized, _, dequantized = quantize(tensors, "FP8_BLOCK" if in_blocks else "FP8")
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    config["modules_to_not_convert"] = ["lm_head", "embed_tokens", "candidate_selector"]
    if in_blocks:
        config["weight_block_size"] = [128, 128]
        quantized = {
            name.replace("weight_scale", "weight_scale_inv"): value for name, value in quantized.items()
        }
    return quantized, config, dequantized


def quantize_for_modelopt(tensors: dict) -> tuple[dict, dict, dict]:
    """Quantize to NVFP4 in ModelOpt's names and factors. Returns what `quantize` does."""
    quantized, _, dequantized = quantize(tensors, "NVFP4A16")
    renamed = {}
    for name, tensor in quantized.items():
        if name.endswith(".weight_global_scale"):  # ModelOpt multiplies where compressed-tensors divides
            renamed[name.replace("weight_global_scale", "weight_scale_2")] = 1 / tensor[0]
        else:
            renamed[name.replace("weight_packed", "weight")] = tensor
    exclude = ["lm_head", "*norm", "*kernel_projection", "candidate_selector*"]
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": exclude}
    return renamed, config, dequantized


def write_quantized(folder: Path, source: Path, scheme: str) -> Path:
    """Write a quantized copy of a checkpoint."""
    quantized, quantization, _ = quantize(load_file(source / "model.safetensors"), scheme)
    return write(folder, source, quantized, quantization)


def write(folder: Path, source: Path, tensors: dict, quantization: dict | None) -> Path:
    """Write a checkpoint with the config of `source` and these tensors."""
    config = read_config(source) | {"quantization_config": quantization}
    return write_checkpoint(folder, config, tensors)


def _format(scheme) -> str:
    form = infer_module_format(torch.nn.Linear, scheme)
    return getattr(form, "value", form)


def _compressed(weight: torch.Tensor, scheme, form: str) -> dict:
    args = scheme.weights
    strategy = getattr(args.strategy, "value", args.strategy)
    rows, columns = weight.shape
    view = {
        "group": lambda: weight.view(rows, columns // args.group_size, args.group_size),
        "tensor_group": lambda: weight.view(rows, columns // args.group_size, args.group_size),
        "channel": lambda: weight.view(rows, 1, columns),
        "tensor": lambda: weight.view(1, 1, -1),
        "block": lambda: weight.view(rows // 128, 128, columns // 128, 128).transpose(1, 2).flatten(2),
    }[strategy]().float()
    state = {"weight": weight}
    if strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.float().amin(), weight.float().amax())
    scale, zero = calculate_qparams(
        view.amin(-1), view.amax(-1), args, global_scale=state.get("weight_global_scale")
    )
    state["weight_scale"] = scale if "weight_global_scale" in state else scale.to(weight.dtype)
    if strategy == "tensor":
        state["weight_scale"] = state["weight_scale"].view(1)
    if not args.symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    parts = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    return {part: value for part, value in parts.items() if value is not None}
