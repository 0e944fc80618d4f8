"""The end of a request inside a block: the first stop, and nothing behind it."""

from collections.abc import Callable
from typing import Any

from sglang_dflash.srt.patching import WORKER, patches


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
    # A regular expression that names the end of the text matches in no run that goes on behind it.
    if new_accepted_len > 1 and (req.finished_len is not None or req.sampling_params.stop_regex_strs):
        _stop_token_by_token(req, original, run)
    if req.finished_len is not None:
        req.reasoning_tokens = min(req.reasoning_tokens, req.finished_len)
    if abort:
        req.finished_reason = abort


def _stop_token_by_token(req: Any, check: Callable[[Any], None], run: Any) -> None:
    """Find the first stop of a request in its last tokens.

    SGLang has put another token in place of the first that is not in the vocabulary (NaN). `run` has the
    tokens as they were.
    """
    output_ids, grammar = req.output_ids, req.grammar
    found = req.finished_reason, req.finished_len
    old = output_ids[: -len(run)]
    req.grammar = None  # it has read the whole run
    for end in range(1, (found[1] or len(output_ids)) - len(old) + 1):
        req.output_ids = old + run[:end]
        req.finished_reason = req.finished_len = None
        check(req)
        if req.finished():
            found = req.finished_reason, len(old) + end
            break
    req.output_ids, req.grammar = output_ids, grammar
    req.finished_reason, req.finished_len = found


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
