"""Which tensors a draft checkpoint holds, in which shapes, and how they get into the draft model."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.runtime_context import get_parallel

# Checkpoint tensors that SGLang keeps in one: name in the checkpoint -> (name in the model, which part of it).
_FUSED = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
# What the training library keeps of the target for itself.
_IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")


def load_checkpoint(model, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Load every tensor of a checkpoint into a BlockDraftModel; returns the names of the parameters loaded.

    Raises ValueError naming every tensor that is missing, unknown or of another shape.
    """
    tensors = {name.removeprefix("model."): tensor for name, tensor in weights}
    tensors = {name: t for name, t in tensors.items() if name not in _IGNORED and "rotary_emb." not in name}
    if not model.draft.has_own_vocabulary:
        tensors.pop("d2t", None)  # the identity
    if model.norm.weight.is_cpu:
        _pad_to_rounded_width(tensors, model.config.intermediate_size)
    expected = checkpoint_shapes(model)
    optional = _vocabulary_shapes(model.draft)
    required = set(expected) | set(optional if model.draft.has_own_vocabulary else ()) - {"embed_tokens.weight"}
    expected |= optional
    problems = [f"{name}: this draft has no such tensor" for name in tensors if name not in expected]
    problems += [f"{name}: missing" for name in sorted(required - set(tensors))]
    # SGLang's loaders cut or pad a tensor of another size rather than refuse it.
    problems += [
        f"{name} is {tuple(tensor.shape)}, expected {expected[name]}"
        for name, tensor in tensors.items()
        if name in expected and tuple(tensor.shape) != expected[name]
    ]
    if not problems:
        problems += _take_vocabulary_mapping(model, tensors.pop("d2t", None))
    if problems:
        raise ValueError("DFLASH draft weights do not match its config:\n  - " + "\n  - ".join(problems))
    _make_room_for_vocabulary(model, tensors)
    params = dict(model.named_parameters())
    for name, tensor in tensors.items():
        part = next((p for p in _FUSED if f".{p}." in name), None)
        param, shard = (params[name], ()) if part is None else (params[name.replace(part, _FUSED[part][0])], (_FUSED[part][1],))
        getattr(param, "weight_loader", default_weight_loader)(param, tensor, *shard)
    return set(params)


def _pad_to_rounded_width(tensors: dict[str, torch.Tensor], inner: int) -> None:
    """On a CPU SGLang rounds a config's `intermediate_size` up, to 32 for each rank: the MLP gets rows of zeros, which add
    nothing."""
    rounding = 32 * get_parallel().tp_size
    of_width = {}  # name -> (dimension that is as long as the MLP is wide, its length)
    for name, tensor in tensors.items():
        if ".mlp." in name and tensor.ndim == 2:
            dim = 1 if name.endswith("down_proj.weight") else 0
            of_width[name] = dim, tensor.shape[dim]
    widths = {width for _, width in of_width.values()}
    if inner % rounding or len(widths) != 1 or not 0 < inner - min(widths) < rounding:
        return
    for name, (dim, width) in of_width.items():
        tensors[name] = F.pad(tensors[name], (0, inner - width) if dim else (0, 0, 0, inner - width))


def checkpoint_shapes(model) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint must hold and its shape, before any fusing or tensor-parallel split."""
    hidden = model.config.hidden_size
    shapes = {
        "fc.weight": (hidden, model.draft.aux_width),
        "norm.weight": (hidden,),
        **model.own_shapes(),
    }
    for i, layer in enumerate(model.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(model.config, layer).items()}
    return shapes


def _layer_shapes(config, layer) -> dict[str, tuple[int, ...]]:
    attention, hidden, inner = layer.self_attn, config.hidden_size, config.intermediate_size
    head_dim, wide = attention.head_dim, attention.input_size
    q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes = {
        "self_attn.q_proj.weight": (q_size, wide),
        "self_attn.k_proj.weight": (kv_size, wide),
        "self_attn.v_proj.weight": (kv_size, wide),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if attention.q_norm is not None:
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    if attention.qkv_proj.bias is not None:
        shapes |= {f"self_attn.{p}_proj.bias": (size,) for p, size in zip("qkv", (q_size, kv_size, kv_size))}
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if hasattr(layer, "hidden_norm"):
        shapes["hidden_norm.weight"] = (hidden,)
    return shapes


def _vocabulary_shapes(draft) -> dict[str, tuple[int, ...]]:
    """What a checkpoint may bring of its own; required, but for the embedding, where its vocabulary is reduced."""
    shapes = {
        "embed_tokens.weight": (draft.vocab_size, draft.hidden_size),
        "lm_head.weight": (draft.draft_vocab_size, draft.hidden_size),
    }
    return shapes | ({"d2t": (draft.draft_vocab_size,)} if draft.has_own_vocabulary else {})


def _take_vocabulary_mapping(model, d2t: torch.Tensor | None) -> list[str]:
    """Keep `d2t`, the offsets from draft ids to target ids. Returns what is wrong with it."""
    if d2t is None:
        return []
    target_ids = d2t.long() + torch.arange(d2t.numel(), device=d2t.device)
    if target_ids.min() < 0 or target_ids.max() >= model.draft.vocab_size:
        return [f"d2t points outside the target's vocabulary of {model.draft.vocab_size} tokens"]
    model.d2t = d2t.to(device=model.norm.weight.device, dtype=torch.int64)
    return []


def _make_room_for_vocabulary(model, tensors: dict[str, torch.Tensor]) -> None:
    draft, like = model.draft, model.norm.weight
    if "embed_tokens.weight" in tensors and model.embed_tokens is None:
        model.embed_tokens = VocabParallelEmbedding(draft.vocab_size, draft.hidden_size).to(like.device, like.dtype)
    if "lm_head.weight" in tensors and model.lm_head is None:
        model.lm_head = ParallelLMHead(draft.draft_vocab_size, draft.hidden_size).to(like.device, like.dtype)
