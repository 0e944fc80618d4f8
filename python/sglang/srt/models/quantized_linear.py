"""Linear layers that multiply as their file stores them, by SGLang's methods.

SGLang's own choice of a method goes by names of modules, and quantizes activations of some files. Shapes that
its kernels do not take fail. Here each layer's method comes from the scheme that `configs/quantization.py`
found. Weights alone are quantized except in FP8. A layer without a kernel is dequantized with a reason.

A wrong load of a quantized layer is not seen in the accept length: scales shifted by a group cost 6 % of it.
So each layer's output is compared with that of the file's own weights, for a few random rows.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_dflash.srt.configs.quantization import ATTRIBUTE, DraftQuantization, Scheme, quantization_of
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.layers.dequantize import PackedModule

# Relative difference from the dequantized weights' output that rounding explains. Measured with emulated
# activations: 0.003 of bfloat16 products, 0.026 of rows in FP8. Wrong scales give 0.19 and more.
WEIGHTS_ALONE, ROWS_IN_FP8 = 0.02, 0.06
NUM_ROWS = 16  # of a check

FP8_BLOCK = (128, 128)  # rows and columns that share a scale

# A layer of the model -> the modules of a checkpoint that it fuses, with their shards.
FUSED: dict[str, dict[str, str | int]] = {
    "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
}
# The same by module of the checkpoint: (layer of the model, shard).
SHARDS = {module: (fused, shard) for fused, modules in FUSED.items() for module, shard in modules.items()}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One of SGLang's methods for layers of a scheme.

    Attributes:
        limit: of the start-up check.
        sglang_scheme: makes SGLang's object for one layer.
        layout: of the parameters' tensors.
        multiples: divisors of a rank's inputs and outputs.
        group: inputs that share a scale; -1 if all do.
        fuses_outputs: whether the outputs of fused modules count together.
    """

    name: str
    limit: float
    sglang_scheme: Callable[[], Any]
    layout: str
    multiples: tuple[int, int]
    group: int = -1
    fuses_outputs: bool = False

    def shape_problem(self, inputs: int, own_inputs: int, own_outputs: Sequence[int]) -> str | None:
        """Say why the kernel does not take a rank's share of a layer, or return None.

        Args:
            inputs: the layer's input size.
            own_inputs: the rank's.
            own_outputs: the rank's output size of each fused module.
        """
        if 0 < self.group < inputs and own_inputs % self.group:
            return f"groups of {self.group} do not divide the {own_inputs} inputs of a rank"
        columns, rows = self.multiples
        if own_inputs % columns:
            return f"the kernel takes multiples of {columns} inputs, not {own_inputs}"
        for size in [sum(own_outputs)] if self.fuses_outputs else own_outputs:
            if size % rows:
                return f"the kernel takes multiples of {rows} outputs, not {size}"
        return None


def choose_kernel(scheme: Scheme, capability: tuple[int, int] | None, dtype: torch.dtype) -> Kernel | str:
    """Return the kernel for layers of a scheme, or why there is none.

    `capability` is the GPU's compute capability, or None on another device. `dtype` is that of activations.
    """
    if capability is None:
        return "this device has no kernels for quantized layers"
    if capability < (8, 0):
        return "kernels need compute capability 8.0, this GPU has {}.{}".format(*capability)
    if dtype not in (torch.bfloat16, torch.float16):
        return f"kernels take bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if scheme.layout == "packed":
        return _integer_kernel(scheme)
    if scheme.layout in ("nvfp4", "modelopt-nvfp4"):
        if scheme.group != 16:
            return f"the kernel takes groups of 16, not {scheme.group}"
        from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A16Fp4

        return _marlin("FP4 weights", CompressedTensorsW4A16Fp4, "nvfp4", 16)
    if scheme.layout in ("fp8", "modelopt-fp8"):
        return _fp8_kernel(scheme, capability)
    return f"SGLang has no kernel for {scheme.name}"


def _marlin(name: str, sglang_scheme: Callable[[], Any], layout: str, group: int) -> Kernel:
    from sglang.srt.layers.quantization.marlin_utils import GPTQ_MARLIN_MIN_THREAD_K, GPTQ_MARLIN_MIN_THREAD_N

    multiples = GPTQ_MARLIN_MIN_THREAD_K, GPTQ_MARLIN_MIN_THREAD_N
    return Kernel(name, WEIGHTS_ALONE, sglang_scheme, layout, multiples, group, fuses_outputs=True)


def _integer_kernel(scheme: Scheme) -> Kernel | str:
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16
    from sglang.srt.layers.quantization.marlin_utils import MARLIN_SUPPORTED_GROUP_SIZES

    group = scheme.group if scheme.strategy == "group" else -1
    if scheme.has_order:
        return "the kernel takes one order of columns for layers that are fused"
    if scheme.strategy not in ("group", "channel"):
        return f"the kernel takes scales per group or channel, not per {scheme.strategy}"
    if group not in MARLIN_SUPPORTED_GROUP_SIZES:
        return f"the kernel takes no groups of {group}"
    if scheme.bits == 8 and not scheme.is_symmetric:
        return "the kernel takes zero points of 4 bits, not of 8"
    arguments = scheme.strategy, scheme.bits, None if group < 0 else group, scheme.is_symmetric
    return _marlin("Marlin", partial(CompressedTensorsWNA16, *arguments), "packed", group)


def _fp8_kernel(scheme: Scheme, capability: tuple[int, int]) -> Kernel | str:
    from compressed_tensors.quantization import QuantizationArgs
    from sglang.srt.layers.quantization.compressed_tensors.schemes import (
        CompressedTensorsW8A8Fp8,
        CompressedTensorsW8A16Fp8,
    )

    is_native, options = capability >= (8, 9), dict(num_bits=8, type="float", symmetric=True)
    if scheme.strategy != "block":
        # One scale of a tensor becomes one per row: fused layers with different scales stay exact.
        args = QuantizationArgs(**options, strategy="channel")
        if is_native:
            make = partial(CompressedTensorsW8A8Fp8, args, is_static_input_scheme=False)
            return Kernel("FP8", ROWS_IN_FP8, make, "fp8 rows", (16, 16))
        make = partial(CompressedTensorsW8A16Fp8, "channel", is_static_input_scheme=False)
        return _marlin("Marlin FP8", make, "fp8 rows", -1)
    if not is_native:
        return "blocks of FP8 need compute capability 8.9, this GPU has {}.{}".format(*capability)
    if scheme.block != FP8_BLOCK:
        return "the kernel takes blocks of {} by {}, not {} by {}".format(*FP8_BLOCK, *scheme.block)
    args = QuantizationArgs(**options, strategy="block", block_structure=list(scheme.block))
    make = partial(CompressedTensorsW8A8Fp8, args, is_static_input_scheme=False)
    return Kernel("FP8 in blocks", ROWS_IN_FP8, make, "fp8 blocks", FP8_BLOCK)


class PackedLayer(LinearMethodBase):
    """A linear layer with quantized modules in the file, and its first method.

    Attributes:
        name: in the model.
        kernel: the kernel that it runs on. None: it is dequantized, for the given `reason`.
    """

    def __init__(self, name: str, chosen: Kernel | str):
        self.name, self._chosen = name, chosen
        self.kernel: Kernel | None = None
        self.reason = ""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **options: Any,
    ) -> None:
        """Give the layer its last method, by its share of a rank, and parameters."""
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype
        chosen = self._chosen
        if isinstance(chosen, Kernel):
            share = input_size, input_size_per_partition, output_partition_sizes
            chosen = chosen.shape_problem(*share) or chosen

        def create_dense() -> None:
            layer.quant_method = UnquantizedLinearMethod()
            layer.quant_method.create_weights(layer, *sizes, **options)

        if isinstance(chosen, str):
            self.reason = chosen
            create_dense()
            return
        from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
            CompressedTensorsLinearMethod,
        )

        self.kernel, self._layer, self._create_dense = chosen, layer, create_dense
        layer.scheme = chosen.sglang_scheme()
        # All that SGLang's loaders read of the method's config, for scales of blocks.
        config: Any = SimpleNamespace(weight_block_size=list(FP8_BLOCK))
        layer.quant_method = CompressedTensorsLinearMethod(config)
        loader = getattr(layer, "weight_loader_v2", None) or options["weight_loader"]
        layer.quant_method.create_weights(layer, *sizes, **{**options, "weight_loader": loader})

    def make_dense(self, reason: str) -> None:
        """Give the layer a dense weight in place of its packed parameters."""
        layer = self._layer
        names = [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]
        device = getattr(layer, names[0]).device
        for name in names:
            delattr(layer, name)
        layer.scheme = None
        with device:
            self._create_dense()
        self.kernel, self.reason = None, reason

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        raise AssertionError("create_weights gives the layer another method")


class PackedLayers:
    """Quantization config of SGLang's linear layers: it gives each its method.

    Attributes:
        layers: layers with quantized modules, by name in the model.
    """

    def __init__(self, quantization: DraftQuantization, capability: tuple[int, int] | None):
        self.layers: dict[str, PackedLayer] = {}
        self._quantization, self._capability = quantization, capability

    @property
    def has_kernels(self) -> bool:
        """Return True if a layer keeps its packed weight."""
        return any(layer.kernel is not None for layer in self.layers.values())

    def get_quant_method(self, layer: LinearBase, prefix: str) -> LinearMethodBase:
        """Return the method of a layer that is being made."""
        parent, _, last = prefix.rpartition(".")
        modules = [f"{parent}.{name}" if parent else name for name in FUSED.get(last) or (last,)]
        schemes = [self._quantization.scheme_of(module) for module in modules]
        if not any(schemes):
            return UnquantizedLinearMethod()
        chosen: Kernel | str = "the modules that it fuses are stored differently"
        if schemes[0] is not None and all(scheme == schemes[0] for scheme in schemes):
            chosen = choose_kernel(schemes[0], self._capability, layer.params_dtype)
        self.layers[prefix] = PackedLayer(prefix, chosen)
        return self.layers[prefix]


@dataclass(frozen=True)
class RowCheck:
    """Expected output [NUM_ROWS, *] float32 of this rank's share of a module.

    Attributes:
        module: of the model.
        columns: of the module's output.
        inputs: [NUM_ROWS, *] float32.
        kernel: of the module; None if it is dequantized.
    """

    name: str
    scheme: Scheme
    module: Any
    columns: slice
    inputs: torch.Tensor
    expected: torch.Tensor
    kernel: Kernel | None

    def problem(self) -> str | None:
        """Say why the module may not serve, or return None."""
        stored, limit = self.scheme.name, WEIGHTS_ALONE
        if self.kernel is not None:
            stored, limit = f"{stored}, {self.kernel.name}", self.kernel.limit
        inputs = self.inputs.to(self.module.params_dtype)
        try:
            output = self.module.quant_method.apply(self.module, inputs)[:, self.columns]
            difference = (output.float() - self.expected).norm() / self.expected.norm().clamp(min=1e-30)
            error = float(difference)
        except Exception as failure:  # a kernel refuses a layer in its own way
            return f"{self.name} ({stored}) fails with {type(failure).__name__}: {failure}"
        if error <= limit:
            return None
        return f"{self.name} ({stored}) differs by {error:.2g}, limit {limit}"  # NaN comes here too


def model_layer(module: str) -> tuple[str, str | int | None]:
    """Return the layer of the model that holds a module, and its shard if fused."""
    parent, _, last = module.rpartition(".")
    fused, shard = SHARDS.get(last, (last, None))
    return f"{parent}.{fused}" if parent else fused, shard


def row_check(
    model: Any, packed: PackedModule, weight: torch.Tensor, kernel: Kernel | None
) -> RowCheck | None:
    """Prepare the check of a module; None for one that is no linear layer of the model.

    `weight` is [rows, columns] float32 of the whole module, padded if the model's is. `kernel` is that of the
    layer that holds the module; None if it is dequantized.
    """
    name, shard = model_layer(packed.name)
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
        rows, columns = rank_share(module, shard, weight.shape[0])
        weight = weight[rows]
    expected = F.linear(inputs, weight)
    return RowCheck(packed.name, packed.scheme, module, columns, inputs, expected, kernel)


def rank_share(module: Any, shard: str | int, num_rows: int) -> tuple[slice, slice]:
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


def hiding_draft_quantization() -> Callable[[Any], Any]:
    """Wrap SGLang's `ModelConfig._parse_quant_hf_config`: a draft of ours is dense to it."""
    original = ModelConfig._parse_quant_hf_config

    def _parse_quant_hf_config(self: Any) -> Any:
        return None if hasattr(self.hf_config, ATTRIBUTE) else original(self)

    return _parse_quant_hf_config
