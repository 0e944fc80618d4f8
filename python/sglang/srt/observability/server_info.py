"""The implementation of DFLASH that serves, and our fields of `/server_info`.

The launcher decides once (`arg_groups/fallback.py`). The decision travels to every process on the record of
server arguments.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from sglang_dflash import __version__

# The seal of the record passes attributes that begin with an underscore, and pickles them.
_ATTRIBUTE = "_dflash_implementation"
# The target is loaded by then, on every rank.
RANKS_AGREE_WITHIN = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Implementation:
    """The implementation that serves, as `/server_info` reports it.

    Attributes:
        name: Distribution that the implementation belongs to.
        version: Version of that distribution.
        because: Reasons why the built-in serves. Empty if our DFLASH serves.
        lost: Features of our DFLASH that the built-in lacks.
    """

    name: str = "sglang-dflash"
    version: str = __version__
    because: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def is_builtin(self) -> bool:
        return bool(self.because)

    @classmethod
    def from_server_args(cls, server_args: Any) -> "Implementation":
        """Return the decision on a record. Without one, our DFLASH serves."""
        return getattr(server_args, _ATTRIBUTE, None) or cls()

    def decide(self, server_args: Any) -> None:
        """Write the decision on the record."""
        setattr(server_args, _ATTRIBUTE, self)


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


def make_add_speculative() -> Callable[[Any, dict], None]:
    """Return SGLang's `_add_speculative`, extended by who serves, why, and reports.

    `speculative_width` is added if the width is chosen per cycle, `speculative_copy_ahead` if copies are
    proposed, `speculative_plans` if FlashInfer plans blocks.
    """
    from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController

    original = inspect.unwrap(SchedulerInternalStateController._add_speculative)

    @functools.wraps(original)
    def add_speculative(self, state):
        original(self, state)
        implementation = Implementation.from_server_args(self.scheduler.server_args)
        state["speculative_implementation"] = asdict(implementation)
        if implementation.is_builtin:
            return
        worker = self.scheduler.draft_worker
        reports = {
            "speculative_width": worker.width_report,
            "speculative_copy_ahead": worker.copy_report,
            "speculative_plans": worker.plan_report,
        }
        state.update({name: report for name, report in reports.items() if report})

    return add_speculative
