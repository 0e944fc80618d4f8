"""Every change we make to SGLang: where, how, why.

`AT_LOAD` is in force in every process once SGLang has loaded its plugins. `AT_WORKER` is applied by the
`create_worker` hook, so only in a scheduler process that really runs DFLASH: any other server keeps stock code.
Each target is looked up and its signature compared before it is touched; a mismatch ends the process, because
a half-hooked server would answer with the wrong implementation. Tests walk both tables.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Change:
    """One change to SGLang.

    target: dotted path of a callable, or of a registry for kind "entry".
    kind: "around" (SGLang's HookRegistry), "resolution" (SGLang's resolution hooks), "replace" (rebind a name),
        "class" (rebind a class), "entry" (write `key` of a dict).
    signature: the parameters; of a class those that SGLang passes; None for a registry.
    build: returns the hook or the new value; called when the change is applied, so that heavy imports wait.
    """

    target: str
    kind: str
    signature: str | None
    why: str
    build: Callable[[], Any]
    key: str | None = None
    cpu_only: bool = False


def _around_handle_server_args():
    from sglang_dflash.srt.arg_groups.dflash_args import resolve_dflash_args

    def handle(original, self, server_args):
        return resolve_dflash_args(server_args) if self.is_dflash() else original(self, server_args)

    return handle


def _around_add_cli_args():
    from sglang_dflash.srt.arg_groups.dflash_flags import add_flags

    def add(original, parser):
        original(parser)
        add_flags(parser)

    return add


def _around_create_worker():
    def create(original, self, server_args):
        if not self.is_dflash():
            return original(self, server_args)
        install_at_worker()
        from sglang_dflash.srt.speculative.dflash_worker import DFlashWorker

        return DFlashWorker

    return create


def _default_cpu_args():
    from sglang_dflash.srt.arg_groups.dflash_args import default_cpu_args

    return default_cpu_args


def _detect_speculators_model():
    from sglang_dflash.srt.arg_groups.checkpoint_detection import detect_speculators_model

    return detect_speculators_model


def _draft_config_parser():
    from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser

    return DraftConfigParser


def _check_draft_path():
    from sglang_dflash.srt.arg_groups.dflash_args import check_draft_path

    return check_draft_path


def _draft_model():
    from sglang_dflash.srt.models.dflash import DFlashDraftModel

    return DFlashDraftModel


def _peagle_model():
    from sglang_dflash.srt.models.peagle import PEagleDraftModel

    return PEagleDraftModel


def _cpu_attention():
    from sglang_dflash.srt.layers.attention.torch_native_spec import TorchNativeSpecAttnBackend

    return TorchNativeSpecAttnBackend


def _request_validation():
    from sglang_dflash.srt.speculative.dflash_utils import validate_dflash_request

    return validate_dflash_request


def _verify_input():
    from sglang_dflash.srt.speculative.dflash_info import DFlashVerifyInput

    return DFlashVerifyInput


def _verify_mask_policy():
    from sglang_dflash.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    return resolve_dflash_verify_mask_policy


def _server_info():
    from sglang_dflash.srt.observability.server_info import reporting_width

    return reporting_width()


_ALGORITHM = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm"

AT_LOAD = (
    Change(
        target="sglang.srt.arg_groups.parallel_hook.handle_deprecated_dp_attention",
        kind="resolution",
        signature="(server_args)",
        why="--model-path may name a speculators checkpoint, and PEAGLE is DFLASH to SGLang; the first step, before any reader",
        build=_detect_speculators_model,
    ),
    Change(
        target="sglang.srt.configs.model_config_parser_registry._MODEL_CONFIG_PARSER_REGISTRY",
        kind="entry",
        key="hf",
        signature=None,
        why="read speculators drafts, whose config transformers rejects, wherever SGLang reads a draft's config",
        build=_draft_config_parser,
    ),
    Change(
        target="sglang.srt.arg_groups.platform_hook.handle_cpu_backends",
        kind="resolution",
        signature="(server_args)",
        why="on a CPU, SGLang defaults to intel_amx, whose kernels the stand-in lacks, and to all memory for KV",
        build=_default_cpu_args,
        cpu_only=True,
    ),
    Change(
        target="sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        kind="resolution",
        signature="(server_args)",
        why="name a missing draft before SGLang tries to read its config",
        build=_check_draft_path,
    ),
    Change(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        kind="around",
        signature="(parser)",
        why="offer DFLASH's own flags on SGLang's command line",
        build=_around_add_cli_args,
    ),
    Change(
        target=f"{_ALGORITHM}.handle_server_args",
        kind="around",
        signature="(self, server_args)",
        why="resolve and validate DFLASH's arguments with our rules",
        build=_around_handle_server_args,
    ),
    Change(
        target=f"{_ALGORITHM}.create_worker",
        kind="around",
        signature="(self, server_args)",
        why="run our worker, and apply AT_WORKER just before it is built",
        build=_around_create_worker,
    ),
)

AT_WORKER = (
    Change(
        target="sglang.srt.models.registry.ModelRegistry.models",
        kind="entry",
        key="DFlashDraftModel",
        signature=None,
        why="load drafts with our model class",
        build=_draft_model,
    ),
    Change(
        target="sglang.srt.models.registry.ModelRegistry.models",
        kind="entry",
        key="PEagleDraftModel",
        signature=None,
        why="load P-EAGLE drafts, which SGLang has no model for",
        build=_peagle_model,
    ),
    Change(
        target="sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS",
        kind="entry",
        key="torch_native",
        signature=None,
        why="torch_native knows neither TARGET_VERIFY nor a non-causal block; the name stays, the engine keys on it",
        build=_cpu_attention,
        cpu_only=True,
    ),
    Change(
        target="sglang.srt.managers.scheduler.validate_dflash_request",
        kind="replace",
        signature="(req, enable_overlap)",
        why="answer a request DFLASH cannot serve exactly with HTTP 400",
        build=_request_validation,
    ),
    Change(
        target="sglang.srt.speculative.dflash_info.DFlashVerifyInput",
        kind="class",
        signature="(draft_token, positions, draft_token_num, custom_mask, capture_hidden_mode, ragged_verify_layout)",
        why="SGLang builds one to capture CUDA graphs with; replays must meet the kind we run",
        build=_verify_input,
    ),
    Change(
        target="sglang.srt.speculative.dflash_utils.resolve_dflash_verify_mask_policy",
        kind="replace",
        signature="(attn_backend)",
        why="no CUDA graph is captured with a mask, as no block is run with one",
        build=_verify_mask_policy,
    ),
    Change(
        target="sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        kind="replace",
        signature="(self, state)",
        why="/server_info says which verify width is in force and why",
        build=_server_info,
    ),
)


def install_at_load() -> None:
    """Check every AT_LOAD target, then register the hooks. SGLang applies them when all plugins have run."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    changes = _relevant(AT_LOAD)
    for change in changes:
        check(change)
    for change in changes:
        if change.kind == "resolution":
            register_resolution_hook(change.target.rpartition(".")[2])(change.build())
        elif change.kind == "around":
            HookRegistry.register(change.target, change.build(), HookType.AROUND)
        else:
            _rebind(change)


def install_at_worker() -> None:
    """Check and apply AT_WORKER in this scheduler process."""
    changes = _relevant(AT_WORKER)
    for change in changes:
        check(change)
    for change in changes:
        _rebind(change)


def _rebind(change: Change) -> None:
    value = change.build()
    owner, target = resolve(change.target)
    if change.kind == "entry":
        target[change.key] = value
    else:
        setattr(owner, change.target.rpartition(".")[2], value)


def check(change: Change) -> None:
    """Raise SystemExit unless the target exists with the parameters we expect."""
    try:
        _, target = resolve(change.target)
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"sglang-dflash: SGLang has no {change.target} to change ({error}). Needed to: {change.why}")
    if change.signature is None:
        if not hasattr(target, "__setitem__"):
            raise SystemExit(f"sglang-dflash: {change.target} is not a registry. Needed to: {change.why}")
        return
    parameters = list(inspect.signature(inspect.unwrap(target)).parameters)
    wanted = change.signature.strip("()").split(", ")
    if not set(wanted) <= set(parameters) if change.kind == "class" else parameters != wanted:
        found = f"({', '.join(parameters)})"
        raise SystemExit(
            f"sglang-dflash: {change.target} takes {found}, expected {change.signature}. Needed to: {change.why}"
        )


def resolve(path: str) -> tuple[Any, Any]:
    """The object a dotted path names, and what holds it."""
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:split])
        try:
            owner = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise
            continue
        for name in parts[split:-1]:
            owner = getattr(owner, name)
        return owner, getattr(owner, parts[-1])
    raise ImportError(f"no module along {path}")


def _relevant(changes: tuple[Change, ...]) -> list[Change]:
    from sglang_dflash.srt.hardware_backend.cpu import runtime

    return [change for change in changes if runtime.is_active() or not change.cpu_only]
