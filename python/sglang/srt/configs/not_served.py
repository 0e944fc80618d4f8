"""A type for what our implementation does not serve."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NotServed:
    """One reason why our implementation cannot run a server.

    Attributes:
        what: the field, flag or device, and what is not supported.
        builtin_serves: whether SGLang's built-in DFLASH runs such a server.
        lost: what the built-in is known to do worse here, if anything.
    """

    what: str
    builtin_serves: bool = False
    lost: str = ""
