"""Steps of the scheduler that a GPU may still be running, and the host's waits for it.

The host knows that a step is over once it processes its result, or waits for something that runs later.
"""

from collections.abc import Callable

from support.rehearsal import launches, report
from torch.overrides import TorchFunctionMode

launched = 0  # the number of the step that is being launched, or was launched last
_processed = 0  # steps whose results were processed
_waited_for = 0  # the last step that the host has waited for


def is_running(step: int) -> bool:
    """Return whether an earlier step may still be running."""
    return max(_processed, _waited_for) < step < launched


def _on_wait(what: str, in_decode: bool) -> None:
    global _waited_for
    _waited_for = launched - 1
    report.order.append("wait")
    if in_decode:
        report.note("wait", what=what)


def waiting(what: str, body: Callable) -> Callable:
    """Wrap a function that waits for the device."""

    def wait(*args, **kwargs):
        _on_wait(what, launches.in_decode_step())
        return body(*args, **kwargs)

    return wait


class _Copies(TorchFunctionMode):
    """Notes whether a tensor is copied to the host."""

    seen = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen |= getattr(func, "__name__", "") == "cpu"
        return func(*args, **(kwargs or {}))


def watch() -> None:
    """Count the scheduler's steps, and the waits for lengths."""
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.scheduler import Scheduler

    run, process = Scheduler.run_batch, Scheduler.process_batch_result
    resolve, publish = FutureMap.resolve_seq_lens_cpu, FutureMap.publish

    def counted_run(self, *args, **kwargs):
        global launched
        launched += 1
        if launched == 1:
            report.order.clear()  # of cycles at start-up
        return run(self, *args, **kwargs)

    def counted_process(self, *args, **kwargs):
        global _processed
        result = process(self, *args, **kwargs)
        _processed += 1
        return result

    def watched_resolve(self, batch, *args, **kwargs):
        with _Copies() as copies:
            resolve(self, batch, *args, **kwargs)
        if copies.seen:
            _on_wait("lengths", batch.forward_mode.is_decode())

    def noted_publish(self, *args, **kwargs):
        report.note("order", events=report.order)
        report.order.clear()
        return publish(self, *args, **kwargs)

    FutureMap.publish = noted_publish
    Scheduler.run_batch, Scheduler.process_batch_result = counted_run, counted_process
    FutureMap.resolve_seq_lens_cpu = watched_resolve
