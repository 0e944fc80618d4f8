"""Plans of cycles, and launched cycles whose outcome the host does not know yet."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout

NO_CAPS = np.array(2**31 - 1)  # for any number of requests


class BatchRequests(NamedTuple):
    """The requests of a cycle, which hardly ever change from one cycle to the next."""

    # Without a prefill, equal rows hold equal requests.
    key: tuple[list[int], bool, int]  # rows, whether drafts are drawn, number of prefills so far
    rows: np.ndarray  # of the request table. [n]
    generations: np.ndarray  # which request each row held. [n]
    modes: np.ndarray  # of `MODES`. [n]


_EMPTY = np.zeros(0, dtype=np.int64)
NO_REQUESTS = BatchRequests(([], False, 0), _EMPTY, _EMPTY, _EMPTY)


class CycleWork(NamedTuple):
    """Work of a cycle."""

    requests: int  # that it decodes
    verified: int  # drafted tokens in all
    drafted_for: int  # requests that the draft serves
    is_ragged: bool = False  # whether requests verify different numbers
    extra_context: int = 0  # committed tokens of all requests beyond those that start-up measured with
    draft_slots: int = 0  # drafted slots of each block. 0: all


NO_WORK = CycleWork(0, 0, 0)  # nothing is learned


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
    # Lengths that the choice of `copies` knew of, 0 without a match. Empty: no match is copied by choice, nor
    # compared with the output. [n]
    matches: np.ndarray = _EMPTY
    # Drafted slots of each block, at least those verified and at most B - 1. 0: all. It is ignored unless
    # `Drafter.narrows_blocks`.
    draft_slots: int = 0
    requests: BatchRequests = NO_REQUESTS  # to learn from. None at start-up, and if all verify whole blocks
    work: CycleWork = NO_WORK  # to learn from, with `requests`

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
        right: [bs] int64, tokens of each match's continuation that were the target's, used or not. None: not
            compared.
        was_drafted: whether the draft ran.
        admissions: prefills and arrivals before the cycle.
    """

    lengths: torch.Tensor
    right: torch.Tensor | None
    was_drafted: bool = True
    admissions: int = 0


@dataclass(slots=True, eq=False)
class CycleInFlight:
    """A launched cycle. The host learns its accept lengths when it is complete.

    Attributes:
        plan: what it drafts and verifies.
        proposals: sources of the blocks. None: no text was searched.
    """

    plan: CyclePlan
    proposals: Proposals | None = None


class CyclesInFlight:
    """Launched cycles, oldest first. SGLang reports the accept lengths of each once, in order."""

    def __init__(self) -> None:
        self._cycles: deque[CycleInFlight] = deque()

    def launch(self, cycle: CycleInFlight) -> None:
        """Append a cycle."""
        self._cycles.append(cycle)

    def complete(self, accept_lens: Sequence[int]) -> CycleInFlight:
        """Remove and return the oldest cycle, whose accept lengths are now known."""
        cycle = self._cycles.popleft()
        assert len(accept_lens) == cycle.plan.layout.bs, "SGLang reports every cycle once, in order"
        return cycle
