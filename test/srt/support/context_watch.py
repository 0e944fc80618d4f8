"""A watch on a scheduler's blocks, in a file that imports only what a scheduler's process can."""

from sglang_dflash.srt.speculative.cycle.observer import CycleObserver


class _Within(CycleObserver):
    """Ends the scheduler if a block begins behind the context: SGLang sizes attention's tables by it."""

    def __init__(self, context: int):
        self._context = context

    def on_begun(self, batch) -> None:
        assert batch.seq_lens.max() <= self._context


def watch_context(scheduler) -> None:
    """Watch a scheduler from `support.scheduled.run` on."""
    scheduler.draft_worker.observers.append(_Within(scheduler.model_config.context_len))
