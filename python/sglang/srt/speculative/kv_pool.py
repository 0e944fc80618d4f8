"""The KV pool: its slots, its end, and prompts that wait for its slots."""

from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_serving, get_spec

from sglang_dflash.srt.patching import WORKER, patches


def check_shares_slots(target_runner: Any, draft_runner: Any) -> None:
    """Raise RuntimeError unless the draft's KV pool has the target's slots."""
    sizes = [runner.token_to_kv_pool.size for runner in (target_runner, draft_runner)]
    if sizes[0] != sizes[1]:
        raise RuntimeError(
            f"DFLASH shares KV slots, but target and draft pool hold {sizes[0]} and {sizes[1]}"
        )


# Of this process's scheduler. It asks with a request alone, from which no way leads to a pool.
_target_runner: Any = None


def limit_to_kv_pool(target_runner: Any) -> None:
    """Have `validate_dflash_request` shorten requests to this runner's KV pool."""
    global _target_runner
    _target_runner = target_runner


def end_with_pool(req: Any) -> str | None:
    """Shorten an answer to the KV pool, where it ends with `length`.

    Returns why a prompt is too long for the pool, or None.

    SGLang runs a step if two blocks are free behind every request. It retracts requests until they are, and
    would abort the last one. It admits no request that leaves less than a page, or two without a prefix
    cache, and the queue would wait behind it for ever.
    """
    runner, params = _target_runner, req.sampling_params
    if runner is None:
        return None
    spare = 2 * (get_spec().speculative_num_draft_tokens + (runner.page_size or 1))
    longest, prompt = runner.max_total_num_tokens - spare, len(req.origin_input_ids)
    if prompt >= longest > 1 and get_serving().allow_auto_truncate:
        prompt = longest - 1
        req.origin_input_ids = req.origin_input_ids[:prompt]
    if prompt >= longest:
        return (
            f"The prompt has {prompt} tokens. The KV pool holds {runner.max_total_num_tokens}, and DFLASH "
            f"needs {spare} of them beside a request: two blocks and two pages."
        )
    room = longest - prompt
    params.max_new_tokens = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
    return None


@patches(
    "sglang.srt.mem_cache.prefill_budget.PrefillBudget.available_chunk_tokens",
    at=WORKER,
    signature="(self, chunk_limit)",
    feature="mixed chunks in a full KV pool",
    upstream="docs/dev/upstream/prefill-chunks.md",
)
def defer_prefill_chunk(original: Callable[..., Any], budget: Any, chunk_limit: int) -> int | None:
    """Let a chunk wait for KV slots, as rows of blocks fill the pool beside it.

    SGLang's takes a whole chunk if nothing of the budget is left. If the pool has fewer slots, that ends the
    scheduler. Beside mixed chunks decode rows reserve whole blocks, so a pool gets that full. A chunk that
    waits goes on once decode rows have ended or were retracted.
    """
    wanted = original(budget, chunk_limit)
    if wanted is None:
        return None
    room = budget._available_and_evictable() // budget.page_size * budget.page_size
    return min(wanted, room) if room > 0 else None
