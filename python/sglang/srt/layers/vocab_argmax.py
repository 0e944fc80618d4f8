"""An LM head that may be split over tensor-parallel ranks: its argmax and its largest logits, without
gathering all of them, and its logits.

A head is SGLang's ParallelLMHead, or the embedding a target is tied to: its VocabParallelEmbedding, or a
plain `nn.Embedding`, which every rank holds whole. A quantized one multiplies through its quant method;
nobody else can read its weight."""

import torch
import torch.nn.functional as F
from sglang.srt.runtime_context import get_parallel


def greedy_tokens(hidden: torch.Tensor, lm_head) -> torch.Tensor:
    """hidden [n, hidden] -> the head's best token of each row, [n] int64, equal on all ranks.

    A head's padding rows never win. Of equal logits the lowest id wins, as in one `argmax` over the whole
    head. Ranks exchange 8 bytes a row."""
    logits = _local_logits(hidden, lm_head)
    shard = getattr(lm_head, "shard_indices", None)
    if shard is None:
        return logits.argmax(dim=-1)
    best, index = logits[:, : shard.num_org_elements].max(dim=-1)
    index = index + shard.org_vocab_start_index
    group = get_parallel().tp_group
    if group.world_size == 1:
        return index
    # Logit and id travel together as float32, which holds ids exactly up to 2**24.
    mine = torch.stack((best.float(), index.float()))
    best, index = group.all_gather(mine[None], dim=0).unbind(dim=1)
    return index.gather(0, best.argmax(dim=0, keepdim=True)).squeeze(0).long()


def largest_logits(hidden: torch.Tensor, lm_head, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [n, hidden] -> the head's `count` largest logits of each row, largest first, and their ids [n,
    count] int64, equal on all ranks. Never a padding row's. Ranks exchange 8 bytes a row and logit."""
    logits = _local_logits(hidden, lm_head)
    shard = getattr(lm_head, "shard_indices", None)
    if shard is None:
        return logits.topk(count, dim=-1)
    held = shard.num_org_elements
    best, index = logits[:, :held].topk(min(count, held), dim=-1)
    index = index + shard.org_vocab_start_index
    group = get_parallel().tp_group
    if group.world_size == 1:
        return best, index
    # A rank with fewer rows than that fills up with what nobody chooses. Ids as float32: exact up to 2**24.
    missing = count - best.shape[1]
    best, index = F.pad(best.float(), (0, missing), value=-torch.inf), F.pad(index, (0, missing))
    gathered = group.all_gather(torch.stack((best, index.float()))[None], dim=0)
    best, index = gathered.permute(1, 2, 0, 3).flatten(2)
    best, chosen = best.topk(count, dim=-1)
    return best, index.gather(1, chosen).long()


def full_logits(hidden: torch.Tensor, lm_head) -> torch.Tensor:
    """hidden [n, hidden] -> logits over the head's whole vocabulary, [n, vocab], on all ranks, without its
    padding."""
    logits = _local_logits(hidden, lm_head)
    if getattr(lm_head, "shard_indices", None) is None:
        return logits
    group = get_parallel().tp_group
    if group.world_size > 1:
        logits = group.all_gather(logits, dim=-1)
    return logits[:, : lm_head.org_vocab_size]


def _local_logits(hidden: torch.Tensor, lm_head) -> torch.Tensor:
    """Logits over this rank's rows of the head, padding included."""
    quant_method = getattr(lm_head, "quant_method", None)
    if quant_method is None:
        return F.linear(hidden, lm_head.weight)
    return quant_method.apply(lm_head, hidden)
