"""Stops inside a block: an answer ends where it would end one token at a time."""

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_batch import Req


def finishing_at_the_first_stop() -> Callable[..., None]:
    """Build `Req.update_finish_state`, which ends a run of tokens at its first stop.

    SGLang looks for stop strings in the order of the request, then for stop tokens, then at the length. The
    one that it finds in a run may come after another. It also counts the reasoning of the whole run.
    """
    original = Req.update_finish_state

    @functools.wraps(original)
    def update_finish_state(self: Any, new_accepted_len: int = 1) -> None:
        is_decided = self.finished() or self.to_finish
        original(self, new_accepted_len)
        if is_decided or self.finished_len is None or new_accepted_len <= 1:
            return
        if self.sampling_params.stop_strs or self.sampling_params.stop_regex_strs:
            _stop_token_by_token(self, original, len(self.output_ids) - new_accepted_len)
        self.reasoning_tokens = min(self.reasoning_tokens, self.finished_len)

    return update_finish_state


def _stop_token_by_token(req: Any, check: Callable[[Any], None], num_old: int) -> None:
    """Find the first stop of a request that has one after `num_old` tokens."""
    output_ids, grammar = req.output_ids, req.grammar
    found = req.finished_reason, req.finished_len
    req.grammar = None  # it has read the whole run
    for end in range(num_old + 1, found[1] + 1):
        req.output_ids = output_ids[:end]
        req.finished_reason = req.finished_len = None
        check(req)
        if req.finished():
            found = req.finished_reason, end
            break
    req.output_ids, req.grammar = output_ids, grammar
    req.finished_reason, req.finished_len = found
