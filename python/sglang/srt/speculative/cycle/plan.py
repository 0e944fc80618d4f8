"""Plans of cycles, and launched cycles whose outcome the host does not know yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout

NO_CAPS = np.array(2**31 - 1)  # for any number of requests


_EMPTY = np.zeros(0, dtype=np.int64)


class CyclePlan(NamedTuple):
    """Plan of a cycle: the tokens that it drafts and verifies.

    It is chosen before anything is drafted: which slots are verified may not depend on drawn tokens. A copy
    is not drawn, as the text determines it.
    """

    layout: VerifyLayout  # of the verify forward
    draws: bool = False  # whether drafted tokens are drawn instead of the draft's argmax
    # Requests that verify a copy instead of drafted tokens. Empty: all verify whole blocks, and each match is
    # copied. [n] bool
    copies: np.ndarray = _EMPTY
    caps: np.ndarray = NO_CAPS  # most drafted tokens to accept per request. [n]

    @property
    def copies_each_match(self) -> bool:
        """Return whether nothing was chosen: all verify whole blocks, and each match is copied."""
        return not self.copies.size

    @property
    def verify_len(self) -> int:
        """Most slots that a request verifies, the anchor included."""
        return self.layout.verify_len

    @property
    def max_accept(self) -> np.ndarray:
        """Drafted tokens of each request that could be accepted. [n]"""
        return np.minimum(self.caps, self.layout.num_draft_tokens)


@dataclass(frozen=True, slots=True)
class Proposals:
    """Sources of the blocks of one cycle, on the host once the accept lengths are.

    Attributes:
        lengths: [bs] int32, lengths of the requests' matches. 0: none. Negative: passed over for the draft.
        was_drafted: whether the draft ran.
    """

    lengths: torch.Tensor
    was_drafted: bool = True


@dataclass(slots=True, eq=False)
class CycleInFlight:
    """A launched cycle. The host learns its accept lengths when it is complete.

    Attributes:
        plan: what it drafts and verifies.
        proposals: sources of the blocks. None: no text was searched.
        reqs: SGLang's requests, one a block.
    """

    plan: CyclePlan
    proposals: Proposals | None = None
    reqs: Sequence[Any] = ()
