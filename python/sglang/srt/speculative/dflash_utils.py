"""Start-up checks of KV budget and graph memory; fences; patches of SGLang's steps."""

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

from sglang_dflash.srt.compat import budgeted_draft_bytes
from sglang_dflash.srt.patching import WORKER, patches

logger = logging.getLogger(__name__)

# The draft's graphs and their workspaces take a few hundred MB. Without them a step still runs.
DRAFT_GRAPHS_NEED_GB = 1.0


def check_kv_budget(target_runner: Any, draft_runner: Any) -> None:
    """Raise RuntimeError unless the draft's KV pool has the target's slots and fits.

    SGLang sizes the target's pool by target + draft bytes per token, the latter from the draft's config. If
    the reading fails, SGLang guesses and warns."""
    target_pool, draft_pool = target_runner.token_to_kv_pool, draft_runner.token_to_kv_pool
    if draft_pool.size != target_pool.size:
        raise RuntimeError(
            f"DFLASH shares KV slots, but target and draft pool hold {target_pool.size} and {draft_pool.size}"
        )
    budgeted = budgeted_draft_bytes(target_runner.kv_cache_configurator)
    allocated = sum(draft_pool.get_kv_size_bytes()) / draft_pool.k_buffer[0].shape[0]
    if budgeted is None or allocated > budgeted:
        raise RuntimeError(f"DFLASH draft KV takes {allocated} bytes a token, but {budgeted} were budgeted")


def has_room_for_draft_graphs(tp_sync: Any, device: str, gpu_id: int) -> bool:
    """Return whether enough memory is left for the draft's CUDA graphs, the same on all ranks."""
    if device != "cuda":
        return True  # SGLang knows whether such a device has any
    free = tp_sync.available_memory_gb(
        SpecTpSyncSite.DFLASH_MEM, device, gpu_id, group=get_parallel().tp_group
    )
    if free < DRAFT_GRAPHS_NEED_GB:
        logger.warning(
            "DFLASH: the draft runs without CUDA graphs, as only %.2f GB of GPU memory are left for them "
            "(wanted: %.0f). A lower --mem-fraction-static makes room.",
            free,
            DRAFT_GRAPHS_NEED_GB,
        )
    return free >= DRAFT_GRAPHS_NEED_GB


def defer_row_reuse(target_runner: Any) -> None:
    """Let SGLang wait for the whole step before it gives a row of a request to another one.

    SGLang otherwise rewrites rows as soon as the target's forward has read them. Call this after that
    forward, before work that reads or writes a table of SGLang's by request row.
    """
    target_runner.shared_read_done_event = None


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


@patches(
    "sglang.srt.managers.schedule_batch.Req.update_finish_state",
    at=WORKER,
    signature="(self, new_accepted_len)",
    feature="stop strings and reasoning tokens as without a draft",
    upstream="https://github.com/sgl-project/sglang/issues/39826",
)
def truncate_at_first_stop(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """End a block at the first of its stops, and count no reasoning behind it.

    SGLang looks for NaN, then for stop strings in the order of the request, then for stop tokens, then at the
    length. The one that it finds in a run may come after another. It looks for none if the request is
    aborted. It also counts the reasoning of the whole run.
    """
    if req.finished() or not 0 < new_accepted_len <= len(req.output_ids):
        original(req, new_accepted_len)
        return
    abort, req.to_finish = req.to_finish, None
    run = req.output_ids[-new_accepted_len:]
    original(req, new_accepted_len)
    if req.finished_len is not None and new_accepted_len > 1:
        _stop_token_by_token(req, original, run)
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)
    if abort:
        req.finished_reason = abort


@patches(
    "sglang.srt.managers.scheduler_components.logprob_result_processor."
    "SchedulerLogprobResultProcessor.add_logprob_return_values",
    at=WORKER,
    signature="(self, i, req, pt, next_token_ids, num_input_logprobs, output)",
    feature="log probabilities of zero tokens as without a draft",
    upstream="docs/dev/upstream/zero-tokens.md",
)
def drop_undrawn_token(original: Callable[..., int], processor: Any, i: int, req: Any, *args: Any) -> int:
    """Give no log probability of the token that a draft makes SGLang draw for none.

    A request of zero tokens ends in its prefill. Without a draft SGLang draws no token there.
    """
    num_input_logprobs = original(processor, i, req, *args)
    if req.sampling_params.max_new_tokens == 0:
        req.logprob.output_token_logprobs_val.clear()
        req.logprob.output_token_logprobs_idx.clear()
    return num_input_logprobs


def _stop_token_by_token(req: Any, check: Callable[[Any], None], run: Any) -> None:
    """Find the first stop of a request that has one in its last tokens.

    SGLang has put another token in place of the first that is not in the vocabulary (NaN). `run` has the
    tokens as they were.
    """
    output_ids, grammar = req.output_ids, req.grammar
    found = req.finished_reason, req.finished_len
    old = output_ids[: -len(run)]
    req.grammar = None  # it has read the whole run
    for end in range(1, found[1] - len(old) + 1):
        req.output_ids = old + run[:end]
        req.finished_reason = req.finished_len = None
        check(req)
        if req.finished():
            found = req.finished_reason, len(old) + end
            break
    req.output_ids, req.grammar = output_ids, grammar
    req.finished_reason, req.finished_len = found
