"""What `/server_info` says beside SGLang's own fields."""

import functools
import inspect


def reporting_width():
    """`SchedulerInternalStateController._add_speculative` that adds `speculative_width` where the width is
    chosen, and `speculative_copy_ahead` where copies are proposed."""
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

    original = inspect.unwrap(SchedulerInternalStateController._add_speculative)

    @functools.wraps(original)
    def add_speculative(self, state):
        original(self, state)
        report = self.scheduler.draft_worker.width_report
        if report:
            state["speculative_width"] = report
        report = self.scheduler.draft_worker.copy_report
        if report:
            state["speculative_copy_ahead"] = report

    return add_speculative
