"""Weight updates at run time: from disk, tensors, a process group or IPC.

SGLang hands an update to the target and then to the draft, whose tensors may have the same names. An error
ends the scheduler. Here each model takes its own tensors, and an error is an answer, the same on all ranks.
A draft's tensors are checked before anything is written.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.runtime_context import get_parallel

from sglang_dflash.srt.configs.checkpoint import read_config
from sglang_dflash.srt.configs.draft_formats import FLAT_PEAGLE_ARCHITECTURES
from sglang_dflash.srt.configs.draft_kinds import DSPARK_ARCHITECTURES
from sglang_dflash.srt.configs.draft_tensors import IGNORED_TENSORS, canonical_name, expected_tensors
from sglang_dflash.srt.configs.speculators_format import is_speculators_config
from sglang_dflash.srt.layers.plain_weight import hold_plain_weights
from sglang_dflash.srt.models.loading import CheckedTensors, check_tensors, load_tensors
from sglang_dflash.srt.models.quantized_linear import model_layer
from sglang_dflash.srt.patching import WORKER, patches

Weights = Iterable[tuple[str, torch.Tensor]]


def is_draft(config: dict[str, Any]) -> bool:
    """Return whether a config.json is a draft's."""
    architectures = config.get("architectures") or [""]
    others = *FLAT_PEAGLE_ARCHITECTURES, *DSPARK_ARCHITECTURES
    is_named = "DraftModel" in architectures[0] or architectures[0] in others
    return is_speculators_config(config) or "dflash_config" in config or is_named


def first_problem(problem: str) -> str:
    """Return, on every rank, the problem of the first rank that has one, or an empty text."""
    group = get_parallel().tp_group
    problems = [problem] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(problems, problem, group=group.cpu_group)
    return next(filter(None, problems), "")


def format_error(error: Exception) -> str:
    """Return the kind and the text of an error."""
    return f"{type(error).__name__}: {error}"


def make_owner(draft: Any, target: Any) -> Callable[[str], bool]:
    """Make the function that tells by its name whether a tensor belongs to the draft.

    It is for the selector "all". A trainer sends a target's tensors as Hugging Face names them:
    `model.layers.0...`, `lm_head.weight`. A draft's names have no prefix. SGLang's targets take many names
    without a prefix too. The function raises ValueError for a name of both models.
    """
    expected, _ = expected_tensors(draft.config, draft.draft)
    names = [*expected, *IGNORED_TENSORS, *(name for name, _ in draft.named_parameters())]
    of_draft = {_module(name) for name in names} - {"lm_head"}
    paths = [name.split(".") for name, _ in target.named_modules()]
    of_target = {".".join(path[start:]) for path in paths for start in range(len(path))}

    def belongs_to_draft(name: str) -> bool:
        module = _module(canonical_name(name))
        if name.startswith("model.") or module not in of_draft:
            return False
        if model_layer(module)[0] in of_target:
            raise ValueError(f"{name} may be the target's or the draft's: send it with either's selector")
        return True

    return belongs_to_draft


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def route_weight_updates(target_runner: Any, draft_runner: Any) -> None:
    """Give both runners an updater that takes their own tensors."""
    draft = draft_runner.model
    belongs_to_draft = make_owner(draft, target_runner.model)
    for runner in (target_runner, draft_runner):
        runner.weight_updater = RoutedUpdater(runner, draft, belongs_to_draft)


class RoutedUpdater:
    """SGLang's WeightUpdater of one runner, for tensors of the runner's model.

    Args:
        runner: SGLang's, of the target or the draft.
        draft: the draft's model.
        belongs_to_draft: tells by its name whose a tensor is.

    Attributes:
        selector: of the update: "target", "draft" or "all". SGLang does not pass it on.
    """

    def __init__(self, runner: Any, draft: Any, belongs_to_draft: Callable[[str], bool]):
        self._updater, self._model, self._draft = runner.weight_updater, runner.model, draft
        self._belongs_to_draft = belongs_to_draft
        self._kind = "draft" if runner.model is draft else "target"
        self.selector = "all"
        self._is_whole = False  # a draft must get all its tensors
        self._problem = ""  # of some rank, once all ranks know it
        self._has_written = False
        self._load_weights = self._model.load_weights
        self._model.load_weights = self._load  # all ways of SGLang end here, except for some load formats

    def __getattr__(self, name: str) -> Any:
        return getattr(self._updater, name)

    # -- SGLang's interface

    def update_weights_from_disk(self, model_path: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Load a checkpoint of this runner's kind. A draft's must be whole."""
        # Trainers write the target's weights into bare folders, without a config.json.
        if is_draft(read_config(model_path, None) or {}) != (self._kind == "draft"):
            return True, "Succeeded to update model weights."  # it is the other model's
        self.selector, self._is_whole = self._kind, True
        load = self._updater.update_weights_from_disk
        is_done, message = self._update(lambda: load(model_path, *args, **kwargs))
        self._is_whole = False
        return is_done, message if is_done else f"{model_path!r}: {message}"

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None = None):
        """Load tensors, or a flattened bucket of them."""

        def update() -> tuple[bool, str]:
            if load_format not in (None, "flattened_bucket"):  # past `load_weights`
                if self.selector == "all":
                    raise ValueError(f'load_format {load_format!r} needs the selector "target" or "draft"')
                self._has_written = True
            return self._updater.update_weights_from_tensor(named_tensors, load_format)

        return self._update(update)

    def receive_weights_from_distributed(self, **options: Any) -> Any:
        """Receive tensors, for `load_weights_from_distributed` of both runners."""
        return self._on_all_ranks(lambda: self._updater.receive_weights_from_distributed(**options))

    def load_weights_from_distributed(self, named_tensors: Any) -> tuple[bool, str]:
        """Load received tensors."""
        return self._update(lambda: self._updater.load_weights_from_distributed(named_tensors))

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        """Load tensors from the checkpoint engine, which sends them once, for the target."""
        if self._kind == "draft":
            return True, "The draft takes no weights from the checkpoint engine."
        self.selector = "target"
        return self._update(lambda: self._updater.update_weights_from_ipc(recv_req))

    def begin_weight_update(self) -> None:
        """Unpack quantized weights. Raises on all ranks if one fails."""
        self._on_all_ranks(self._updater.begin_weight_update)

    def end_weight_update(self, *, run_post_load: bool) -> None:
        """Pack quantized weights. Raises on all ranks if one fails."""
        self._on_all_ranks(lambda: self._updater.end_weight_update(run_post_load=run_post_load))
        self._draft.renew_copies()

    # -- an update

    def _update(self, update: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
        """Run an update of SGLang's, and return its outcome, which is the same on all ranks."""
        self._problem, self._has_written = "", False
        try:
            with hold_plain_weights(self._model):
                is_done, message = update()
            problem = "" if is_done else message
        except Exception as error:  # a broken checkpoint can raise anything
            problem = format_error(error)
        self._problem = self._problem or first_problem(problem)
        if self._has_written:
            self._draft.renew_copies()
        if not self._problem:
            return True, message
        state = "its weights may be partly updated" if self._has_written else "the old weights stay"
        return False, f"No weight update of the {self._kind}, {state}: {self._problem}"

    def _on_all_ranks(self, run: Callable[[], Any]) -> Any:
        """Run, and raise ValueError on all ranks if one fails."""
        result, problem = None, ""
        try:
            result = run()
        except Exception as error:
            problem = format_error(error)
        self._problem = first_problem(problem)
        if self._problem:
            raise ValueError(self._problem)
        return result

    def _load(self, weights: Weights) -> Any:
        """Load this model's tensors, in place of its `load_weights`."""
        if self._problem:  # SGLang loads once more after a failure, then packs quantized weights again
            return None
        own, checked = self._on_all_ranks(lambda: self._check(weights))
        self._has_written = True
        if self._kind == "draft":
            return self._on_all_ranks(lambda: load_tensors(self._draft, checked))
        return self._on_all_ranks(lambda: self._load_weights(own))

    def _check(self, weights: Weights) -> tuple[Weights, CheckedTensors | None]:
        """Return the target's tensors, and the draft's as checked.

        Of an update of both models the target is the first to load, and checks the draft's tensors before.

        Raises:
            ValueError: The draft's tensors do not fit, or a tensor may be of either model.
        """
        if self.selector == "target":
            return weights, None
        tensors: dict[bool, list[tuple[str, torch.Tensor]]] = {False: [], True: []}
        for name, tensor in weights:
            is_of_draft = self.selector == "draft" or self._belongs_to_draft(name)
            tensors[is_of_draft].append((name, tensor))
        return tensors[False], check_tensors(self._draft, tensors[True], is_update=not self._is_whole)


def _answering_errors(name: str) -> Callable[[Any, Any], Any]:
    """Wrap a method of SGLang's entry so that an error is answered as a failure.

    Ranks without one are in the next call of `first_problem`, and then in SGLang's barrier.
    """
    update = getattr(SchedulerWeightUpdaterManager, name)

    @functools.wraps(update)
    def answer(self: Any, recv_req: Any) -> Any:
        try:
            return update(self, recv_req)
        except Exception as error:
            message = f"No weight update, the old weights stay: {first_problem(format_error(error))}"
            torch.distributed.barrier(group=self.tp_cpu_group)
            output = getattr(io_struct, type(recv_req).__name__.replace("ReqInput", "ReqOutput"))
            return output(success=False, message=message)

    return answer


@patches(
    "sglang.srt.managers.scheduler.SchedulerWeightUpdaterManager",
    at=WORKER,
    signature="(tp_worker, draft_worker, memory_saver_adapter, flush_cache, is_fully_idle, scheduler, "
    "metrics_collector)",
    feature="weight updates of the draft from tensors",
    upstream="docs/dev/upstream/weight-updates.md",
)
class WeightUpdateRequests(SchedulerWeightUpdaterManager):
    """Entry of weight updates, which passes their selector on and answers errors.

    A payload may be unreadable or too short for the ranks, or a selector unknown.
    """

    def _select_runners(self, selector: str = "all") -> Any:
        runners = super()._select_runners(selector)
        for _, runner in runners:
            if isinstance(runner.weight_updater, RoutedUpdater):
                runner.weight_updater.selector = selector
        return runners

    update_weights_from_tensor = _answering_errors("update_weights_from_tensor")
    update_weights_from_distributed = _answering_errors("update_weights_from_distributed")
    begin_weight_update = _answering_errors("begin_weight_update")
    end_weight_update = _answering_errors("end_weight_update")
