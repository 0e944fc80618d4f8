"""KV slots of copies that are longer than a block.

Every request has slots for two blocks beyond its committed length. A cycle that copies leaves a block of its
reserved slots free: the next reservation may not know yet how much the copy added.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_dflash.srt.speculative.dflash_info import COPY_SLOTS


def copy_room(batch: Any, block_size: int, most_slots: int) -> np.ndarray:
    """Return how many copied tokens each request of a decode batch may verify, [n], on a CPU.

    At least those of a block. If log probabilities are returned, SGLang makes them for as many slots per
    request as the longest has: then all requests together take no more than a full batch of whole blocks.

    Args:
        batch: the scheduler's, with reserved slots and exact lengths.
        block_size: B.
        most_slots: the most that a request verifies, the anchor included.
    """
    allocated = np.array([req.kv.kv_allocated_len for req in batch.reqs])
    if batch.return_logprob:
        rows = batch.req_to_token_pool.req_to_token.shape[0]
        most_slots = min(most_slots, max(block_size, rows * block_size // len(batch.reqs)))
    free = allocated - batch.seq_lens.numpy() - block_size - 1
    return free.clip(block_size - 1, most_slots - 1)


def on_copies(reqs: Sequence[Any], is_long: np.ndarray, block_size: int, most_slots: int) -> None:
    """Have the next reservation give more slots to some requests, and only to these.

    is_long: [n] bool, requests whose copy fills a block.

    Under overlap the copy in flight may take `most_slots`, and the next one as many again.
    """
    for req, goes_on in zip(reqs, is_long.tolist(), strict=True):
        setattr(req, COPY_SLOTS, 2 * most_slots + block_size if goes_on else 0)
