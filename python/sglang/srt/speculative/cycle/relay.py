"""SGLang's relay of lengths and bonus tokens to the next step, written by acceptance.

Under overlap scheduling SGLang keeps both in tables by request row, and copies a step's values there. If the
kernel that decides them writes the tables too, two copies a cycle are spared.
"""

from typing import Any

import torch
from sglang.srt.managers import overlap_utils

from sglang_dflash.kernels.ops.speculative.accept import AcceptedBlocks, RelayTables


class StepRelay:
    """Tables that are offered to SGLang before it makes its own.

    SGLang takes the tables under overlap scheduling. Release 0.5.22 cannot. The tables have as many rows as
    the request table.
    """

    def __init__(self, num_rows: int, device: Any):
        self._buffers: Any = None
        if hasattr(overlap_utils, "FutureRelayBuffers"):
            self._buffers = overlap_utils.FutureRelayBuffers(req_pool_size=num_rows, device=device)
            overlap_utils.offer_future_relay_buffers(self._buffers)

    def tables(self, rows: torch.Tensor) -> RelayTables | None:
        """Return the tables to write, for requests in these rows [bs] int64. None: SGLang copies.

        Tables that SGLang has not taken, or not yet, are written as well, and not read.
        """
        if self._buffers is None:
            return None
        return RelayTables(rows, self._buffers.new_seq_lens, self._buffers.output_tokens)

    def on_written(self, accepted: AcceptedBlocks) -> None:
        """Tell SGLang not to copy these lengths and tokens: they are in the tables."""
        self._buffers.published_seq_lens, self._buffers.published_bonus = accepted.committed, accepted.bonus
