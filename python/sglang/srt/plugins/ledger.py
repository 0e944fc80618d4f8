"""Every change we make to SGLang: where, how, why.

`AT_LOAD` is in force in every process once SGLang has loaded its plugins. `AT_WORKER` is applied by the
`create_worker` hook, so only in a scheduler process that really runs DFLASH: any other server keeps stock code.
`AT_CPU_ATTENTION` is applied where our CPU attention is built: with DFLASH, and for targets that stock SGLang cannot run
on a CPU at all.
Each target is looked up and its signature compared before it is touched; a mismatch ends the process, because
a half-hooked server would answer with the wrong implementation. Tests walk both tables.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dflash.srt.configs.dflash2_config import DFLASH2_ARCHITECTURES


@dataclass(frozen=True, slots=True)
class Change:
    """One change to SGLang.

    target: dotted path of a callable, or of a registry for kind "entry".
    kind: "around" (SGLang's HookRegistry), "resolution" (SGLang's resolution hooks), "replace" (rebind a name),
        "class" (rebind a class), "entry" (write `key` of a dict).
    signature: the parameters; of a class those that SGLang passes; None for a registry, and where Python knows none.
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


def _dflash2_model():
    from sglang_dflash.srt.models.dflash2 import DFlash2DraftModel

    return DFlash2DraftModel


def _peagle_model():
    from sglang_dflash.srt.models.peagle import PEagleDraftModel

    return PEagleDraftModel


def _pass_backend_lists_on_cpu():
    from sglang_dflash.srt.arg_groups.dflash_args import pass_backend_lists_on_cpu

    return pass_backend_lists_on_cpu


def _cpu_attention():
    def create(runner):
        from sglang_dflash.srt.layers.attention.torch_native_spec import create_cpu_attention

        return create_cpu_attention(runner)

    return create


def _absorbed_mla():
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttnForwardMethod

    return lambda attention, forward_batch: AttnForwardMethod.MLA


def _capture():
    from sglang_dflash.srt.speculative.target_kinds import configure_capture

    return configure_capture


def _request_validation():
    from sglang_dflash.srt.speculative.dflash_utils import validate_dflash_request

    return validate_dflash_request


def _verify_input():
    from sglang_dflash.srt.speculative.dflash_info import DFlashVerifyInput

    return DFlashVerifyInput


def _verify_mask_policy():
    from sglang_dflash.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

    return resolve_dflash_verify_mask_policy


def _cpu_pin_memory():
    def pin_memory(self, device=None):
        return self

    return pin_memory


def _cpu_snapshot_support():
    return lambda: True


def _cpu_recurrent_states(name):
    def build():
        from sglang_dflash.srt.hardware_backend.cpu import recurrent_states

        return getattr(recurrent_states, name)

    return build


def _cpu_gated_norm():
    from sglang_dflash.srt.hardware_backend.cpu.fused_layers import layernorm_fn

    return layernorm_fn


def _cpu_shared_expert_gate():
    from sglang_dflash.srt.hardware_backend.cpu.fused_layers import launch_fused_gate_sigmoid_mul

    return launch_fused_gate_sigmoid_mul


def _shared_graph_output():
    from sglang_dflash.srt.speculative.dflash_utils import graph_output_for_runner

    return graph_output_for_runner()


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
        target="sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        kind="resolution",
        signature="(server_args)",
        why="SGLang refuses gpt-oss and Gemma 4 on torch_native, which here is our attention and has what they need",
        build=_pass_backend_lists_on_cpu,
        cpu_only=True,
    ),
    Change(
        target="sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS",
        kind="entry",
        key="torch_native",
        signature=None,
        why="torch_native knows no TARGET_VERIFY, non-causal block, sinks, soft cap or MLA, and reads windowed layers at the "
        "wrong slots; ours is built where that matters, SGLang's elsewhere. The name stays, the engine keys on it",
        build=_cpu_attention,
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
    # Targets with recurrent states on a CPU, with a draft or without.
    Change(
        target="sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
        kind="replace",
        signature="()",
        why="the CPU runtime keeps snapshots of recurrent states for the prefix cache, which SGLang leaves to GPUs",
        build=_cpu_snapshot_support,
        cpu_only=True,
    ),
    *(
        Change(
            target=f"sglang.kernels.ops.mamba.mamba_state_scatter_triton.{name}",
            kind="replace",
            signature=signature,
            why="copies recurrent states between slots in Triton, which a CPU cannot run",
            build=_cpu_recurrent_states(name),
            cpu_only=True,
        )
        for name, signature in (
            (
                "track_mamba_states_all_layers",
                "(conv_states_pool, ssm_states_pool, cache_indices, mamba_track_mask, mamba_track_indices, batch_size, "
                "check_freed_slots)",
            ),
            (
                "track_mamba_states_if_needed",
                "(conv_states, ssm_states, cache_indices, mamba_track_mask, mamba_track_indices, batch_size, "
                "check_freed_slots)",
            ),
            (
                "scatter_mamba_states_after_mtp_verify",
                "(mamba_caches, state_indices_tensor, last_correct_step_indices, mamba_track_indices, "
                "mamba_steps_to_track, src_indices_raw)",
            ),
        )
    ),
    Change(
        target="sglang.kernels.ops.attention.fla.layernorm_gated.layernorm_fn",
        kind="replace",
        signature="(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, activation)",
        why="GatedDeltaNet's output norm is a Triton kernel except on CPUs with AMX",
        build=_cpu_gated_norm,
        cpu_only=True,
    ),
    Change(
        target="sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul",
        kind="replace",
        signature="(hidden_states, gate_weight, shared_output, output, do_add)",
        why="the gate of a shared expert (Qwen3.5 MoE) is a Triton kernel on any device",
        build=_cpu_shared_expert_gate,
        cpu_only=True,
    ),
    Change(
        target="torch.Tensor.pin_memory",
        kind="replace",
        signature=None,
        why="SGLang pins a tensor in every decode step that keeps states; without an accelerator PyTorch refuses to",
        build=_cpu_pin_memory,
        cpu_only=True,
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
    *(
        Change(
            target="sglang.srt.models.registry.ModelRegistry.models",
            kind="entry",
            key=architecture,
            signature=None,
            why="load DFlash2 drafts with our model class",
            build=_dflash2_model,
        )
        for architecture in DFLASH2_ARCHITECTURES
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
        target="sglang.srt.model_executor.model_runner.configure_aux_hidden_state_capture",
        kind="replace",
        signature="(model, eagle_use_aux_hidden_state, eagle_aux_hidden_state_layer_ids, dflash_use_aux_hidden_state, "
        "dflash_target_layer_ids, is_dspark)",
        why="some targets can only be told in EAGLE-3's way which layers to capture",
        build=_capture,
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
        target="sglang.srt.model_executor.graph_shared_output.GraphSharedOutput.create_for_model_runner",
        kind="replace",
        signature="(model_runner)",
        why="a draft's graphs put no logits into the shared buffer; for P-EAGLE's wider blocks SGLang would make a larger one",
        build=_shared_graph_output,
    ),
    Change(
        target="sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        kind="replace",
        signature="(self, state)",
        why="/server_info says which verify width is in force and why",
        build=_server_info,
    ),
)

AT_CPU_ATTENTION = (
    Change(
        target="sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry._handlers",
        kind="entry",
        key="torch_native",
        signature=None,
        why="SGLang has no method for MLA on torch_native and takes Triton's, which reads latents as keys of every head",
        build=_absorbed_mla,
        cpu_only=True,
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
        elif change.kind == "replace":  # also where a module loaded before us has imported the name
            HookRegistry.register(change.target, change.build(), HookType.REPLACE)
        else:
            _rebind(change)


def install_at_worker() -> None:
    """Check and apply AT_WORKER in this scheduler process."""
    _install_now(AT_WORKER)


def install_at_cpu_attention() -> None:
    """Check and apply AT_CPU_ATTENTION in this scheduler process."""
    _install_now(AT_CPU_ATTENTION)


def _install_now(table: tuple[Change, ...]) -> None:
    changes = _relevant(table)
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
        if change.kind == "entry" and not hasattr(target, "__setitem__"):
            raise SystemExit(f"sglang-dflash: {change.target} is not a registry. Needed to: {change.why}")
        return
    parameters = list(inspect.signature(inspect.unwrap(target)).parameters)
    wanted = [name for name in change.signature.strip("()").split(", ") if name]
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
