"""Prompts in chunks: room for the next chunk, one unfinished prompt."""

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


def cutting_one_prompt() -> Callable[..., Any]:
    """Build `PrefillAdder.add_one_req_ignore_eos`, which cuts no second prompt in a step.

    SGLang continues one unfinished prompt. Of two, it answers the first without the rest of its text. A cut
    at a page's end may leave less than a page of the step's tokens. Without a prefix cache SGLang then cuts
    the next prompt to these, if that request ignores the end of text.
    """
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

    original = inspect.unwrap(PrefillAdder.add_one_req_ignore_eos)

    @functools.wraps(original)
    def add_one_req_ignore_eos(self: Any, req: Any) -> Any:
        if self.new_chunked_req is not None:
            return AddReqResult.OTHER
        return original(self, req)

    return add_one_req_ignore_eos
