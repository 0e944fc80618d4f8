"""Loading of a draft checkpoint's tensors, which `configs/draft_tensors.py` lists."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_loader.weight_utils import default_weight_loader

from sglang_dflash.srt.configs.draft_tensors import d2t_problems, is_ignored, tensor_problems

# Checkpoint tensors that SGLang fuses: name in the checkpoint -> (name in the model, its part of it).
_FUSED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def load_checkpoint(model, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    """Load a checkpoint, or raise ValueError with all problems; return parameter names."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in weights}
    tensors = {name: t for name, t in tensors.items() if not is_ignored(name)}
    if not model.draft.has_own_vocabulary:
        tensors.pop("d2t", None)  # the identity
    if model.norm.weight.is_cpu:
        _pad_to_rounded_width(tensors, model.config.intermediate_size, model.num_ranks)
    # SGLang's loaders cut or pad a tensor of another size instead of refusing it.
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = tensor_problems(model.config, model.draft, shapes)
    if not problems:
        problems += _take_vocabulary_mapping(model, tensors.pop("d2t", None))
    if problems:
        raise ValueError("DFLASH draft weights do not match its config:\n  - " + "\n  - ".join(problems))
    _make_room_for_vocabulary(model, tensors)
    params = dict(model.named_parameters())
    for name, tensor in tensors.items():
        shard: tuple[str | int, ...] = ()
        part = next((p for p in _FUSED if f".{p}." in name), None)
        if part is not None:
            fused, shard_id = _FUSED[part]
            name, shard = name.replace(part, fused), (shard_id,)
        getattr(params[name], "weight_loader", default_weight_loader)(params[name], tensor, *shard)
    return set(params)


def _pad_to_rounded_width(tensors: dict[str, torch.Tensor], inner: int, ranks: int) -> None:
    """Pad the MLP with zeros as SGLang does on a CPU: to a multiple of 32 per rank."""
    rounding = 32 * ranks
    matrices = [name for name, tensor in tensors.items() if ".mlp." in name and tensor.ndim == 2]
    dims = {name: int(name.endswith("down_proj.weight")) for name in matrices}  # of the MLP's width
    widths = {tensors[name].shape[dim] for name, dim in dims.items()}
    if inner % rounding or len(widths) != 1 or not 0 < inner - min(widths) < rounding:
        return
    missing = inner - min(widths)
    for name, dim in dims.items():
        tensors[name] = F.pad(tensors[name], (0, missing) if dim else (0, 0, 0, missing))


def _take_vocabulary_mapping(model, d2t: torch.Tensor | None) -> list[str]:
    """Keep `d2t`, the offsets from draft ids to target ids. Returns its problems."""
    if d2t is None:
        return []
    problems = d2t_problems(d2t, model.draft.vocab_size)
    if not problems:
        model.d2t = d2t.to(device=model.norm.weight.device, dtype=torch.int64)
    return problems


def _make_room_for_vocabulary(model, tensors: dict[str, torch.Tensor]) -> None:
    draft, hidden_size, like = model.draft, model.draft.hidden_size, model.norm.weight
    if "embed_tokens.weight" in tensors and model.embed_tokens is None:
        model.embed_tokens = VocabParallelEmbedding(draft.vocab_size, hidden_size).to(like.device, like.dtype)
    if "lm_head.weight" in tensors and model.lm_head is None:
        model.lm_head = ParallelLMHead(draft.draft_vocab_size, hidden_size).to(like.device, like.dtype)
