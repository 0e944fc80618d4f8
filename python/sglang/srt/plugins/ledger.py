"""Every change we make to SGLang: target, kind of change and reason.

| table | applied | in |
|---|---|---|
| `AT_LOAD` | when SGLang loads its plugins | every process |
| `AT_FRONT_END` | when the arguments turn out to request DFLASH | the process that receives requests |
| `AT_WORKER` | by the `create_worker` hook | scheduler processes that run DFLASH; others keep stock code |
| `AT_FA3_SCHEDULES` | with it, if SGLANG_DFLASH_FA3_SCHEDULE_ONCE=1 | the same |
| `AT_HAND_OVER` | by the same hook | scheduler processes that run SGLang's own DFLASH instead of ours |
| `AT_DISAGGREGATION` | with `AT_WORKER` | schedulers that serve prefill or decode alone |
| `AT_CPU_DISAGGREGATION` | when the attention backend is built | the same, on a CPU, with DFLASH or without |
| `AT_CPU_HOST_CACHE` | with it, or for a hierarchical cache | copies of KV to the host and back |
| `AT_CPU_ATTENTION` | when our CPU attention is built | with DFLASH, or if SGLang's cannot run a target |

Tests walk the tables; `install.py` checks and applies them. `static_check.py` compares them with any SGLang,
installed or not; `fingerprints.json` has what they were written against. The procedure for a new SGLang is in
docs/updating-sglang.md.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dflash.srt.configs.dflash2_config import DFLASH2_ARCHITECTURES
from sglang_dflash.srt.plugins import hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change to SGLang.

    Kinds: "around" (wrap a method), "resolution" (SGLang's resolution hooks), "replace" (rebind a name),
    "class" (rebind a class), "entry" (write `key` of a dict).
    """

    target: str  # dotted path of a callable, or of a registry for kind "entry"
    why: str
    build: Callable[[], Any]  # returns the hook or the new value, when the change is applied: imports wait
    kind: str = "replace"
    # SGLang's state in which the change is no longer needed, and what was proposed there: a link, or "none".
    remove_when: str
    upstream: str = "none"
    # What is off if the target is missing or has changed. None: DFLASH cannot be served without the change.
    feature: str | None = None
    # The target's parameters; of a class only those that SGLang passes. None for a registry, and if unknown.
    signature: str | None = None
    # Other parameters that a supported SGLang has here, which the hook takes too.
    also: str | None = None
    key: str | None = None
    replaces: str | None = None  # the function or class that a registry's entry replaces
    cpu_only: bool = False

    @property
    def name(self) -> str:
        """The last part of the target."""
        return self.target.rpartition(".")[2]

    @property
    def label(self) -> str:
        """The target, and the key of a registry's entry."""
        return self.target + (f"[{self.key}]" if self.key else "")

    @property
    def parameters(self) -> list[str]:
        """The names in the signature."""
        return _names(self.signature)

    def accepts(self, parameters: list[str]) -> bool:
        """Tell whether a target with these parameters is the one that the change was written for."""
        if self.signature is None:
            return True
        if self.kind == "class":
            return set(self.parameters) <= set(parameters)
        return parameters in [_names(one) for one in (self.signature, self.also) if one is not None]


def _names(signature: str | None) -> list[str]:
    return [name for name in (signature or "").strip("()").split(", ") if name]


def resolve(path: str) -> tuple[Any, Any]:
    """Return the holder of the object at a dotted path, and the object."""
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


def _ours(path: str) -> Callable[[], Any]:
    """Return a builder of the object at this path in our package."""
    return lambda: resolve(f"sglang_dflash.{path}")[1]


def _made_by(path: str) -> Callable[[], Any]:
    """Return a builder that calls our function at this path."""
    return lambda: _ours(path)()()


_CpuChange = functools.partial(Change, cpu_only=True)
_ALGORITHM = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm"

# Features that need several changes: if one of them does not fit, none is made.
SPECULATORS = "speculators checkpoints and P-EAGLE"
CPU = "serving on a CPU"  # DFLASH on a CPU needs it
RECURRENT = "targets with recurrent states on a CPU"
CPU_PD = "disaggregation on a CPU"
SCHEDULES = "FlashAttention 3's schedules once per forward"
BOUNDS = "decode cycles that do not wait for the device's lengths"
SPEED = "faster operators on a CPU"
RECURRENT_WIDTH = "adaptive width for targets with recurrent states on a CPU"

AT_LOAD = (
    Change(
        target="sglang.srt.arg_groups.parallel_hook.handle_deprecated_dp_attention",
        remove_when="SGLang reads speculators checkpoints and has P-EAGLE",
        upstream="https://github.com/sgl-project/sglang/issues/23171",
        feature=SPECULATORS,
        kind="resolution",
        signature="(server_args)",
        why="--model-path may name a speculators checkpoint, and PEAGLE is DFLASH to SGLang; this step comes "
        "before any reader",
        build=hooks.detect_speculators_model,
    ),
    Change(
        target="sglang.srt.configs.model_config_parser_registry._MODEL_CONFIG_PARSER_REGISTRY",
        remove_when="SGLang reads speculators checkpoints",
        upstream="https://github.com/sgl-project/sglang/pull/40630",
        feature=SPECULATORS,
        replaces="sglang.srt.utils.hf_transformers.config.HfModelConfigParser",
        kind="entry",
        key="hf",
        why="read speculators drafts, whose config transformers rejects, wherever SGLang reads one",
        build=_ours("srt.configs.draft_config_parser.DraftConfigParser"),
    ),
    _CpuChange(
        target="sglang.srt.arg_groups.platform_hook.handle_cpu_backends",
        remove_when="SGLang serves on any CPU without kernels of its own",
        upstream="https://github.com/sgl-project/sglang/issues/8281",
        feature=CPU,
        kind="resolution",
        signature="(server_args)",
        why="SGLang's CPU defaults are intel_amx, whose kernels the stand-in lacks, and all memory for KV",
        build=_ours("srt.arg_groups.dflash_args.default_cpu_args"),
    ),
    _CpuChange(
        target="sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        remove_when="SGLang's torch_native has sinks and windows",
        feature=CPU,
        kind="resolution",
        signature="(server_args)",
        why="SGLang refuses gpt-oss and Gemma 4 on torch_native; our attention of that name serves them",
        build=_ours("srt.arg_groups.dflash_args.pass_backend_lists_on_cpu"),
    ),
    _CpuChange(
        target="sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS",
        remove_when="SGLang's torch_native has these",
        upstream="https://github.com/sgl-project/sglang/issues/36352",
        feature=CPU,
        replaces="sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
        kind="entry",
        key="torch_native",
        why="torch_native lacks TARGET_VERIFY, non-causal blocks, sinks, soft caps, MLA and padded batches, "
        "and reads windowed layers at the wrong slots. Ours is built if needed, else SGLang's. The engine "
        "keys on the name, so it stays",
        build=hooks.cpu_attention,
    ),
    Change(
        target="sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding",
        remove_when="SGLang names a missing draft, and DFLASH's adaptive width is upstream",
        upstream="https://github.com/sgl-project/sglang/issues/36127",
        kind="resolution",
        signature="(server_args)",
        why="report a missing draft by name before SGLang tries to read its config",
        build=hooks.check_draft_path,
    ),
    Change(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        remove_when="SGLang lets plugins declare flags",
        feature="the flags of sglang-dflash on the command line (their environment variables work)",
        kind="around",
        signature="(parser)",
        why="offer DFLASH's own flags on SGLang's command line",
        build=hooks.add_cli_args,
    ),
    Change(
        target=f"{_ALGORITHM}.handle_server_args",
        remove_when="SGLang lets a plugin replace a built-in algorithm",
        upstream="https://github.com/sgl-project/sglang/pull/23991",
        kind="around",
        signature="(self, server_args)",
        why="resolve and validate DFLASH's arguments with our rules",
        build=hooks.handle_server_args,
    ),
    Change(
        target=f"{_ALGORITHM}.create_worker",
        remove_when="SGLang lets a plugin replace a built-in algorithm",
        upstream="https://github.com/sgl-project/sglang/pull/23991",
        kind="around",
        signature="(self, server_args)",
        why="run our worker, and apply AT_WORKER just before it is built",
        build=hooks.create_worker,
    ),
    # Targets with recurrent states on a CPU, with a draft or without.
    _CpuChange(
        target="sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
        remove_when="SGLang keeps snapshots on a CPU",
        upstream="https://github.com/sgl-project/sglang/pull/37705",
        feature=RECURRENT,
        signature="()",
        why="the CPU runtime keeps snapshots of recurrent states for the prefix cache, SGLang only on GPUs",
        build=hooks.cpu_snapshot_support,
    ),
    *(
        _CpuChange(
            target=f"sglang.kernels.ops.mamba.mamba_state_scatter_triton.{name}",
            remove_when="SGLang has these functions in PyTorch",
            upstream=upstream,
            feature=RECURRENT,
            signature=signature,
            why="SGLang copies recurrent states between slots in Triton, which a CPU cannot run",
            build=_ours(f"srt.hardware_backend.cpu.recurrent_states.{name}"),
        )
        for name, upstream, signature in (
            (
                "track_mamba_states_all_layers",
                "none",
                "(conv_states_pool, ssm_states_pool, cache_indices, mamba_track_mask, mamba_track_indices, "
                "batch_size, check_freed_slots)",
            ),
            (
                "track_mamba_states_if_needed",
                "none",
                "(conv_states, ssm_states, cache_indices, mamba_track_mask, mamba_track_indices, batch_size, "
                "check_freed_slots)",
            ),
            (
                "scatter_mamba_states_after_mtp_verify",
                "https://github.com/sgl-project/sglang/pull/37851",
                "(mamba_caches, state_indices_tensor, last_correct_step_indices, mamba_track_indices, "
                "mamba_steps_to_track, src_indices_raw)",
            ),
        )
    ),
    _CpuChange(
        target="sglang.kernels.ops.mamba.mamba_state_scatter_triton.fused_conv_window_scatter_with_mask",
        remove_when="SGLang has this function in PyTorch",
        feature=RECURRENT,
        signature="(dst, src, dst_indices_raw, step_indices_raw, src_indices_raw)",
        why="the same copies for convolutions alone, with ReplaySSM",
        build=_ours("srt.hardware_backend.cpu.recurrent_states.fused_conv_window_scatter_with_mask"),
    ),
    _CpuChange(
        target="sglang.kernels.ops.attention.fla.layernorm_gated.layernorm_fn",
        remove_when="SGLang has this function in PyTorch",
        feature=RECURRENT,
        signature="(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, activation)",
        why="the output norm of GatedDeltaNet is a Triton kernel except on CPUs with AMX",
        build=_ours("srt.hardware_backend.cpu.fused_layers.layernorm_fn"),
    ),
    _CpuChange(
        target="sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul",
        remove_when="SGLang has this function in PyTorch",
        feature="targets with shared experts on a CPU",
        signature="(hidden_states, gate_weight, shared_output, output, do_add)",
        why="the gate of a shared expert (Qwen3.5 MoE) is a Triton kernel on any device",
        build=_ours("srt.hardware_backend.cpu.fused_layers.launch_fused_gate_sigmoid_mul"),
    ),
    _CpuChange(
        target="torch.Tensor.pin_memory",
        remove_when="SGLang asks whether there is an accelerator",
        feature=RECURRENT,
        why="SGLang pins a tensor in every decode step with states; PyTorch refuses without an accelerator",
        build=hooks.cpu_pin_memory,
    ),
    _CpuChange(
        target="sglang.srt.distributed.device_communicators.pynccl_wrapper.find_nccl_library",
        remove_when="SGLang looks for NCCL on GPUs only",
        feature="several ranks on a CPU",
        signature="()",
        why="if PyTorch brings NCCL, two ranks on a CPU get a communicator that needs a device",
        build=_ours("srt.hardware_backend.cpu.ranks.find_nccl_library"),
    ),
)

AT_FRONT_END = (
    Change(
        target="sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        remove_when="SGLang checks their types and ranges",
        upstream="https://github.com/sgl-project/sglang/pull/28960",
        feature="checks of sampling parameters",
        signature="(self)",
        why="SGLang does not check types and ranges of sampling parameters; some end the scheduler",
        build=_made_by("srt.speculative.request_fields.checking_requests"),
    ),
)

AT_WORKER = (
    *(
        Change(
            target="sglang.srt.models.registry.ModelRegistry.models",
            remove_when="these models are upstream",
            kind="entry",
            key=architecture,
            why="load drafts with our model classes; SGLang has none for P-EAGLE",
            build=_ours(f"srt.models.{model}"),
            replaces=stock,
        )
        for architecture, model, stock in (
            ("DFlashDraftModel", "dflash.DFlashDraftModel", "sglang.srt.models.dflash.DFlashDraftModel"),
            *(
                (architecture, "dflash2.DFlash2DraftModel", "sglang.srt.models.dflash.DFlash2DraftModel")
                for architecture in DFLASH2_ARCHITECTURES
            ),
            ("PEagleDraftModel", "peagle.PEagleDraftModel", None),
        )
    ),
    Change(
        target="sglang.srt.configs.model_config.ModelConfig._parse_quant_hf_config",
        remove_when="SGLang's loader leaves a draft's packed tensors to its model",
        upstream="https://github.com/sgl-project/sglang/issues/39087",
        feature="quantized drafts",
        signature="(self)",
        why="we dequantize packed drafts ourselves; SGLang has no kernel for some, and none on a CPU",
        build=_made_by("srt.models.packed_weights.hiding_draft_quantization"),
    ),
    Change(
        target="sglang.srt.model_executor.model_runner.configure_aux_hidden_state_capture",
        remove_when="every target has DFLASH's interface",
        feature="targets that capture hidden states through EAGLE-3's interface only",
        signature="(model, eagle_use_aux_hidden_state, eagle_aux_hidden_state_layer_ids, "
        "dflash_use_aux_hidden_state, dflash_target_layer_ids, is_dspark)",
        why="some targets accept the layers to capture only through EAGLE-3's interface",
        build=_ours("srt.speculative.targets.kinds.configure_capture"),
    ),
    Change(
        target="sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_hybrid_req_pool",
        remove_when="SGLang's DFLASH commits GatedDeltaNet's ring",
        feature="ReplaySSM (--enable-linear-replayssm-spec)",
        signature="(self, max_num_reqs, extra_max_context_len)",
        why="SGLang refuses ReplaySSM with DFLASH, as its own worker cannot commit the ring; ours can",
        build=_made_by("srt.speculative.targets.states.building_replay_pools"),
    ),
    Change(
        target="sglang.srt.managers.scheduler.validate_dflash_request",
        remove_when="SGLang's check is as strict",
        signature="(req, enable_overlap)",
        why="answer a request that DFLASH cannot serve exactly with HTTP 400",
        build=_ours("srt.speculative.dflash_utils.validate_dflash_request"),
    ),
    Change(
        target="sglang.srt.managers.scheduler.validate_spec_sampling_mask_request",
        remove_when="SGLang asks the worker which masks it returns",
        feature="sampling masks of sampled requests",
        signature="(req, spec_algorithm)",
        why="SGLang's DFLASH needs a CUDA kernel and no min_p for sampling masks, ours does not",
        build=_ours("srt.speculative.acceptance.sampling_masks.validate_sampling_mask_request"),
    ),
    Change(
        target="sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch",
        remove_when="processors get the tokens of the step before",
        signature="(self, batch, last_batch)",
        why="a custom logit processor reads its request's tokens, which the host must know by then",
        build=_made_by("srt.speculative.acceptance.processors.without_overlap"),
    ),
    Change(
        target="sglang.srt.speculative.dflash_info.DFlashVerifyInput",
        remove_when="graphs are captured with the worker's own input",
        kind="class",
        signature="(draft_token, positions, draft_token_num, custom_mask, capture_hidden_mode, "
        "ragged_verify_layout)",
        why="SGLang builds one to capture CUDA graphs with; replays need the class that we run",
        build=_ours("srt.speculative.dflash_info.DFlashVerifyInput"),
    ),
    Change(
        target="sglang.srt.speculative.dflash_utils.resolve_dflash_verify_mask_policy",
        remove_when="SGLang asks the worker",
        signature="(attn_backend)",
        why="no block is run with a mask, so no CUDA graph is captured with one",
        build=_ours("srt.speculative.dflash_utils.resolve_dflash_verify_mask_policy"),
    ),
    Change(
        target="sglang.srt.model_executor.graph_shared_output.GraphSharedOutput.create_for_model_runner",
        remove_when="a draft's graphs have an output of their own",
        feature="small output buffers of draft graphs",
        signature="(model_runner)",
        why="a draft's graphs put no logits into the shared buffer, which P-EAGLE's blocks would enlarge",
        build=_made_by("srt.speculative.dflash_utils.graph_output_for_runner"),
    ),
    Change(
        target="sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        remove_when="workers can report to /server_info",
        feature="DFLASH's reports in /server_info",
        signature="(self, state)",
        why="report the verify width in force, and its reason, in /server_info",
        build=_made_by("srt.observability.server_info.adding_worker_reports"),
    ),
    Change(
        target="sglang.srt.managers.overlap_utils.FutureMap.resolve_seq_lens_cpu",
        remove_when="SGLang plans with bounds of lengths",
        upstream="https://github.com/sgl-project/sglang/pull/32417",
        feature=BOUNDS,
        signature="(self, batch, stream_ordered)",
        also="(self, batch)",  # 0.5.22
        why="the host has bounds of all lengths without the device, exact ones after a prefill",
        build=_made_by("srt.speculative.cycle.known_lengths.resolving_known_lengths"),
    ),
    Change(
        target="sglang.srt.layers.attention.flashinfer_backend.FlashInferAttnBackend.init_forward_metadata_out_graph",
        remove_when="SGLang plans with bounds of lengths",
        upstream="https://github.com/sgl-project/sglang/pull/32417",
        feature=BOUNDS,
        signature="(self, forward_batch, in_capture)",
        why="FlashInfer plans on the host with exact lengths; bounds do, if the chunks are chosen by them",
        build=_made_by("srt.layers.attention.flashinfer_plans.planning_within_bounds"),
    ),
)

AT_FA3_SCHEDULES = (
    Change(
        target="sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.forward_extend",
        remove_when="SGLang computes schedules of blocks once per forward",
        feature=SCHEDULES,
        signature="(self, q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, sinks, q_descale, "
        "k_descale, v_descale, score_mod, aux_tensors, rel_bias, rel_bias_event, return_lse)",
        why="a schedule belongs to the forward that is captured",
        build=_made_by("srt.layers.attention.fa3_schedules.noting_the_forward"),
    ),
    Change(
        target="sglang.srt.layers.attention.flashattention_backend.flash_attn_with_kvcache",
        remove_when="SGLang computes schedules of blocks once per forward",
        feature=SCHEDULES,
        # Wrapped with whatever it takes: a schedule is passed only in calls whose arguments are all known.
        signature=None,
        why="FA3 computes the schedule of a block's tiles in every layer; once per forward is enough",
        build=_made_by("srt.layers.attention.fa3_schedules.attending_with_schedules"),
    ),
)

AT_HAND_OVER = (
    Change(
        target="sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        remove_when="SGLang reports the plugin that serves",
        feature="DFLASH's reports in /server_info",
        signature="(self, state)",
        why="report in /server_info that SGLang's own DFLASH serves, and because of what",
        build=_made_by("srt.observability.server_info.adding_implementation"),
    ),
)

AT_DISAGGREGATION = (
    Change(
        target="sglang.srt.speculative.dflash_disaggregation.build_dflash_disagg_draft_input",
        remove_when="the worker builds the draft input",
        signature="(batch, last_tokens_tensor, future_map)",
        why="requests of a decode server come without our prefill: build the draft input, notify the worker",
        build=_ours("srt.speculative.scale_out.disaggregation.build_disagg_draft_input"),
    ),
)

AT_CPU_HOST_CACHE = (
    _CpuChange(
        target="sglang.srt.mem_cache.pool_host.common._cuda_host_register",
        remove_when="SGLang asks whether there is a GPU",
        feature=CPU_PD,
        signature="(buffer, registration_granularity_bytes)",
        why="SGLang page-locks host buffers through the CUDA driver, which is missing on a CPU",
        build=_ours("srt.hardware_backend.cpu.transfer.host_register"),
    ),
    *(
        _CpuChange(
            target=f"sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost.{name}",
            remove_when="SGLang copies in PyTorch on a CPU",
            feature=CPU_PD,
            signature=signature,
            why="SGLang copies KV to host memory and back with CUDA kernels, and page-locks memory",
            build=_ours(f"srt.hardware_backend.cpu.transfer.{ours}"),
        )
        for name, ours, signature in (
            (
                "backup_from_device_all_layer",
                "back_up_all_layers",
                "(self, device_pool, host_indices, device_indices, io_backend)",
            ),
            (
                "load_to_device_per_layer",
                "restore_layer",
                "(self, device_pool, host_indices, device_indices, layer_id, io_backend, is_draft)",
            ),
            ("get_dummy_flat_data_page", "empty_flat_page", "(self)"),
        )
    ),
)

AT_CPU_DISAGGREGATION = (
    _CpuChange(
        target="sglang.srt.disaggregation.nixl.conn._normalize_kv_mem_kinds",
        remove_when="nixl is told where a pool is",
        feature=CPU_PD,
        signature="(kinds, expected_len)",
        why="SGLang declares all KV pools as GPU memory, which nixl refuses on a machine without a GPU",
        build=_ours("srt.hardware_backend.cpu.transfer.normalize_kv_mem_kinds"),
    ),
    _CpuChange(
        target="sglang.srt.disaggregation.nixl.conn.NixlKVManager.register_buffer_to_engine",
        remove_when="nixl is told where a state is",
        feature=CPU_PD,
        signature="(self)",
        why="SGLang declares the states of recurrent targets as GPU memory, in six calls of nixl",
        build=_made_by("srt.hardware_backend.cpu.transfer.registering_host_memory"),
    ),
    _CpuChange(
        target="sglang.srt.disaggregation.nixl.conn.NixlKVManager._prepare_payload_xfer",
        remove_when="SGLang sends the target's layers alone",
        feature=CPU_PD,
        signature="(self, peer_info)",
        why="a prefill server without a draft refuses to send to the host memory of a decode server with one",
        build=_made_by("srt.hardware_backend.cpu.transfer.preparing_targets_layers"),
    ),
    *AT_CPU_HOST_CACHE,
)

# Equal results in less time. Each entry can be removed alone, with its function in
# `hardware_backend/cpu/speedups/` and that function's test.
CPU_SPEEDUPS = (
    _CpuChange(
        target="sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        remove_when="PyTorch takes oneDNN by itself",
        feature=SPEED,
        signature="(self, layer, x, bias)",
        why="PyTorch takes MKL for float32, twice as slow as oneDNN, and loops over bfloat16 rows without "
        "AVX-512",
        build=_made_by("srt.hardware_backend.cpu.speedups.linear.linear_for_this_cpu"),
    ),
    _CpuChange(
        target="sglang.srt.layers.layernorm.RMSNorm.forward_native",
        remove_when="SGLang calls PyTorch's norm",
        feature=SPEED,
        signature="(self, x, residual, post_residual_addition, quant_linear)",
        why="SGLang's norm takes six operators, PyTorch has one that computes the same",
        build=_made_by("srt.hardware_backend.cpu.speedups.fused_norm_rope.fused_rms_norm"),
    ),
    _CpuChange(
        target="sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native",
        remove_when="SGLang rotates both at once",
        feature=SPEED,
        signature="(self, positions, query, key, offsets, fused_set_kv_buffer_arg)",
        why="SGLang rotates queries and keys one after the other, in twice the operators",
        build=_made_by("srt.hardware_backend.cpu.speedups.fused_norm_rope.fused_rotation"),
    ),
)

AT_CPU_ATTENTION = (
    _CpuChange(
        target="sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry._handlers",
        remove_when="SGLang has a method for it",
        feature="MLA targets on a CPU",
        kind="entry",
        key="torch_native",
        why="SGLang has no method for MLA on torch_native; the one it takes, Triton's, reads latents as keys",
        build=hooks.absorbed_mla,
    ),
    _CpuChange(
        target="sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
        remove_when="SGLang's GatedDeltaNet verifies different numbers of tokens",
        feature=RECURRENT_WIDTH,
        signature="(self, layer, forward_batch, mixed_qkv, a, b, kwargs)",
        why="SGLang's verifies as many tokens for each request",
        build=_made_by("srt.hardware_backend.cpu.ragged_states.verifying_own_lengths"),
    ),
    *CPU_SPEEDUPS,
)

TABLES = {
    "AT_LOAD": AT_LOAD,
    "AT_FRONT_END": AT_FRONT_END,
    "AT_WORKER": AT_WORKER,
    "AT_FA3_SCHEDULES": AT_FA3_SCHEDULES,
    "AT_DISAGGREGATION": AT_DISAGGREGATION,
    "AT_CPU_DISAGGREGATION": AT_CPU_DISAGGREGATION,
    "AT_CPU_ATTENTION": AT_CPU_ATTENTION,
}
