"""Fields of `/server_info` beside SGLang's own."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from sglang_dflash.srt.speculative.implementation import Implementation


def adding_worker_reports() -> Callable[[Any, dict], None]:
    """Return SGLang's `_add_speculative`, extended by the worker's reports.

    `speculative_width` is added if the width is chosen per cycle, `speculative_copy_ahead` if copies are
    proposed, `speculative_plans` if FlashInfer plans blocks.
    """
    original = adding_implementation()

    @functools.wraps(original)
    def add_speculative(self, state):
        original(self, state)
        worker = self.scheduler.draft_worker
        reports = {
            "speculative_width": worker.width_report,
            "speculative_copy_ahead": worker.copy_report,
            "speculative_plans": worker.plan_report,
        }
        state.update({name: report for name, report in reports.items() if report})

    return add_speculative


def adding_implementation() -> Callable[[Any, dict], None]:
    """Return SGLang's `_add_speculative`, extended by the implementation that serves, and why."""
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

    original = inspect.unwrap(SchedulerInternalStateController._add_speculative)

    @functools.wraps(original)
    def add_speculative(self, state):
        original(self, state)
        state["speculative_implementation"] = Implementation.of(self.scheduler.server_args).report()

    return add_speculative
