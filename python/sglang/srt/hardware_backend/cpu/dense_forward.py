"""The forward of dense models on a CPU, in few operators and little Python.

SGLang's layers serve every device and every kind of parallelism. On a CPU the Python between their operators
takes as long as the products. `install` gives a model of packed layers a forward that has none of that, and
looks up positions once.

It computes what SGLang's layers compute, with fewer roundings: the sum of all layers stays in float32.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.aux_hidden_states import AuxHiddenStateList
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.models.llama import LlamaDecoderLayer, LlamaModel
from sglang.srt.models.qwen2 import Qwen2DecoderLayer, Qwen2Model
from sglang.srt.models.qwen3 import Qwen3DecoderLayer, Qwen3Model
from sglang.srt.runtime_context import get_exec, get_observability, get_parallel
from torch import nn
from torch.nn.functional import layer_norm, silu

from sglang_dflash.srt.hardware_backend.cpu.attention import full_attention
from sglang_dflash.srt.hardware_backend.cpu.packing import is_packed

# What a norm's input is multiplied with; see `Norm`.
_SIGNS = torch.tensor([[1.0], [-1.0]], dtype=torch.float32)
_TARGETS = {
    LlamaModel: LlamaDecoderLayer,
    Qwen2Model: Qwen2DecoderLayer,
    Qwen3Model: Qwen3DecoderLayer,
}


def install(model: nn.Module) -> bool:
    """Give a model the forward of this module, if its layers are what the forward computes.

    Returns:
        Whether they are. Others keep SGLang's forward: other families, quantized or float32 weights, several
        ranks, another position embedding, layers with hooks.
    """
    inner: Any = getattr(model, "model", None)
    if type(inner) not in _TARGETS or not _runs_alone() or _has_hooks():
        return False
    rotary = inner.layers[0].self_attn.rotary_emb
    if (
        not _rotates_all(rotary)
        or not _is_plain_norm(inner.norm)
        or not all(_is_dense(layer, inner) for layer in inner.layers)
    ):
        return False
    inner.forward = DenseForward(inner)
    return True


def _runs_alone() -> bool:
    """Tell whether one rank has the whole model, and rounds as it likes."""
    parallel = get_parallel()
    is_split = parallel.tp_size > 1 or parallel.pp_size > 1 or parallel.attn_dp_enabled
    return not is_split and get_exec().deterministic.rl_on_policy_target is None


def _has_hooks() -> bool:
    """Tell whether hooks are to run after modules, which this forward leaves out."""
    options = get_observability()
    return bool(options.forward_hooks) or options.debug_tensor_dump_output_folder is not None


def _is_dense(layer: Any, model: Any) -> bool:
    if type(layer) is not _TARGETS[type(model)]:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    products = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [norm for norm in _qk_norms(attention) if norm is not None]
    return (
        all(is_packed(product) for product in products)
        and all(_is_plain_norm(norm) for norm in norms)
        and type(mlp.act_fn) is SiluAndMul
        and attention.rotary_emb is model.layers[0].self_attn.rotary_emb
    )


def _qk_norms(attention: Any) -> tuple[Any, Any]:
    return getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)


def _is_plain_norm(norm: Any) -> bool:
    is_plain = type(norm) is RMSNorm and norm.weight.dtype == torch.bfloat16
    return is_plain and norm.variance_size_override is None and not norm.cast_x_before_out_mul


def _rotates_all(rotary: Any) -> bool:
    """Tell whether SGLang's own rotation of all dimensions by a table is meant."""
    is_plain = type(rotary).forward_native is RotaryEmbedding.forward_native and rotary.is_neox_style
    return is_plain and rotary.rotary_dim == rotary.head_size and not hasattr(rotary, "sin_cos_cache")


@dataclass(frozen=True, slots=True)
class Rotation:
    """Factors of the heads at a forward's positions, [n, 1, head_dim] each.

    Attributes:
        cos: cosines, for both halves of a head.
        sin: sines, negative for the first half, which takes its share from the second.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def at(cls, positions: torch.Tensor, rotary: Any, dtype: torch.dtype) -> "Rotation":
        """Look up positions, [n] int64."""
        cos, sin = rotary.cos_sin_cache.index_select(0, positions).to(dtype)[:, None].chunk(2, dim=-1)
        return cls(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate heads, [n, heads, head_dim]."""
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        return torch.addcmul(heads * self.cos, swapped, self.sin)


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A decoder layer: attention and a gated MLP, each behind a norm.

    Attributes:
        attn: SGLang's attention, which writes K and V.
        num_heads: query heads.
        num_normed: query and key heads, which are rotated.
        qk_norms: norms of queries and of keys; None if there are none.
    """

    input_norm: "Norm"
    qkv: Callable[[torch.Tensor], torch.Tensor]
    qk_norms: "tuple[Norm, Norm] | None"
    attn: Any
    output: Callable[[torch.Tensor], torch.Tensor]
    mlp_norm: "Norm"
    gate_up: Callable[[torch.Tensor], torch.Tensor]
    down: Callable[[torch.Tensor], torch.Tensor]
    num_heads: int
    num_normed: int
    head_dim: int

    @classmethod
    def of_module(cls, layer: Any) -> "DenseLayer":
        attention, mlp = layer.self_attn, layer.mlp
        norms = [norm for norm in _qk_norms(attention) if norm is not None]
        return cls(
            input_norm=Norm.of_module(layer.input_layernorm),
            qkv=_product(attention.qkv_proj),
            qk_norms=(Norm.of_module(norms[0]), Norm.of_module(norms[1])) if norms else None,
            attn=attention.attn,
            output=_product(attention.o_proj),
            mlp_norm=Norm.of_module(layer.post_attention_layernorm),
            gate_up=_product(mlp.gate_up_proj),
            down=_product(mlp.down_proj),
            num_heads=attention.num_heads,
            num_normed=attention.num_heads + attention.num_kv_heads,
            head_dim=attention.head_dim,
        )

    @property
    def norms(self) -> "tuple[Norm, ...]":
        return (self.input_norm, self.mlp_norm, *(self.qk_norms or ()))

    def run(self, total: torch.Tensor, rotation: Rotation, attend: Any, forward_batch: Any) -> None:
        """Add the layer's outputs to `total`, [n, hidden] float32."""
        qkv = self.qkv(self.input_norm.apply(total))
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        queries_keys = heads[:, : self.num_normed]
        if self.qk_norms is not None:
            parts = queries_keys.split((self.num_heads, self.num_normed - self.num_heads), dim=1)
            normed = [norm.apply(part) for part, norm in zip(parts, self.qk_norms, strict=True)]
            queries_keys = torch.cat(normed, dim=1)
        rotated = rotation.apply(queries_keys)
        q, k, v = rotated[:, : self.num_heads], rotated[:, self.num_heads :], heads[:, self.num_normed :]
        total.add_(self.output(attend(q, k, v, self.attn, forward_batch)))
        gate, up = self.gate_up(self.mlp_norm.apply(total)).chunk(2, dim=-1)
        total.add_(self.down(silu(gate).mul_(up)))


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm of the last dimension, by PyTorch's layer norm of x and -x, whose mean is zero.

    It is one operator. PyTorch's RMS norm takes seven on a CPU.

    Attributes:
        weights: [2, size] float32, the module's weight and ones, for the half that is thrown away.
    """

    module: Any
    weights: torch.Tensor
    eps: float

    @classmethod
    def of_module(cls, module: Any) -> "Norm":
        weights = torch.ones(2, module.weight.numel(), dtype=torch.float32)
        return cls(module, weights, module.variance_epsilon)

    def read_weight(self) -> None:
        self.weights[0].copy_(self.module.weight)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Norm x, [..., size]; the result is rounded to bfloat16."""
        both = x.unsqueeze(-2) * _SIGNS
        normed = layer_norm(both, self.weights.shape, self.weights, None, self.eps)
        return normed.select(-2, 0).to(torch.bfloat16)


def _product(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the product of a packed layer, without SGLang's module around it."""
    return functools.partial(module.quant_method.apply, module, bias=module.bias)


class DenseForward:
    """The forward of a target's model, in the place of SGLang's."""

    def __init__(self, model: Any):
        self._model = model
        self.layers = [DenseLayer.of_module(layer) for layer in model.layers]
        self._last_norm = Norm.of_module(model.norm)
        self._rotary = model.layers[0].self_attn.rotary_emb
        self._packed: Any = None
        self.read_norms()

    def read_norms(self) -> None:
        """Read the norms' weights again after an update, which packs all layers again."""
        packed = self._model.layers[0].self_attn.qkv_proj.quant_method.weight
        if self._packed is not packed:
            for norm in (self._last_norm, *(norm for layer in self.layers for norm in layer.norms)):
                norm.read_weight()
            self._packed = packed

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Run the model as SGLang's `forward` does, and return what it returns."""
        self.read_norms()
        embeddings = self._model.embed_tokens(input_ids) if input_embeds is None else input_embeds
        rotation = Rotation.at(positions, self._rotary, embeddings.dtype)
        attend = full_attention(get_attn_backend()).attend
        total, captured = embeddings.float(), AuxHiddenStateList()
        for index, layer in enumerate(self.layers):
            if index in self._model.layers_to_capture:
                captured.append(total.to(embeddings.dtype))
            layer.run(total, rotation, attend, forward_batch)
        hidden = self._last_norm.apply(total)
        return (hidden, captured) if captured else hidden
