"""`--speculative-copy-ahead`: proposals from a request's own text, where they are likely to be kept, in place
of the draft's.

Not called n-gram, as elsewhere: SGLang has an algorithm of that name, with flags of its own, which drafts
from a store shared by all requests and has no draft model."""

from sglang_dflash.srt.environ import DFlashOptions


def is_asked_for() -> bool:
    return DFlashOptions.COPY_AHEAD.get()
