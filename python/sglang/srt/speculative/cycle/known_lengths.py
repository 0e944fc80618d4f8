"""Committed lengths that the host knows before the device reports them."""

import functools
import inspect


def resolving_known_lengths():
    """Wrap `FutureMap.resolve_seq_lens_cpu` to ask the device for unknown lengths only.

    Attention backends that plan on the host (FlashInfer) need exact lengths there. For them SGLang waits
    before each step until the last one has accepted, and the device idles while the host plans and launches.
    After a prefill or a plain decode step the host has counted each request's tokens. So plain decoding
    overlaps as it does without speculation.
    """
    from sglang.srt.managers.overlap_utils import FutureMap

    original = inspect.unwrap(FutureMap.resolve_seq_lens_cpu)

    @functools.wraps(original)
    def resolve_seq_lens_cpu(self, batch, stream_ordered=False):
        known = getattr(batch.spec_info, "new_seq_lens_cpu", None)
        if known is None or batch.spec_info.future_indices is None or not self.needs_cpu_seq_lens:
            return original(self, batch, stream_ordered)
        assert len(known) == len(batch.reqs), "lengths are known for every request or for none"
        self.needs_cpu_seq_lens = False
        try:
            original(self, batch, stream_ordered)  # gathers them on the device
        finally:
            self.needs_cpu_seq_lens = True
        batch.seq_lens_cpu, batch.seq_lens_sum = known, int(known.sum())

    return resolve_seq_lens_cpu
