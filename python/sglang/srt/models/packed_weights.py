"""Packed modules of a quantized draft, dequantized as they are loaded.

A wrong load of a quantized layer is not seen in the accept length: scales shifted by a group cost 6 % of it.
So each layer's output is compared with that of the file's own weights, for a few random rows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear

from sglang_dflash.srt.configs.draft_quantization import ATTRIBUTE, Scheme
from sglang_dflash.srt.layers.dequantize import dequantize

NUM_ROWS = 16
# Relative difference of outputs. Rounding to bfloat16 gives 0.003; scales shifted by a group, 0.19 and more.
LIMIT = 0.02

# Modules of a checkpoint that SGLang fuses: name in the checkpoint -> (name in the model, its part of it).
FUSED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


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

    module: of the model. columns: of the module's output. inputs: [NUM_ROWS, *] float32.
    """

    name: str
    scheme: Scheme
    module: Any
    columns: slice
    inputs: torch.Tensor
    expected: torch.Tensor

    def error(self) -> float:
        """Return the relative difference of the module's output."""
        dtype = self.module.weight.dtype if hasattr(self.module, "weight") else torch.bfloat16
        dtype = dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.bfloat16
        output = self.module.quant_method.apply(self.module, self.inputs.to(dtype))[:, self.columns]
        difference = (output.float() - self.expected).norm() / self.expected.norm().clamp(min=1e-30)
        return float(difference)


def row_check(model: Any, packed: PackedModule, weight: torch.Tensor) -> RowCheck | None:
    """Prepare the check of a module; None for one that is no linear layer of the model.

    weight: [rows, columns] float32 of the whole module, padded if the model's is.
    """
    parent, _, last = packed.name.rpartition(".")
    fused, part = FUSED.get(last, (last, None))
    try:
        module = model.get_submodule(f"{parent}.{fused}" if parent else fused)
    except AttributeError:
        return None
    if not isinstance(module, LinearBase):
        return None
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_ROWS, weight.shape[1], generator=generator).to(weight.device)
    columns = slice(None)
    if isinstance(module, RowParallelLinear):  # this rank's share of the input
        rank, num_ranks = get_group_rank_size(module.tp_group)
        width = weight.shape[1] // num_ranks
        own = slice(rank * width, (rank + 1) * width)
        inputs, weight = inputs[:, own], weight[:, own]
    elif part is not None:
        rank, num_ranks = get_group_rank_size(module.tp_group)
        if isinstance(module, QKVParallelLinear):
            q_size, kv_size = module.q_proj_shard_size, module.kv_proj_shard_size
            start = {"q": 0, "k": q_size, "v": q_size + kv_size}[str(part)]
            size = q_size if part == "q" else kv_size
            rank = rank if part == "q" else rank // module.num_kv_head_replicas
        else:
            size = weight.shape[0] // num_ranks
            start = size * int(part)
        weight, columns = weight[rank * size : (rank + 1) * size], slice(start, start + size)
    return RowCheck(packed.name, packed.scheme, module, columns, inputs, F.linear(inputs, weight))


@torch.no_grad()
def run_row_checks(checks: Iterable[RowCheck]) -> None:
    """Raise ValueError naming each module whose output is not that of its file's weights."""
    errors = [(check, check.error()) for check in checks]
    wrong = [(check, error) for check, error in errors if not error <= LIMIT]  # NaN is wrong too
    if wrong:
        listed = "\n  - ".join(
            f"{check.name} ({check.scheme.name}) differs by {error:.2g}" for check, error in wrong
        )
        raise ValueError(
            "DFLASH draft: quantized layers differ from the weights of their file by more than "
            f"{LIMIT}; they were loaded or multiplied wrongly:\n  - {listed}"
        )


def hiding_draft_quantization() -> Callable[[Any], Any]:
    """Wrap SGLang's `ModelConfig._parse_quant_hf_config`: a draft of ours is dense to it."""
    original = ModelConfig._parse_quant_hf_config

    def _parse_quant_hf_config(self: Any) -> Any:
        return None if hasattr(self.hf_config, ATTRIBUTE) else original(self)

    return _parse_quant_hf_config
