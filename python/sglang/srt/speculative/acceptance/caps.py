"""Caps on the drafted tokens of a request: speculation less, or off, for one request.

A cap does not depend on any drawn token, so the output stays the target's: an accepted prefix is cut at the
cap, and the token after it is the target's own.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_dflash.srt.speculative.acceptance.processors import runs_per_slot

# In a request's `custom_params`. SGLang passes these on from every endpoint.
FIELD = "speculative_max_tokens"


def check_cap(custom_params: Any) -> None:
    """Raise ValueError unless the cap among a request's `custom_params`, if any, is a count."""
    cap = custom_params.get(FIELD, 0) if isinstance(custom_params, dict) else 0
    if not isinstance(cap, int) or isinstance(cap, bool) or cap < 0:
        raise ValueError(f"custom_params: {FIELD} is a number of drafted tokens, 0 or more, not {cap!r:.60}.")


def requested_caps(reqs: Sequence[Any], block_size: int) -> np.ndarray | None:
    """Return the most drafted tokens that each request may accept in a cycle, [n] int32.

    None if no request has a cap, which is the usual case. A request with a custom logit processor of the
    user's own gets one token a cycle.
    """
    largest = block_size - 1
    caps = [_cap(req, largest) for req in reqs]
    return np.array(caps, dtype=np.int32) if min(caps) < largest else None


def _cap(req: Any, largest: int) -> int:
    processor = req.custom_logit_processor
    if processor is not None and not runs_per_slot(processor):
        return 0  # its logits may depend on all earlier tokens, and its state on every call
    params = req.sampling_params.custom_params
    return min(params.get(FIELD, largest), largest) if params else largest
