"""SGLang's entry of weight updates, with the selector passed on and errors answered."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sglang_dflash.srt.speculative.targets.weight_updates import RoutedUpdater, described, first_problem


class WeightUpdateRequests(SchedulerWeightUpdaterManager):
    """SGLang's entry of update requests into the scheduler, which its errors would end.

    A payload may be unreadable or too short for the ranks, or a selector unknown.
    """

    def _select_runners(self, selector: str = "all") -> Any:
        runners = super()._select_runners(selector)
        for _, runner in runners:
            if isinstance(runner.weight_updater, RoutedUpdater):
                runner.weight_updater.selector = selector
        return runners

    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        return self._answered(super().update_weights_from_tensor, recv_req)

    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        return self._answered(super().update_weights_from_distributed, recv_req)

    def begin_weight_update(self, recv_req: Any) -> Any:
        return self._answered(super().begin_weight_update, recv_req)

    def end_weight_update(self, recv_req: Any) -> Any:
        return self._answered(super().end_weight_update, recv_req)

    def _answered(self, update: Callable[[Any], Any], recv_req: Any) -> Any:
        """Run an update, and answer an error as a failure.

        Ranks without one are in the next call of `first_problem`, and then in SGLang's barrier.
        """
        try:
            return update(recv_req)
        except Exception as error:
            message = f"No weight update, the old weights stay: {first_problem(described(error))}"
            torch.distributed.barrier(group=self.tp_cpu_group)
            answer = getattr(io_struct, type(recv_req).__name__.replace("ReqInput", "ReqOutput"))
            return answer(success=False, message=message)
