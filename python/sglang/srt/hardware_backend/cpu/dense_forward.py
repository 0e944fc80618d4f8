"""The forward of dense models on a CPU, in few operators and little Python.

SGLang's layers serve every device and every kind of parallelism. On a CPU the Python between their operators
takes as long as the products. `install` gives a model of reordered layers a forward that has none of that,
and looks up positions once.

It computes what SGLang's layers compute, with fewer roundings: the sum of all layers stays in float32.
"""

import functools
from collections.abc import Callable
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
from torch.nn.functional import silu

from sglang_dflash.srt.layers.attention.ragged_rows import full_attention
from sglang_dflash.srt.layers.plain_weight import is_reordered

_TARGETS = {
    LlamaModel: LlamaDecoderLayer,
    Qwen2Model: Qwen2DecoderLayer,
    Qwen3Model: Qwen3DecoderLayer,
}


def install(model: nn.Module) -> None:
    """Give a model the forward of this module, if its layers are what the forward computes.

    Others keep SGLang's: other families, quantized or float32 weights, several ranks, another position
    embedding, layers with hooks.
    """
    inner: Any = getattr(model, "model", None)
    if type(inner) not in _TARGETS or not _runs_alone() or _has_hooks():
        return
    is_plain = _rotates_all(inner.layers[0].self_attn.rotary_emb) and _is_plain_norm(inner.norm)
    if is_plain and all(_is_dense(layer, inner) for layer in inner.layers):
        inner.forward = DenseForward(inner)


def _runs_alone() -> bool:
    """Return whether one rank has the whole model, and may round differently."""
    parallel = get_parallel()
    is_split = parallel.tp_size > 1 or parallel.pp_size > 1 or parallel.attn_dp_enabled
    return not is_split and get_exec().deterministic.rl_on_policy_target is None


def _has_hooks() -> bool:
    """Return whether hooks are to run after modules, which this forward leaves out."""
    options = get_observability()
    return bool(options.forward_hooks) or options.debug_tensor_dump_output_folder is not None


def _is_dense(layer: Any, model: Any) -> bool:
    if type(layer) is not _TARGETS[type(model)]:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    products = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    norms = layer.input_layernorm, layer.post_attention_layernorm, *_qk_norms(attention)
    return (
        all(is_reordered(product) for product in products)
        and all(_is_plain_norm(norm) for norm in norms)
        and type(mlp.act_fn) is SiluAndMul
        and attention.rotary_emb is model.layers[0].self_attn.rotary_emb
    )


def _qk_norms(attention: Any) -> list[Any]:
    """List the norms of queries and of keys, if there are any."""
    return [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]


def _is_plain_norm(norm: Any) -> bool:
    is_plain = type(norm) is RMSNorm and norm.weight.dtype == torch.bfloat16
    return is_plain and norm.variance_size_override is None and not norm.cast_x_before_out_mul


def _rotates_all(rotary: Any) -> bool:
    """Return whether SGLang's own rotation of all dimensions by a table is meant."""
    is_plain = type(rotary).forward_native is RotaryEmbedding.forward_native and rotary.is_neox_style
    return is_plain and rotary.rotary_dim == rotary.head_size and not hasattr(rotary, "sin_cos_cache")


class Rotation:
    """Rotation of heads at a forward's positions.

    Attributes:
        cos: [n, 1, head_dim], cosines, for both halves of a head.
        sin: [n, 1, head_dim], sines, negative for the first half, which takes its share from the second.
    """

    def __init__(self, positions: torch.Tensor, rotary: Any, dtype: torch.dtype):
        cos, sin = rotary.cos_sin_cache.index_select(0, positions).to(dtype)[:, None].chunk(2, dim=-1)
        self.cos, self.sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def apply(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate heads, [n, heads, head_dim]."""
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        return torch.addcmul(heads * self.cos, swapped, self.sin)


class Norm:
    """RMS norm of the last dimension, in float32.

    For a few rows it stays on one thread: waking the others takes longer than the arithmetic.
    """

    def __init__(self, module: Any):
        self._module, self._eps = module, torch.tensor(module.variance_epsilon)
        self._weight = torch.empty_like(module.weight, dtype=torch.float32)

    def read_weight(self) -> None:
        self._weight.copy_(self._module.weight)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """Norm x, [..., size]; the result is rounded to bfloat16."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self._weight).to(torch.bfloat16)


class DenseLayer:
    """A decoder layer: attention and a gated MLP, each behind a norm."""

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self.input_norm, self.mlp_norm = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self._qk_norms = [Norm(norm) for norm in _qk_norms(attention)]
        self.norms = [self.input_norm, self.mlp_norm, *self._qk_norms]
        self._qkv, self._output = _product(attention.qkv_proj), _product(attention.o_proj)
        self._gate_up, self._down = _product(mlp.gate_up_proj), _product(mlp.down_proj)
        self._attention = attention.attn  # SGLang's, which writes K and V
        self._num_heads, self._num_kv_heads = attention.num_heads, attention.num_kv_heads
        self._head_dim = attention.head_dim

    def run(self, total: torch.Tensor, rotation: Rotation, attend: Any, forward_batch: Any) -> None:
        """Add the layer's outputs to `total`, [n, hidden] float32."""
        heads = self._qkv(self.input_norm.apply(total)).view(len(total), -1, self._head_dim)
        num_rotated = self._num_heads + self._num_kv_heads
        queries_keys, v = heads[:, :num_rotated], heads[:, num_rotated:]
        if self._qk_norms:
            parts = queries_keys.split((self._num_heads, self._num_kv_heads), dim=1)
            normed = [norm.apply(part) for part, norm in zip(parts, self._qk_norms, strict=True)]
            queries_keys = torch.cat(normed, dim=1)
        q, k = rotation.apply(queries_keys).split((self._num_heads, self._num_kv_heads), dim=1)
        attended = attend(q, k=k, v=v, layer=self._attention, forward_batch=forward_batch)
        total.add_(self._output(attended))
        gate, up = self._gate_up(self.mlp_norm.apply(total)).chunk(2, dim=-1)
        total.add_(self._down(silu(gate).mul_(up)))


def _product(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the product of a reordered layer, without SGLang's module around it."""
    return functools.partial(module.quant_method.apply, module, bias=module.bias)


class DenseForward:
    """The forward of a target's model, in the place of SGLang's."""

    def __init__(self, model: Any):
        self._model = model
        self.layers = [DenseLayer(layer) for layer in model.layers]
        self._last_norm = Norm(model.norm)
        self._rotary = model.layers[0].self_attn.rotary_emb
        self._reordered: Any = None
        self.read_norms()

    def read_norms(self) -> None:
        """Read the norms' weights again after an update, which reorders all layers again."""
        reordered = self._model.layers[0].self_attn.qkv_proj.quant_method.reordered
        if self._reordered is not reordered:
            for norm in (self._last_norm, *(norm for layer in self.layers for norm in layer.norms)):
                norm.read_weight()
            self._reordered = reordered

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
        rotation = Rotation(positions, self._rotary, embeddings.dtype)
        attend = full_attention(get_attn_backend()).attend
        total, captured = embeddings.float(), AuxHiddenStateList()
        for index, layer in enumerate(self.layers):
            if index in self._model.layers_to_capture:
                captured.append(total.to(embeddings.dtype))
            layer.run(total, rotation, attend, forward_batch)
        hidden = self._last_norm.apply(total)
        return (hidden, captured) if captured else hidden
