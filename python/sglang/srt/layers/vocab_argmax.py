"""Argmax, largest logits and all logits of an LM head that ranks may share.

A head is SGLang's ParallelLMHead, or the embedding that a target is tied to: its VocabParallelEmbedding, or a
plain `nn.Embedding`, which every rank holds whole. A quantized head multiplies through its quant method, as
only that can read its weight.
"""

import torch
import torch.nn.functional as F
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.runtime_context import get_parallel

from sglang_dflash.srt.layers.plain_weight import is_reordered


def greedy_tokens(hidden: torch.Tensor, lm_head) -> torch.Tensor:
    """Return the token with the largest logit for each row of hidden [n, hidden], [n] int64.

    Equal on all ranks. A head's padding rows never win. Of equal logits the lowest id wins, as in one
    `argmax` over the whole head. Ranks exchange 8 bytes per row.
    """
    logits = _local_logits(hidden, lm_head)
    shard = getattr(lm_head, "shard_indices", None)
    if shard is None:
        return logits.argmax(dim=-1)
    max_logits, index = logits[:, : shard.num_org_elements].max(dim=-1)
    index = index + shard.org_vocab_start_index
    group = get_parallel().tp_group
    if group.world_size == 1:
        return index
    # Logit and id travel together as float32, which holds ids exactly up to 2**24.
    local = torch.stack((max_logits.float(), index.float()))
    max_logits, index = group.all_gather(local[None], dim=0).unbind(dim=1)
    return index.gather(0, max_logits.argmax(dim=0, keepdim=True)).squeeze(0).long()


def largest_logits(
    hidden: torch.Tensor, lm_head, count: int, num_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest logits of each row of hidden [n, hidden], and their ids.

    Both are [n, count], largest first; ids are int64. All ranks get equal results, without padding rows.
    Ranks exchange 8 bytes per row and logit. Only ids below `num_tokens` are looked at, or all if it is None.
    """
    shard = getattr(lm_head, "shard_indices", None)
    if shard is None:
        return _local_logits(hidden, lm_head, num_tokens).topk(count, dim=-1)
    held = shard.num_org_elements
    if num_tokens is not None:
        held = min(held, max(num_tokens - shard.org_vocab_start_index, 0))
    largest, index = _local_logits(hidden, lm_head, held).topk(min(count, held), dim=-1)
    index = index + shard.org_vocab_start_index
    group = get_parallel().tp_group
    if group.world_size == 1:
        return largest, index
    # A rank with fewer rows pads with -inf, which is never chosen. Ids as float32: exact up to 2**24.
    missing = count - largest.shape[1]
    largest, index = F.pad(largest.float(), (0, missing), value=-torch.inf), F.pad(index, (0, missing))
    gathered = group.all_gather(torch.stack((largest, index.float()))[None], dim=0)
    largest, index = gathered.permute(1, 2, 0, 3).flatten(2)
    largest, chosen = largest.topk(count, dim=-1)
    return largest, index.gather(1, chosen).long()


def full_logits(hidden: torch.Tensor, lm_head) -> torch.Tensor:
    """Return logits of hidden [n, hidden] over the whole vocabulary, [n, vocab], on all ranks."""
    logits = _local_logits(hidden, lm_head)
    if getattr(lm_head, "shard_indices", None) is None:
        return logits
    group = get_parallel().tp_group
    if group.world_size > 1:
        logits = group.all_gather(logits, dim=-1)
    return logits[:, : lm_head.org_vocab_size]


def _local_logits(hidden: torch.Tensor, lm_head, rows: int | None = None) -> torch.Tensor:
    """Return logits over this rank's rows of the head, padding included.

    With `rows`: over the first of them. A plain weight of which at most half is wanted is read no further.
    Other heads multiply whole.
    """
    quant_method = getattr(lm_head, "quant_method", None)
    if quant_method is None or (rows is not None and _is_worth_a_cut(lm_head, rows)):
        return F.linear(hidden, lm_head.weight[:rows])
    return quant_method.apply(lm_head, hidden)[:, :rows]


def _is_worth_a_cut(lm_head, rows: int) -> bool:
    """Return whether half of a head's rows suffice, and its parameter has plain values."""
    method = lm_head.quant_method
    is_plain = method.keeps_plain if is_reordered(lm_head) else isinstance(method, UnquantizedEmbeddingMethod)
    return is_plain and 2 * rows <= lm_head.weight.shape[0]
