"""Weight updates at run time: from disk, tensors, a process group or IPC.

SGLang hands an update to the target and then to the draft. What fits one does not fit the other, and an error
would end the scheduler or leave half an update behind. Here each model takes its own tensors. Names, shapes
and dtypes are checked first, on all ranks: the draft's with its config, the target's with the checkpoint that
it was started with. If a rank finds a problem, all answer with it and the old weights stay.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
from sglang.srt.runtime_context import get_parallel

from sglang_dflash.srt.configs.checkpoint import FLOATS, StoredTensor, find_file, read_config, tensors_of
from sglang_dflash.srt.configs.draft_formats import FLAT_PEAGLE_ARCHITECTURES
from sglang_dflash.srt.configs.draft_tensors import (
    EMBEDDING,
    HEAD,
    IGNORED_TENSORS,
    canonical_name,
    expected_tensors,
)
from sglang_dflash.srt.configs.speculators_format import is_speculators_config
from sglang_dflash.srt.layers.plain_weight import hold_plain_weights
from sglang_dflash.srt.models.loading import check_tensors, load_tensors
from sglang_dflash.srt.models.quantized_linear import model_layer

logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Any]]


def is_draft(config: dict[str, Any]) -> bool:
    """Return whether a config.json is a draft's."""
    architectures = config.get("architectures") or [""]
    is_named = "DraftModel" in architectures[0] or architectures[0] in FLAT_PEAGLE_ARCHITECTURES
    return is_speculators_config(config) or "dflash_config" in config or is_named


def first_problem(problem: str) -> str:
    """Return, on every rank, the problem of the first rank that has one.

    An empty text is none.
    """
    group = get_parallel().tp_group
    problems = [problem] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(problems, problem, group=group.cpu_group)
    return next((one for one in problems if one), "")


def format_error(error: Exception) -> str:
    """Return the kind and the text of an error."""
    return f"{type(error).__name__}: {error}"


class TensorOwner:
    """Tells a draft's tensors from its target's by their names, for the selector "all".

    A trainer sends a target's tensors as Hugging Face names them: `model.layers.0...`, `lm_head.weight`. A
    draft's names have no prefix. SGLang's targets take many names without a prefix too. A name of
    both models is refused.
    """

    def __init__(self, draft: Any, target: Any):
        expected, _ = expected_tensors(draft.config, draft.draft)
        names = [*expected, *IGNORED_TENSORS, *(name for name, _ in draft.named_parameters())]
        self._of_draft = {_module(name) for name in names} - {"lm_head"}
        paths = [name.split(".") for name, _ in target.named_modules()]
        self._of_target = {".".join(path[start:]) for path in paths for start in range(len(path))}

    def is_drafts(self, name: str) -> bool:
        """Return whether a tensor is the draft's. Raises ValueError if both models have its name."""
        module = _module(canonical_name(name))
        if name.startswith("model.") or module not in self._of_draft:
            return False
        if model_layer(module)[0] in self._of_target:
            raise ValueError(f"{name} may be the target's or the draft's: send it with either's selector")
        return True


def _module(name: str) -> str:
    return name.rpartition(".")[0] or name


def stored_tensors(checkpoint: str, revision: str | None) -> dict[str, StoredTensor] | None:
    """Return the tensors of a target's files by name, without values.

    Returns None for files without readable headers (GGUF, remote weights).
    """
    path = find_file(checkpoint, revision)
    try:
        of_files = tensors_of(os.path.dirname(path or ""))
        found = {without_prefix(name): replace(one, values=None) for name, one in of_files}
    except (ValueError, OSError) as error:
        logger.warning("Weight updates of the target are not checked, its files cannot be read: %s", error)
        return None
    if EMBEDDING in found:  # trainers send a tied head too
        found.setdefault(HEAD, found[EMBEDDING])
    return found


def without_prefix(name: str) -> str:
    """Drop a prefix, in which releases of transformers differ for vision models."""
    return name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")


def compare_tensors(
    sent: Weights, expected: dict[str, StoredTensor], key: Callable[[str], str] = str
) -> None:
    """Raise ValueError naming each tensor of unknown name, other shape or other dtype."""
    problems = []
    for name, tensor in sent:
        one, known = StoredTensor.from_tensor(tensor), expected.get(key(name))
        if known is None:
            problems.append(f"{name}: the model has no such tensor")
        elif one.shape != known.shape:
            problems.append(f"{name} is {one.shape}, expected {known.shape}")
        elif one.dtype != known.dtype and not {one.dtype, known.dtype} <= {*FLOATS}:  # floats are cast
            problems.append(f"{name} is {one.dtype}, expected {known.dtype}")
    if problems:
        raise ValueError("; ".join(problems))


def route_weight_updates(target_runner: Any, draft_runner: Any) -> None:
    """Give both runners an updater that takes their own tensors."""
    draft_runner.weight_updater = drafts = RoutedUpdater(draft_runner, draft_runner.model)
    target_runner.weight_updater = RoutedUpdater(target_runner, draft_runner.model, drafts)


class RoutedUpdater:
    """SGLang's WeightUpdater of one runner, for tensors of the runner's model.

    Args:
        runner: SGLang's, of the target or the draft.
        draft: the draft's model.
        drafts: for the target's: the draft's updater, which checks its tensors before an update is written.

    Attributes:
        selector: of the update: "target", "draft" or "all". SGLang does not pass it on.
    """

    def __init__(self, runner: Any, draft: Any, drafts: "RoutedUpdater | None" = None):
        self._updater, self._model_config = runner.weight_updater, runner.model_config
        self._model, self._draft, self._drafts = runner.model, draft, drafts
        self._kind = "target" if drafts else "draft"
        config = self._model_config
        # Read when first needed, from the files that the server started with.
        self._stored = functools.cache(functools.partial(stored_tensors, config.model_path, config.revision))
        self._owner = TensorOwner(draft, self._model)
        self.selector = "all"
        self._is_whole = False  # a draft must get all its tensors
        self._checked: Any = None  # the draft's part of an update of both, which the target's updater checks
        self._problem = ""  # of some rank, once all ranks know it
        self._has_written = False
        load = self._model.load_weights
        self._load_weights = load if drafts else functools.partial(load_tensors, draft)
        self._model.load_weights = self._load  # here all ways of SGLang end, except for some load formats

    def __getattr__(self, name: str) -> Any:
        return getattr(self._updater, name)

    # -- SGLang's interface

    def update_weights_from_disk(self, model_path: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Load a checkpoint of this runner's kind, which must be whole."""
        # Trainers write the target's weights into bare folders, without a config.json.
        if is_draft(read_config(model_path, None) or {}) != (not self._drafts):
            return True, "Succeeded to update model weights."  # it is the other model's
        before, load = self._model_config.model_path, self._updater.update_weights_from_disk
        self.selector, self._is_whole = self._kind, True
        is_done, message = self._update(lambda: load(model_path, *args, **kwargs))
        self._is_whole = False
        if is_done:
            return True, message
        self._model_config.model_path = before
        return False, f"{model_path!r}: {message}"

    def update_weights_from_tensor(self, named_tensors: Any, load_format: str | None = None):
        """Load tensors, or a flattened bucket of them."""
        load = self._updater.update_weights_from_tensor
        if load_format in (None, "flattened_bucket"):
            return self._update(lambda: load(named_tensors, load_format))

        def update() -> tuple[bool, str]:  # past `load_weights`
            rank = get_parallel().tp_rank
            tensors = [
                (name, one.get(rank) if isinstance(one, LocalSerializedTensor) else one)
                for name, one in named_tensors
            ]
            own = self._on_all_ranks(lambda: self._own(tensors, load_format))
            self._has_written = load_format in ("direct", *self._updater.custom_weight_loaders)
            return load(own, load_format)

        return self._update(update)

    def receive_weights_from_distributed(self, **options: Any) -> Any:
        """Receive tensors, for `load_weights_from_distributed` of both runners."""
        return self._on_all_ranks(lambda: self._updater.receive_weights_from_distributed(**options))

    def load_weights_from_distributed(self, named_tensors: Weights) -> tuple[bool, str]:
        """Load received tensors."""
        return self._update(lambda: self._updater.load_weights_from_distributed(named_tensors))

    def update_weights_from_ipc(self, recv_req: Any) -> tuple[bool, str]:
        """Load tensors from the checkpoint engine, which sends them once, for the target."""
        if not self._drafts:
            return True, "The draft takes no weights from the checkpoint engine."
        self.selector = "target"
        return self._update(lambda: self._updater.update_weights_from_ipc(recv_req))

    def begin_weight_update(self) -> None:
        """Unpack quantized weights. Raises on all ranks if one fails."""
        self._on_all_ranks(self._updater.begin_weight_update)

    def end_weight_update(self, *, run_post_load: bool) -> None:
        """Pack quantized weights. Raises on all ranks if one fails."""
        self._checked = None  # left over if the target's load failed
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
        own = self._on_all_ranks(lambda: self._own(weights))
        self._has_written = True
        return self._on_all_ranks(lambda: self._load_weights(own))

    def _own(self, weights: Weights, load_format: str | None = None) -> Any:
        """Return this model's tensors, as `_check` does.

        Of an update of both models the target is the first to load. It checks the draft's tensors too, so
        that both models change or none.
        """
        if self.selector != "all":
            return self._check(list(weights), load_format)
        if not self._drafts:
            checked, self._checked = self._checked, None
            return checked
        own: list[tuple[str, Any]] = []
        drafts: list[tuple[str, Any]] = []
        for name, tensor in weights:
            (drafts if self._owner.is_drafts(name) else own).append((name, tensor))
        own = self._check(own, load_format)
        self._drafts._checked = self._drafts._check(drafts, load_format)
        return own

    def _check(self, own: list[tuple[str, Any]], load_format: str | None) -> Any:
        """Return this model's tensors if they fit the checkpoint, or the model's parameters.

        Raises ValueError if they do not. The draft's are `CheckedTensors` unless there is a load format.
        """
        if load_format == "direct":
            parameters = self._model.named_parameters()
            compare_tensors(own, {name: StoredTensor.from_tensor(one) for name, one in parameters})
        elif load_format is not None:
            pass  # a loader of the user's own, which may take other names
        elif not self._drafts:
            return check_tensors(self._draft, own, is_update=not self._is_whole)
        elif (stored := self._stored()) is not None:
            compare_tensors(own, stored, without_prefix)
        return own


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

    update_weights_from_tensor = _answering_errors("update_weights_from_tensor")
    update_weights_from_distributed = _answering_errors("update_weights_from_distributed")
    begin_weight_update = _answering_errors("begin_weight_update")
    end_weight_update = _answering_errors("end_weight_update")
