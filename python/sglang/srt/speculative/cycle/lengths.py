"""The wait for a cycle's lengths, under the draft's forward.

Attention backends that plan on the host (FlashInfer) need exact lengths there. SGLang waits for them before a
step, until the last one has accepted, and the device idles while the host prepares the draft. If the target
alone needs them, the draft is launched with the device's lengths, and the host waits and plans while it runs.

`SGLANG_DFLASH_WAIT_UNDER_DRAFT=1` turns this on. Without it SGLang's relay is as it was.
"""

from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.runtime_context import get_exec

from sglang_dflash.srt.environ import DFlashOptions


def check_backends(target: Any, draft: Any) -> None:
    """Raise ValueError if the switch is on and does not fit the attention backends."""
    if not DFlashOptions.WAIT_UNDER_DRAFT.get():
        return
    reason = None
    if getattr(draft, "needs_cpu_seq_lens", True):
        reason = f"{type(draft).__name__} of the draft plans with lengths on the host"
    elif not getattr(target, "needs_cpu_seq_lens", True):
        reason = f"{type(target).__name__} of the target needs no lengths on the host, so nothing waits"
    elif get_exec().overlap.enable_two_batch_overlap:
        reason = "--enable-two-batch-overlap splits a batch by lengths on the host"
    if reason is not None:
        raise ValueError(
            f"{DFlashOptions.WAIT_UNDER_DRAFT.variable}: {reason}. It is for a target on flashinfer with "
            "--speculative-draft-attention-backend fa3 or triton."
        )


class ArrivingLengths:
    """Committed lengths of a batch, which are being copied to the host.

    Args:
        lengths: [bs] int64, gathered on the current stream.
        stream: takes the copy, so that no forward waits for it.
    """

    def __init__(self, lengths: torch.Tensor, stream: Any):
        device = torch.get_device_module(lengths.device)
        gathered, self._arrived = device.Event(), device.Event()
        gathered.record()
        is_pinned = lengths.device.type == "cuda"
        self._on_host = torch.empty(lengths.shape, dtype=lengths.dtype, pin_memory=is_pinned)
        with device.stream(stream):
            stream.wait_event(gathered)
            self._on_host.copy_(lengths, non_blocking=True)
            self._arrived.record()

    def wait(self) -> torch.Tensor:
        """Wait until the lengths are on the host: [bs] int64."""
        self._arrived.synchronize()
        return self._on_host


class LateLengths(FutureMap):
    """SGLang's relay between steps, which leaves the wait for lengths to the cycle."""

    needs_cpu_seq_lens: bool  # an attention backend plans with lengths on the host

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._copies = torch.get_device_module(self.device).Stream()

    def resolve_seq_lens_cpu(self, batch: Any, *options: Any, **named: Any) -> None:
        """Gather lengths on the device, and begin to copy a decode batch's to the host.

        `stream_ordered` is an option from 0.5.23 on.
        """
        draft_input = batch.spec_info
        is_relayed = getattr(draft_input, "future_indices", None) is not None
        if not (self.needs_cpu_seq_lens and is_relayed and batch.forward_mode.is_decode()):
            return super().resolve_seq_lens_cpu(batch, *options, **named)
        self.needs_cpu_seq_lens = False
        try:
            super().resolve_seq_lens_cpu(batch, *options, **named)
        finally:
            self.needs_cpu_seq_lens = True
        draft_input.arriving_lens = ArrivingLengths(batch.seq_lens, self._copies)
