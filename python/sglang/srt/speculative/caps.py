"""Caps of requests: the most drafted tokens that a request accepts in a cycle."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_dflash.srt.speculative.acceptance.processors import runs_per_slot

# In a request's `custom_params`. SGLang passes these on from every endpoint. `requested_caps` has an example.
FIELD = "speculative_max_tokens"


def check_cap(custom_params: Any) -> None:
    """Raise ValueError unless the cap among a request's `custom_params`, if any, is a count."""
    cap = custom_params.get(FIELD, 0) if isinstance(custom_params, dict) else 0
    if not isinstance(cap, int) or isinstance(cap, bool) or cap < 0:
        raise ValueError(f"custom_params: {FIELD} is a number of drafted tokens, 0 or more, not {cap!r:.60}.")


def requested_caps(reqs: Sequence[Any], block_size: int) -> np.ndarray:
    """Return the most drafted tokens that each request may accept in a cycle, [n] int32.

    That is a block's for most. A request with a custom logit processor of the user's own gets one token a
    cycle.

    Example:
        The body of a `/generate` request with a cap, and one without, on a server with blocks of 8::

            >>> from types import SimpleNamespace
            >>> from sglang.srt.sampling.sampling_params import SamplingParams
            >>> from sglang_dflash.srt.speculative.caps import requested_caps
            >>> capped = {"sampling_params": {"custom_params": {"speculative_max_tokens": 2}}}
            >>> plain = {"sampling_params": {}}
            >>> params = [SamplingParams(**body["sampling_params"]) for body in (capped, plain)]
            >>> reqs = [SimpleNamespace(sampling_params=p, custom_logit_processor=None) for p in params]
            >>> requested_caps(reqs, block_size=8)
            array([2, 7], dtype=int32)
    """
    largest = block_size - 1
    return np.array([_cap(req, largest) for req in reqs], dtype=np.int32)


def _cap(req: Any, largest: int) -> int:
    processor = req.custom_logit_processor
    if processor is not None and not runs_per_slot(processor):
        return 0  # its logits may depend on all earlier tokens, and its state on every call
    params = req.sampling_params.custom_params
    return min(params.get(FIELD, largest), largest) if params else largest
