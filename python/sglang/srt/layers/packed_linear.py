"""Linear layers that multiply as their file stores them, by SGLang's methods.

SGLang's own choice of a method goes by names of modules, and quantizes activations of some files. Shapes that
its kernels do not take fail. Here each layer's method comes from the scheme that
`configs/draft_quantization.py` found. Weights alone are quantized except in FP8. A layer without a kernel is
dequantized with a reason. `models/packed_weights.py` compares each layer with its file at start-up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_dflash.srt.configs.draft_quantization import DraftQuantization, Scheme

Parts = dict[str, torch.Tensor]

# Relative difference from the dequantized weights' output that rounding explains. Measured with emulated
# activations: 0.003 of bfloat16 products, 0.026 of rows in FP8. Wrong scales give 0.19 and more.
WEIGHTS_ALONE, ROWS_IN_FP8 = 0.02, 0.06

FP8_BLOCK = (128, 128)  # rows and columns that share a scale

# A layer of the model -> the modules of a checkpoint that it fuses, with their shards.
FUSED: dict[str, dict[str, str | int]] = {
    "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
    "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One of SGLang's methods for layers of a scheme.

    Attributes:
        limit: of the start-up check.
        sglang_scheme: makes SGLang's object for one layer.
        layout: of the parameters' tensors.
        shape_problem: says why the kernel does not take a rank's share of a layer. Arguments are the layer's
            input size, the rank's input size, and the rank's output sizes.
    """

    name: str
    limit: float
    sglang_scheme: Callable[[], Any]
    layout: str
    shape_problem: Callable[[int, int, Sequence[int]], str | None]


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
        return Kernel("FP4 weights", WEIGHTS_ALONE, _nvfp4_scheme, "nvfp4", _marlin_problem(16))
    if scheme.layout in ("fp8", "modelopt-fp8"):
        return _fp8_kernel(scheme, capability)
    return f"SGLang has no kernel for {scheme.name}"


def _integer_kernel(scheme: Scheme) -> Kernel | str:
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

    def sglang_scheme() -> Any:
        from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

        return CompressedTensorsWNA16(
            scheme.strategy, scheme.bits, None if group < 0 else group, scheme.is_symmetric
        )

    return Kernel("Marlin", WEIGHTS_ALONE, sglang_scheme, "packed", _marlin_problem(group))


def _nvfp4_scheme() -> Any:
    from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A16Fp4

    return CompressedTensorsW4A16Fp4()


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
            return Kernel("FP8", ROWS_IN_FP8, make, "fp8 rows", _multiple_of(16, 16))
        make = partial(CompressedTensorsW8A16Fp8, "channel", is_static_input_scheme=False)
        return Kernel("Marlin FP8", WEIGHTS_ALONE, make, "fp8 rows", _marlin_problem(-1))
    if not is_native:
        return "blocks of FP8 need compute capability 8.9, this GPU has {}.{}".format(*capability)
    if scheme.block != FP8_BLOCK:
        return "the kernel takes blocks of {} by {}, not {} by {}".format(*FP8_BLOCK, *scheme.block)
    args = QuantizationArgs(**options, strategy="block", block_structure=list(scheme.block))
    make = partial(CompressedTensorsW8A8Fp8, args, is_static_input_scheme=False)
    return Kernel("FP8 in blocks", ROWS_IN_FP8, make, "fp8 blocks", _multiple_of(*FP8_BLOCK))


def _marlin_problem(group: int) -> Callable[[int, int, Sequence[int]], str | None]:
    def problem(inputs: int, own_inputs: int, own_outputs: Sequence[int]) -> str | None:
        from sglang.srt.layers.quantization.marlin_utils import (
            GPTQ_MARLIN_MIN_THREAD_K,
            GPTQ_MARLIN_MIN_THREAD_N,
        )

        size = inputs if group < 0 else group
        if size < inputs and own_inputs % size:
            return f"groups of {size} do not divide the {own_inputs} inputs of a rank"
        return _multiple_of(GPTQ_MARLIN_MIN_THREAD_K, GPTQ_MARLIN_MIN_THREAD_N, is_sum=True)(
            inputs, own_inputs, own_outputs
        )

    return problem


def _multiple_of(
    columns: int, rows: int, is_sum: bool = False
) -> Callable[[int, int, Sequence[int]], str | None]:
    def problem(_: int, own_inputs: int, own_outputs: Sequence[int]) -> str | None:
        if own_inputs % columns:
            return f"the kernel takes multiples of {columns} inputs, not {own_inputs}"
        for size in [sum(own_outputs)] if is_sum else own_outputs:
            if size % rows:
                return f"the kernel takes multiples of {rows} outputs, not {size}"
        return None

    return problem


@dataclass
class PackedLayer:
    """A linear layer with quantized modules in the file.

    `kernel` is the kernel that it runs on. None: it is dequantized, for the given `reason`.
    """

    name: str
    kernel: Kernel | None = None
    reason: str = ""
    _make_dense: Callable[[], None] | None = None

    def make_dense(self, reason: str) -> None:
        """Give the layer a dense weight in place of its packed parameters."""
        assert self._make_dense is not None
        self._make_dense()
        self.kernel, self.reason = None, reason


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
        shards: Mapping[str, str | int | None] = FUSED.get(last) or {last: None}
        modules = {f"{parent}.{name}" if parent else name: shard for name, shard in shards.items()}
        schemes = [self._quantization.scheme_of(module) for module in modules]
        if not any(schemes):
            return UnquantizedLinearMethod()
        found = self.layers[prefix] = PackedLayer(prefix)
        chosen: Kernel | str = "the modules that it fuses are stored differently"
        if schemes[0] is not None and all(scheme == schemes[0] for scheme in schemes):
            chosen = choose_kernel(schemes[0], self._capability, layer.params_dtype)
        return _ChoosingMethod(found, chosen)


class _ChoosingMethod(LinearMethodBase):
    """Method of a layer until its share of a rank, and so its kernel, is known."""

    def __init__(self, packed: PackedLayer, chosen: Kernel | str):
        self._packed, self._chosen = packed, chosen

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
        """Give the layer its method, and the parameters of that."""
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype
        chosen = self._chosen
        if isinstance(chosen, Kernel):
            share = input_size, input_size_per_partition, output_partition_sizes
            chosen = chosen.shape_problem(*share) or chosen

        dense = UnquantizedLinearMethod()
        if isinstance(chosen, str):
            self._packed.reason, layer.quant_method = chosen, dense
            dense.create_weights(layer, *sizes, **options)
            return

        def make_dense() -> None:
            names = [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]
            device = getattr(layer, names[0]).device
            for name in names:
                delattr(layer, name)
            layer.quant_method, layer.scheme = dense, None
            with device:
                dense.create_weights(layer, *sizes, **options)

        from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
            CompressedTensorsLinearMethod,
        )

        self._packed.kernel, self._packed._make_dense = chosen, make_dense
        layer.scheme = chosen.sglang_scheme()
        # All that SGLang's loaders read of the method's config, for scales of blocks.
        config: Any = SimpleNamespace(weight_block_size=list(FP8_BLOCK))
        layer.quant_method = CompressedTensorsLinearMethod(config)
        loader = getattr(layer, "weight_loader_v2", None) or options["weight_loader"]
        layer.quant_method.create_weights(layer, *sizes, **{**options, "weight_loader": loader})

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        raise AssertionError("create_weights gives the layer another method")


def parameter_parts(parts: Mapping[str, torch.Tensor], scheme: Scheme, layout: str, rows: int) -> Parts:
    """Return a module's tensors as the parameters of a kernel's layout take them.

    `parts` are the file's tensors, by the last part of their names. `rows` is the number of rows of the
    weight.

    Raises:
        ValueError: the tensors do not fit the layout. The message says why.
    """
    if layout == "packed":
        names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
        return {name: parts[name] for name in names if name in parts}
    if layout == "nvfp4":
        packed, divisor = parts.get("weight_packed", parts.get("weight")), parts.get("weight_global_scale")
        if divisor is None:  # ModelOpt's is the factor
            divisor = 1 / parts["weight_scale_2"].float()
        assert packed is not None
        return {
            "weight_packed": packed,
            "weight_scale": parts["weight_scale"],
            "weight_global_scale": divisor.reshape(1),
        }
    scale = parts[scheme.scale].float()
    scale = scale[:, 0, :, 0] if scale.ndim == 4 else scale  # ModelOpt's blocks
    are_blocks = scale.ndim == 2 and (scale.shape[1] > 1 or scale.shape[0] not in (1, rows))
    if layout == "fp8 rows":
        if are_blocks:
            raise ValueError("its scales are of blocks, though its config names none")
        return {"weight": parts["weight"], "weight_scale": scale.reshape(-1, 1).expand(rows, 1)}
    if scale.ndim != 2:
        raise ValueError("its scales are not of blocks, though its config names blocks")
    return {"weight": parts["weight"], "weight_scale": scale}


def fusion_problem(modules: Sequence[Parts]) -> str | None:
    """Say why modules, as parameters of one layer, cannot be fused, or return None."""
    scales = [parts["weight_global_scale"] for parts in modules if "weight_global_scale" in parts]
    if any(not torch.equal(scale, scales[0]) for scale in scales):
        return "the modules that it fuses have different global scales, and the kernel takes one"
    return None
