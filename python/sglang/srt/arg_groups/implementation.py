"""The implementation of DFLASH that serves.

The launcher decides once (`fallback.py`). The decision travels to every process on the record of server
arguments.
"""

from dataclasses import dataclass
from typing import Any

from sglang_dflash import __version__

# The seal of the record passes attributes that begin with an underscore, and pickles them.
_ATTRIBUTE = "_dflash_implementation"


@dataclass(frozen=True, slots=True)
class Implementation:
    """The implementation that serves, as `/server_info` reports it.

    Attributes:
        name: Distribution that the implementation belongs to.
        version: Version of that distribution.
        because: Reasons why the built-in serves. Empty if our DFLASH serves.
        lost: Features of our DFLASH that the built-in lacks.
    """

    name: str = "sglang-dflash"
    version: str = __version__
    because: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def is_builtin(self) -> bool:
        return bool(self.because)

    @classmethod
    def from_server_args(cls, server_args: Any) -> "Implementation":
        """Return the decision on a record. Without one, our DFLASH serves."""
        return getattr(server_args, _ATTRIBUTE, None) or cls()

    def decide(self, server_args: Any) -> None:
        """Write the decision on the record."""
        setattr(server_args, _ATTRIBUTE, self)
