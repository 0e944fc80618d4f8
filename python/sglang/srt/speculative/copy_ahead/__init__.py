"""`--speculative-copy-ahead`: proposals from a request's own text, where they are likely to be kept, in place of the draft's.

Not called n-gram, as elsewhere: SGLang has an algorithm of that name, with flags of its own, which drafts from a store shared by all
requests and has no draft model.
"""

import os

VARIABLE = "SGLANG_DFLASH_COPY_AHEAD"


def is_asked_for() -> bool:
    """Raises ValueError for what is neither on nor off."""
    value = os.environ.get(VARIABLE) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} is 1 or 0, got {value!r}.")
    return value == "1"
