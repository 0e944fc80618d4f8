"""Our fields of `/server_info`, and the check that all ranks run ours."""

from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from sglang_dflash.srt.arg_groups.implementation import Implementation
from sglang_dflash.srt.patching import FALLBACK, WORKER, patches

# The target is loaded by then, on every rank.
RANKS_AGREE_WITHIN = timedelta(minutes=5)


def check_ranks_run_ours() -> None:
    """Raise ValueError unless all ranks arrive here: another may run the built-in.

    Nodes decide by themselves, from their own files and devices.
    """
    import torch.distributed as dist
    from sglang.srt.distributed import get_tp_group

    if not dist.is_initialized() or get_tp_group().world_size == 1:
        return
    try:
        dist.monitored_barrier(get_tp_group().cpu_group, RANKS_AGREE_WITHIN, wait_all_ranks=True)
    except RuntimeError as error:
        raise ValueError(
            f"DFLASH: not all ranks run sglang-dflash ({error}). Give all nodes the same draft, flags and "
            "devices, and see in their logs who serves."
        ) from error


@patches(
    "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
    at=(WORKER, FALLBACK),
    signature="(self, state)",
    feature="DFLASH's reports in /server_info",
    upstream="docs/dev/upstream/plugin-doors.md",
)
def add_reports(original: Callable[[Any, dict], None], controller: Any, state: dict) -> None:
    """Report in /server_info who serves and why, and what is in force.

    `speculative_width` is added if the width is chosen per cycle, `speculative_copy_ahead` if copies are
    proposed, `speculative_record` if requests are recorded.
    """
    original(controller, state)
    scheduler = controller.scheduler
    implementation = Implementation.from_server_args(scheduler.server_args)
    state["speculative_implementation"] = asdict(implementation)
    if implementation.is_builtin:
        return
    state.update({name: report for name, report in scheduler.draft_worker.reports.items() if report})
