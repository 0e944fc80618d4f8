"""Weight updates at run time: from disk, tensors, a process group or IPC.

SGLang hands an update to the target and then to the draft, whose tensors may have the same names. An error
ends the scheduler. Here each model takes its own tensors, and an error is an answer, the same on all ranks.
A draft's tensors are checked before anything is written.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache, partial, partialmethod
from typing import Any

import torch
from sglang.srt.managers import io_struct
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.hf_transformers_utils import get_config

from sglang_dflash.srt.configs.checkpoint import (
    MASK_EMBEDDING_FILE,
    have_one_mask,
    read_file,
    read_mask_embedding,
    tensor_shapes,
)
from sglang_dflash.srt.configs.draft_formats import FLAT_PEAGLE_ARCHITECTURES
from sglang_dflash.srt.configs.draft_kinds import DSPARK_ARCHITECTURES, read_draft_config
from sglang_dflash.srt.configs.draft_tensors import IGNORED_TENSORS, canonical_name, expected_tensors
from sglang_dflash.srt.configs.speculators_format import is_speculators_config
from sglang_dflash.srt.layers.plain_weight import hold_plain_weights
from sglang_dflash.srt.models.loading import check_tensors, load_tensors, model_layer
from sglang_dflash.srt.patching import WORKER, patches

Weights = Iterable[tuple[str, torch.Tensor]]


class Failure(ValueError):
    """An error of a weight update that all ranks know."""


def on_all_ranks(run: Callable[[], Any]) -> Any:
    """Run, and raise Failure on all ranks if one fails, with the first rank's error."""
    problem, group = "", get_parallel().tp_group
    try:
        result = run()
    except Failure:
        raise
    except Exception as error:  # a broken checkpoint can raise anything
        problem = f"{type(error).__name__}: {error}"
    problems = [problem] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(problems, problem, group=group.cpu_group)
    if any(problems):
        raise Failure(next(filter(None, problems)))
    return result


def owner_of_checkpoint(folder: str, config: dict[str, Any] | None, draft: Any) -> str:
    """Return whose weights a folder has, "target" or "draft", by its config.json or tensors."""
    if config is None:  # as trainers write weights
        modules = {_module_of(canonical_name(name)) for name in tensor_shapes(folder) or ()}
        return "draft" if modules and modules <= _modules_of_draft(draft) else "target"
    name = (config.get("architectures") or [""])[0]
    is_named = "DraftModel" in name or name in (*FLAT_PEAGLE_ARCHITECTURES, *DSPARK_ARCHITECTURES)
    return "draft" if is_named or "dflash_config" in config or is_speculators_config(config) else "target"


def _modules_of_draft(draft: Any) -> set[str]:
    names = *expected_tensors(draft.config, draft.draft)[0], *IGNORED_TENSORS, *dict(draft.named_parameters())
    return {_module_of(name) for name in names}


def check_config(folder: str, overrides: dict[str, Any], draft: Any) -> None:
    """Raise ValueError if a folder's config or mask embedding is not the served draft's.

    An update changes weights alone. A block may have any size, as a flag may have set the served one's.

    Args:
        folder: the checkpoint.
        overrides: fields of `--json-model-override-args`, which the served config has too.
        draft: the served draft's model.
    """
    config = get_config(folder, trust_remote_code=False, model_override_args=overrides)
    new = read_draft_config(config, folder)
    if different := draft.draft.differences(new, but=("block_size", "speculative_tokens")):
        raise ValueError(f"an update changes weights alone, but the configs differ in {different}")
    if not have_one_mask(draft.saved_mask, read_mask_embedding(folder)):
        raise ValueError(f"an update changes weights alone, but {MASK_EMBEDDING_FILE} is another draft's")


@lru_cache(maxsize=1)
def owner_by_name(draft: Any, target: Any) -> Callable[[str], str]:
    """Make the function that tells by its name whose a tensor is, "target" or "draft".

    A trainer sends a target's tensors as Hugging Face names them: `model.layers.0...`, `lm_head.weight`. A
    draft's names have no prefix. SGLang's targets take many names without a prefix too. The function raises
    ValueError for a name of both models.
    """
    of_draft = _modules_of_draft(draft) - {"lm_head"}
    of_target = [f".{path}" for path, _ in target.named_modules()]

    def owner(name: str) -> str:
        module = _module_of(canonical_name(name))
        if name.startswith("model.") or module not in of_draft:
            return "target"
        if any(path.endswith(f".{model_layer(module)[0]}") for path in of_target):
            raise ValueError(f"{name} may be the target's or the draft's: send it with either's selector")
        return "draft"

    return owner


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or name


@patches(
    "sglang.srt.managers.scheduler.SchedulerWeightUpdaterManager",
    at=WORKER,
    signature="(tp_worker, draft_worker, memory_saver_adapter, flush_cache, is_fully_idle, scheduler, "
    "metrics_collector)",
    feature="weight updates",
    upstream="docs/dev/upstream/weight-updates.md",
)
class WeightUpdateRequests(Manager):
    """Entry of weight updates. While one runs, the models' `load_weights` is `_load`."""

    _owner: str | None = None  # of a whole checkpoint or stream, whose request has no selector
    _failure: Failure | None = None

    def _select_runners(self, selector: str = "all") -> Any:
        self._selector = self._owner or selector
        return super()._select_runners(self._selector)

    def answer(self, update: Callable[[Any, Any], Any], recv_req: Any) -> Any:
        """Run an update of SGLang's, on all ranks or with an answer that says why not."""
        self._models = {owner: runner.model for owner, runner in super()._select_runners()}
        self._failure, self._written = None, ""
        for owner, model in self._models.items():
            model.load_weights = partial(self._load, owner)
        try:
            return on_all_ranks(lambda: self._run(update, recv_req))
        except Failure as failure:
            state = f"the {self._written}'s weights may be partly updated" if self._written else ""
            message = f"No weight update, {state or 'the old weights stay'}: {failure}"
            output = getattr(io_struct, type(recv_req).__name__.replace("ReqInput", "ReqOutput"))
            return output(success=False, message=message)
        finally:
            self._owner = None
            for model in self._models.values():
                del model.load_weights
            self._models["draft"].renew_cast_weights()

    def _run(self, update: Callable[[Any, Any], Any], recv_req: Any) -> Any:
        if isinstance(recv_req, io_struct.UpdateWeightFromDiskReqInput):
            if recv_req.recapture_cuda_graph:
                raise ValueError(
                    "recapture_cuda_graph is not supported with DFLASH: SGLang does not know its graphs"
                )
            folder, draft = recv_req.model_path, self._models["draft"]
            config = read_file(folder)
            self._owner = owner_of_checkpoint(folder, config, draft)
            if config and self._owner == "draft":
                runner = dict(super()._select_runners())["draft"]
                check_config(folder, runner.model_config.model_override_args, draft)
        elif isinstance(recv_req, io_struct.UpdateWeightsFromIPCReqInput):
            self._owner = "target"  # the checkpoint engine sends its stream once
        elif isinstance(recv_req, io_struct.UpdateWeightsFromTensorReqInput):
            if (load_format := recv_req.load_format) not in (None, "flattened_bucket"):  # past `load_weights`
                if recv_req.selector == "all":
                    raise ValueError(f'load_format {load_format!r} needs the selector "target" or "draft"')
                self._written = recv_req.selector
        is_agreed = not self._written and hasattr(recv_req, "flush_cache")  # by `_load`, before it writes
        try:
            output = update(self, recv_req)
        except Exception:
            if not is_agreed:  # other ranks wait at the end
                torch.distributed.barrier(group=self.tp_cpu_group)
            raise
        if self._failure is not None:  # SGLang may have caught it
            raise self._failure
        if not output.success and not self._written:
            raise ValueError(output.message)
        return output

    def _load(self, owner: str, weights: Weights) -> Any:
        """Load a model's tensors."""
        if self._failure is not None:  # SGLang loads once more after a failure, then packs quantized weights
            return None
        model = self._models[owner]
        load = partial(load_tensors, model) if owner == "draft" else partial(type(model).load_weights, model)
        try:
            own = on_all_ranks(lambda: self._own_tensors(owner, weights))
            self._written = owner
            with hold_plain_weights(model):
                return on_all_ranks(lambda: load(own))
        except Failure as failure:
            self._failure = failure
            raise

    def _own_tensors(self, model_owner: str, weights: Weights) -> Any:
        """Return a model's tensors; the draft's as checked.

        Of an update of both models the target is the first to load, and checks the draft's tensors before.
        """
        if self._selector == "target":
            return weights
        draft = self._models["draft"]
        tensors: dict[str, list[tuple[str, torch.Tensor]]] = {"target": [], "draft": []}
        owner = owner_by_name(draft, self._models["target"])
        for name, tensor in weights:
            tensors["draft" if self._selector == "draft" else owner(name)].append((name, tensor))
        checked = check_tensors(draft, tensors["draft"], is_update=self._owner is None)
        return checked if model_owner == "draft" else tensors["target"]

    update_weights_from_disk: Any = partialmethod(answer, Manager.update_weights_from_disk)
    update_weights_from_tensor: Any = partialmethod(answer, Manager.update_weights_from_tensor)
    update_weights_from_distributed: Any = partialmethod(answer, Manager.update_weights_from_distributed)
    update_weights_from_ipc: Any = partialmethod(answer, Manager.update_weights_from_ipc)
    begin_weight_update: Any = partialmethod(answer, Manager.begin_weight_update)
    end_weight_update: Any = partialmethod(answer, Manager.end_weight_update)
