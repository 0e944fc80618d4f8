"""Prompts in chunks: room for the next chunk."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def letting_chunks_wait() -> Callable[..., Any]:
    """Build `PrefillBudget.available_chunk_tokens`, which lets a chunk wait for KV slots.

    SGLang's takes a whole chunk if nothing of the budget is left. If the pool has fewer slots, that ends the
    scheduler. Beside mixed chunks decode rows reserve whole blocks, so a pool gets that full. A chunk that
    waits goes on once decode rows have ended or were retracted.
    """
    from sglang.srt.mem_cache.prefill_budget import PrefillBudget

    original = inspect.unwrap(PrefillBudget.available_chunk_tokens)

    @functools.wraps(original)
    def available_chunk_tokens(self: Any, chunk_limit: int) -> int | None:
        wanted = original(self, chunk_limit)
        if wanted is None:
            return None
        room = self._available_and_evictable() // self.page_size * self.page_size
        return min(wanted, room) if room > 0 else None

    return available_chunk_tokens
