"""A type for what our implementation does not serve."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One reason why our implementation cannot run a server.

    Attributes:
        what: the field, flag or device, and what is not supported.
        builtin_supports: whether SGLang's built-in DFLASH supports it.
        drawback: what the built-in is known to do worse here, if anything.
    """

    what: str
    builtin_supports: bool = False
    drawback: str = ""
