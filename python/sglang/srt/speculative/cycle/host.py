"""Host-side values of a batch, and asynchronous copies of them to the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def table_rows(batch: Any) -> np.ndarray:
    """Return the rows of a batch's requests in the request table, [bs] int64.

    They are the batch's own. A request that ended since the batch was chosen has given its row back.
    """
    return batch.req_pool_indices_cpu.numpy()


def on_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy numbers of the host to a device without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=torch.device(device).type == "cuda")
    return tensor.to(device, non_blocking=True)


def ragged_ranges(starts: Sequence[int], counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Count up from each request's start, request after request: [sum(counts)] int64.

    Computed on the device: a copy of more than 64 KB from ordinary host memory would wait for the stream.
    """
    on_host = torch.tensor([list(starts), list(counts)], dtype=torch.int64)
    total = int(on_host[1].sum())
    on_host[0] -= on_host[1].cumsum(0) - on_host[1]
    shifts, lengths = on_host.to(device, non_blocking=True)
    return torch.arange(total, device=device) + shifts.repeat_interleave(lengths, output_size=total)
