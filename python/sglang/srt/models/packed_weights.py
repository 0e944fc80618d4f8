"""Packed modules of a quantized draft: dequantized at load, or kept as kernels take them.

A wrong load of a quantized layer is not seen in the accept length: scales shifted by a group cost 6 % of it.
So each layer's output is compared with that of the file's own weights, for a few random rows.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear

from sglang_dflash.srt.configs.draft_quantization import ATTRIBUTE, Scheme, quantization_of
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.dequantize import dequantize
from sglang_dflash.srt.layers.packed_linear import (
    FUSED,
    WEIGHTS_ALONE,
    PackedLayer,
    PackedLayers,
    Parts,
    fusion_problem,
    parameter_parts,
)

logger = logging.getLogger(__name__)

NUM_ROWS = 16

# Modules of a checkpoint that SGLang fuses: name in the checkpoint -> (name in the model, its part of it).
SHARDS = {module: (fused, shard) for fused, modules in FUSED.items() for module, shard in modules.items()}


@dataclass(frozen=True)
class PackedModule:
    """A module's tensors by the last part of their names, and the shape of its weight."""

    name: str
    scheme: Scheme
    rows: int
    columns: int
    parts: dict[str, torch.Tensor]

    def dequantize(self, device: torch.device) -> torch.Tensor:
        """Return the weight [rows, columns] in float32. Raises ValueError naming the tensor."""
        parts = {name: tensor.to(device) for name, tensor in self.parts.items()}
        try:
            return dequantize(parts, self.scheme, self.rows, self.columns)
        except ValueError as error:
            raise ValueError(f"DFLASH draft weights: {self.name}.{error}") from error


@dataclass(frozen=True)
class RowCheck:
    """Expected output [NUM_ROWS, *] float32 of this rank's share of a module.

    Attributes:
        module: of the model.
        columns: of the module's output.
        inputs: [NUM_ROWS, *] float32.
        kernel: the name of the module's kernel, empty if the module is dequantized.
        limit: of the difference.
    """

    name: str
    scheme: Scheme
    module: Any
    columns: slice
    inputs: torch.Tensor
    expected: torch.Tensor
    kernel: str = ""
    limit: float = WEIGHTS_ALONE

    def error(self) -> float:
        """Return the relative difference of the module's output."""
        inputs = self.inputs.to(self.module.params_dtype)
        output = self.module.quant_method.apply(self.module, inputs)[:, self.columns]
        difference = (output.float() - self.expected).norm() / self.expected.norm().clamp(min=1e-30)
        return float(difference)

    def problem(self) -> str | None:
        """Say why the module may not serve, or return None."""
        name = f"{self.name} ({self.scheme.name}{self.kernel and f', {self.kernel}'})"
        try:
            error = self.error()
        except Exception as failure:  # a kernel refuses a layer in its own way
            return f"{name} fails with {type(failure).__name__}: {failure}"
        if error <= self.limit:
            return None
        return f"{name} differs by {error:.2g}, limit {self.limit}"  # NaN comes here too


def model_layer(module: str) -> tuple[str, str | int | None]:
    """Return the layer of the model that holds a module, and its shard if fused."""
    parent, _, last = module.rpartition(".")
    fused, shard = SHARDS.get(last, (last, None))
    return f"{parent}.{fused}" if parent else fused, shard


def _find_layer(model: Any, name: str) -> LinearBase | None:
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return None
    return layer if isinstance(layer, LinearBase) else None


def row_check(
    model: Any, packed: PackedModule, weight: torch.Tensor, layer: PackedLayer | None = None
) -> RowCheck | None:
    """Prepare the check of a module; None for one that is no linear layer of the model.

    `weight` is [rows, columns] float32 of the whole module, padded if the model's is. `layer` holds the
    module, if it has a kernel.
    """
    name, shard = model_layer(packed.name)
    module = _find_layer(model, name)
    if module is None:
        return None
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_ROWS, weight.shape[1], generator=generator, dtype=torch.float32).to(
        weight.device
    )
    columns = slice(None)
    if isinstance(module, RowParallelLinear):  # this rank's share of the input
        rank, num_ranks = get_group_rank_size(module.tp_group)
        width = weight.shape[1] // num_ranks
        own = slice(rank * width, (rank + 1) * width)
        inputs, weight = inputs[:, own], weight[:, own]
    elif shard is not None:
        rows, columns = _shares(module, shard, weight.shape[0])
        weight = weight[rows]
    kernel = None if layer is None else layer.kernel
    how = ("", WEIGHTS_ALONE) if kernel is None else (kernel.name, kernel.limit)
    expected = F.linear(inputs, weight)
    return RowCheck(packed.name, packed.scheme, module, columns, inputs, expected, *how)


def _shares(module: Any, shard: str | int, num_rows: int) -> tuple[slice, slice]:
    """Return this rank's rows of a shard, and their columns in the fused output."""
    rank, num_ranks = get_group_rank_size(module.tp_group)
    if isinstance(module, QKVParallelLinear):
        q_size, kv_size = module.q_proj_shard_size, module.kv_proj_shard_size
        start = {"q": 0, "k": q_size, "v": q_size + kv_size}[str(shard)]
        size = q_size if shard == "q" else kv_size
        rank = rank if shard == "q" else rank // module.num_kv_head_replicas
    else:
        size = num_rows // num_ranks
        start = size * int(shard)
    return slice(rank * size, (rank + 1) * size), slice(start, start + size)


@torch.no_grad()
def run_row_checks(checks: Iterable[RowCheck]) -> None:
    """Raise ValueError naming each module whose output is not that of its file's weights."""
    found = [(check, problem) for check in checks if (problem := check.problem()) is not None]
    if not found:
        return
    listed = "\n  - ".join(problem for _, problem in found)
    advice = ""
    if any(check.kernel for check, _ in found):
        advice = "\nWithout --speculative-draft-model-quantization packed, all layers are dequantized."
    raise ValueError(
        "DFLASH draft: quantized layers differ from the weights of their file; they were loaded or "
        f"multiplied wrongly:\n  - {listed}{advice}"
    )


def device_capability() -> tuple[int, int] | None:
    """Return the compute capability of the GPU that layers are made on, or None."""
    if torch.get_default_device().type != "cuda":
        return None
    return torch.cuda.get_device_capability()


def packed_layers_of(hf_config: Any) -> PackedLayers | None:
    """Return what gives a draft's layers their methods; None if all are dense or dequantized."""
    quantization, capability = quantization_of(hf_config), device_capability()
    if quantization is None or capability is None or not DFlashOptions.DRAFT_PACKED.get():
        return None
    return PackedLayers(quantization, capability)


def load_packed_modules(
    model: Any,
    packed: Sequence[PackedModule],
    load_dense: Callable[[PackedModule, torch.Tensor], torch.Tensor],
) -> list[RowCheck]:
    """Load packed modules, one layer of the model at a time. Return their checks.

    `load_dense` loads a module's weight [rows, columns] float32, and returns it as it was loaded.
    """
    by_layer: dict[str, list[PackedModule]] = {}
    for module in packed:
        by_layer.setdefault(model_layer(module.name)[0], []).append(module)
    checks = []
    layers = model.packed_layers.layers if model.packed_layers is not None else {}
    for name, modules in by_layer.items():
        layer = layers.get(name)
        parts = _parameters(layer, modules) if layer is not None and layer.kernel is not None else None
        for module in modules:
            weight = module.dequantize(model.norm.weight.device)
            if parts is None:
                weight = load_dense(module, weight)
            else:
                _load_parts(model, module, parts[module.name])
                _keep_context_rows(model, module, weight)
            check = row_check(model, module, weight, layer if parts is not None else None)
            checks += [] if check is None else [check]
    _report(packed, list(layers.values()))
    return checks


def _parameters(layer: PackedLayer, modules: Sequence[PackedModule]) -> dict[str, Parts] | None:
    """Return the parameters of each module of a layer, or make it dense: None."""
    assert layer.kernel is not None
    try:
        found = {
            module.name: parameter_parts(module.parts, module.scheme, layer.kernel.layout, module.rows)
            for module in modules
        }
        reason = fusion_problem(list(found.values()))
    except ValueError as error:
        found, reason = {}, str(error)
    if reason is None:
        return found
    layer.make_dense(reason)
    return None


def _load_parts(model: Any, module: PackedModule, parts: Parts) -> None:
    name, shard = model_layer(module.name)
    for part, tensor in parts.items():
        parameter: Any = model.get_parameter(f"{name}.{part}")
        parameter.weight_loader(parameter, tensor, *(() if shard is None else (shard,)))


def _keep_context_rows(model: Any, module: PackedModule, weight: torch.Tensor) -> None:
    """Keep this rank's K or V rows, which multiply the context."""
    name, shard = model_layer(module.name)
    if shard not in ("k", "v") or not model.needs_context_rows:
        return
    layer = model.get_submodule(name)
    rows, _ = _shares(layer, str(shard), weight.shape[0])
    attention = model.get_submodule(name.rpartition(".")[0])
    attention.context_rows[str(shard)] = weight[rows].to(layer.params_dtype)


def _report(packed: Sequence[PackedModule], layers: Sequence[PackedLayer]) -> None:
    """Log what runs packed, and in one warning what does not and why."""
    if not packed:
        return
    schemes = ", ".join(sorted({module.scheme.name for module in packed}))
    if not layers:
        logger.info("DFLASH draft: %d quantized layers (%s) are dequantized.", len(packed), schemes)
        return
    kernels = Counter(layer.kernel.name for layer in layers if layer.kernel is not None)
    if kernels:
        listed = ", ".join(f"{count} on {name}" for name, count in kernels.items())
        logger.info("DFLASH draft: quantized layers (%s) run packed: %s.", schemes, listed)
    reasons: dict[str, list[str]] = {}
    for layer in layers:
        if layer.kernel is None:
            reasons.setdefault(layer.reason, []).append(layer.name)
    if not reasons:
        return
    dense = {name for names in reasons.values() for name in names}
    size = sum(2 * m.rows * m.columns for m in packed if model_layer(m.name)[0] in dense) / 1e9
    listed = "; ".join(f"{reason}: {', '.join(names)}" for reason, names in reasons.items())
    logger.warning(
        "DFLASH draft: %d quantized layers are dequantized, to %.2f GB on all ranks. %s.",
        len(dense),
        size,
        listed,
    )


def hiding_draft_quantization() -> Callable[[Any], Any]:
    """Wrap SGLang's `ModelConfig._parse_quant_hf_config`: a draft of ours is dense to it."""
    original = ModelConfig._parse_quant_hf_config

    def _parse_quant_hf_config(self: Any) -> Any:
        return None if hasattr(self.hf_config, ATTRIBUTE) else original(self)

    return _parse_quant_hf_config
