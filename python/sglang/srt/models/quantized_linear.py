"""Linear layers that a draft's file stores quantized: a check that they were loaded right.

They are dequantized at load. A wrong load is not seen in the accept length: scales shifted by a group cost
6 % of it. So each layer's output is compared with that of the file's own weights, for a few random rows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear

from sglang_dflash.srt.configs.quantization import ATTRIBUTE, Scheme
from sglang_dflash.srt.layers.dequantize import QuantizedModule
from sglang_dflash.srt.patching import WORKER, patches

# Relative difference of outputs that the rounding of bfloat16 explains: 0.003 was measured. Wrong scales give
# 0.19 and more.
LIMIT = 0.02
NUM_ROWS = 16  # of a check

# A module of a checkpoint -> the layer of the model that fuses it with others, and its shard there.
SHARDS: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


@dataclass(frozen=True)
class RowCheck:
    """Expected output [NUM_ROWS, *] float32 of this rank's share of a module.

    Attributes:
        module: of the model.
        columns: of the module's output.
        inputs: [NUM_ROWS, *] float32.
    """

    name: str
    scheme: Scheme
    module: Any
    columns: slice
    inputs: torch.Tensor
    expected: torch.Tensor

    def problem(self) -> str | None:
        """Return why the module may not serve, or None."""
        inputs = self.inputs.to(self.module.params_dtype)
        output = self.module.quant_method.apply(self.module, inputs)[:, self.columns]
        error = float((output.float() - self.expected).norm() / self.expected.norm().clamp(min=1e-30))
        if error <= LIMIT:
            return None
        return f"{self.name} ({self.scheme.name}) differs by {error:.2g}, limit {LIMIT}"  # NaN comes here too


def model_layer(module: str) -> tuple[str, str | int | None]:
    """Return the layer of the model that holds a module, and its shard if fused."""
    parent, _, last = module.rpartition(".")
    fused, shard = SHARDS.get(last, (last, None))
    return f"{parent}.{fused}" if parent else fused, shard


def row_check(model: Any, quantized: QuantizedModule, weight: torch.Tensor) -> RowCheck | None:
    """Prepare the check of a module; None for one that is no linear layer of the model.

    `weight` is [rows, columns] float32 of the whole module, padded if the model's is.
    """
    name, shard = model_layer(quantized.name)
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    if not isinstance(module, LinearBase):
        return None
    generator, columns = torch.Generator().manual_seed(0), slice(None)
    inputs = torch.randn(NUM_ROWS, weight.shape[1], generator=generator, dtype=torch.float32)
    inputs = inputs.to(weight.device)
    if isinstance(module, RowParallelLinear):  # this rank's share of the input
        rank, num_ranks = get_group_rank_size(module.tp_group)
        width = weight.shape[1] // num_ranks
        own = slice(rank * width, (rank + 1) * width)
        inputs, weight = inputs[:, own], weight[:, own]
    elif shard is not None:
        rows, columns = _rank_share(module, shard, weight.shape[0])
        weight = weight[rows]
    expected = F.linear(inputs, weight)
    return RowCheck(
        quantized.name,
        scheme=quantized.scheme,
        module=module,
        columns=columns,
        inputs=inputs,
        expected=expected,
    )


def _rank_share(module: Any, shard: str | int, num_rows: int) -> tuple[slice, slice]:
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
    problems = [problem for check in checks if (problem := check.problem()) is not None]
    if problems:
        raise ValueError(
            "DFLASH draft: quantized layers differ from the weights of their file; they were loaded or "
            "multiplied wrongly:\n  - " + "\n  - ".join(problems)
        )


@patches(
    "sglang.srt.configs.model_config.ModelConfig._parse_quant_hf_config",
    at=WORKER,
    signature="(self)",
    feature="quantized drafts",
    upstream="https://github.com/sgl-project/sglang/issues/39087",
)
def parse_quant_config(original: Callable[[Any], Any], config: Any) -> Any:
    """Call a draft that we dequantize dense, as SGLang lacks kernels for some."""
    return None if hasattr(config.hf_config, ATTRIBUTE) else original(config)
