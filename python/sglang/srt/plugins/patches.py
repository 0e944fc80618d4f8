"""Every patch of SGLang, in tables by the time when it is made.

| table | applied | in |
|---|---|---|
| `AT_LOAD` | when SGLang loads its plugins | every process |
| `AT_FRONT_END` | when the arguments turn out to request DFLASH | the process that receives requests |
| `AT_DETOKENIZER` | when it begins | the detokenizers of servers that run DFLASH |
| `AT_WORKER` | before the worker is built | scheduler processes that run DFLASH; others keep stock code |
| `AT_FALLBACK` | when SGLang loads its plugins | processes of servers of SGLang's own DFLASH |
| `AT_CPU_ATTENTION` | when our CPU attention is built | with DFLASH, or if SGLang's cannot run a target |

Tests walk the tables; `patch.py` checks and applies them. `tools/sglang_diff` compares them with any SGLang,
installed or not. The procedure for a new SGLang is in docs/dev/updating-sglang.md.

SGLang's `HookRegistry` does not make the patches: it logs a hook that fails, and the server runs without it.
"""

import functools

from sglang_dflash.srt.plugins.patch import Patch, call_ours, load_ours, wrapping

CpuPatch = functools.partial(Patch, cpu_only=True, upstream="docs/dev/upstream/cpu-operators.md")

# Features that need several patches. If one of them does not fit, none is made.
RECURRENT = "targets with recurrent states on a CPU"
SPEED = "faster operators on a CPU"
RECURRENT_WIDTH = "adaptive width for targets with recurrent states"
STREAMS = "streamed text whose chunks end inside characters"

# Targets with recurrent states and several ranks, with a draft or without. Part of AT_LOAD.
AT_CPU_LOAD = (
    CpuPatch(
        target="sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
        upstream="https://github.com/sgl-project/sglang/pull/37705",
        feature=RECURRENT,
        signature="()",
        why="the CPU runtime keeps snapshots of recurrent states for the prefix cache, SGLang only on GPUs",
        build=load_ours("srt.hardware_backend.cpu.operators.supports_snapshots"),
    ),
    CpuPatch(
        target="sglang.kernels.ops.mamba.mamba_state_scatter_triton.track_mamba_states_all_layers",
        feature=RECURRENT,
        signature="(conv_states_pool, ssm_states_pool, cache_indices, mamba_track_mask, mamba_track_indices, "
        "batch_size, check_freed_slots)",
        why="SGLang copies recurrent states between slots in Triton, which a CPU cannot run",
        build=load_ours("srt.hardware_backend.cpu.operators.track_mamba_states_all_layers"),
    ),
    CpuPatch(
        target="sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify",
        upstream="https://github.com/sgl-project/sglang/pull/37851",
        feature=RECURRENT,
        signature="(mamba_caches, state_indices_tensor, last_correct_step_indices, mamba_track_indices, "
        "mamba_steps_to_track, src_indices_raw)",
        why="SGLang commits the states of accepted tokens in Triton, which a CPU cannot run",
        build=load_ours("srt.hardware_backend.cpu.operators.scatter_mamba_states_after_mtp_verify"),
    ),
    CpuPatch(
        target="sglang.kernels.ops.attention.fla.layernorm_gated.layernorm_fn",
        feature=RECURRENT,
        signature="(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, activation)",
        why="the output norm of GatedDeltaNet is a Triton kernel except on CPUs with AMX",
        build=load_ours("srt.hardware_backend.cpu.operators.layernorm_fn"),
    ),
    CpuPatch(
        target="sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul",
        feature="targets with shared experts on a CPU",
        signature="(hidden_states, gate_weight, shared_output, output, do_add)",
        why="the gate of a shared expert (Qwen3.5 MoE) is a Triton kernel on any device",
        build=load_ours("srt.hardware_backend.cpu.operators.launch_fused_gate_sigmoid_mul"),
    ),
    CpuPatch(
        target="torch.Tensor.pin_memory",
        feature=RECURRENT,
        why="SGLang pins a tensor in every decode step with states; PyTorch refuses without an accelerator",
        build=load_ours("srt.hardware_backend.cpu.operators.pin_nothing"),
    ),
    CpuPatch(
        target="sglang.srt.managers.schedule_batch.set_mamba_track_indices_from_reqs",
        until="0.5.23",
        feature=RECURRENT,
        signature="(batch, track_positions)",
        why="SGLang 0.5.22 pins a tensor in every decode step with states, whatever the device",
        build=load_ours("srt.hardware_backend.cpu.operators.set_mamba_track_indices_from_reqs"),
    ),
    CpuPatch(
        target="sglang.srt.distributed.device_communicators.pynccl_wrapper.find_nccl_library",
        feature="several ranks on a CPU",
        signature="()",
        why="if PyTorch brings NCCL, two ranks on a CPU get a communicator that needs a device",
        build=load_ours("srt.hardware_backend.cpu.arguments.find_nccl_library"),
    ),
)

# Equal results in less time. Each entry can be removed alone, with its function in
# `hardware_backend/cpu/speedups.py` and that function's test.
AT_CPU_ATTENTION = (
    CpuPatch(
        target="sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        feature=SPEED,
        signature="(self, layer, x, bias)",
        why="PyTorch takes MKL for float32, twice as slow as oneDNN, and loops over bfloat16 rows without "
        "AVX-512",
        build=call_ours("srt.hardware_backend.cpu.speedups.linear_for_this_cpu"),
    ),
    CpuPatch(
        target="sglang.srt.layers.layernorm.RMSNorm.forward_native",
        feature=SPEED,
        signature="(self, x, residual, post_residual_addition, quant_linear)",
        why="SGLang's norm takes six operators, PyTorch has one that computes the same",
        build=call_ours("srt.hardware_backend.cpu.speedups.fused_rms_norm"),
    ),
    CpuPatch(
        target="sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native",
        feature=SPEED,
        signature="(self, positions, query, key, offsets, fused_set_kv_buffer_arg)",
        why="SGLang rotates queries and keys one after the other, in twice the operators",
        build=call_ours("srt.hardware_backend.cpu.speedups.fused_rotation"),
    ),
)

AT_LOAD = (
    Patch(
        target="sglang.srt.server_args.ServerArgs.add_cli_args",
        upstream="docs/dev/upstream/plugin-doors.md",
        feature="the flags of sglang-dflash on the command line (their environment variables work)",
        signature="(parser)",
        why="offer DFLASH's own flags on SGLang's command line",
        build=call_ours("srt.arg_groups.options.make_add_cli_args"),
    ),
    *AT_CPU_LOAD,
)

AT_FRONT_END = (
    wrapping(
        target="sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        upstream="https://github.com/sgl-project/sglang/pull/28960",
        feature="checks of sampling parameters",
        signature="(self)",
        why="SGLang does not check types and ranges of sampling parameters; some end the scheduler",
        ours="srt.speculative.request_fields.check_and_normalize",
    ),
    wrapping(
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler",
        upstream="docs/dev/upstream/control-requests.md",
        feature="refusals of control requests on a CPU",
        signature="(self, obj)",
        why="on a CPU a request to release memory ends the scheduler",
        ours="srt.hardware_backend.cpu.arguments.refuse_memory_release",
        cpu_only=True,
    ),
    wrapping(
        target="sglang.srt.function_call.json_array_parser.JsonArrayParser.parse_streaming_increment",
        until="0.5.23",
        upstream="https://github.com/sgl-project/sglang/issues/31915",
        feature="streamed calls that a request requires",
        signature="(self, new_text, tools)",
        why="SGLang 0.5.22 loses arguments if one chunk holds several steps of a required call",
        ours="srt.plugins.tool_parsers.json_arrays_in_pieces",
    ),
    wrapping(
        target="sglang.srt.entrypoints.engine.Engine._launch_detokenizer_subprocesses",
        upstream="docs/dev/upstream/plugin-doors.md",
        feature=STREAMS,
        signature="(server_args, port_args, run_detokenizer_process_func)",
        why="a detokenizer does not know at load which algorithm its server runs",
        ours="srt.plugins.streams.launch_our_detokenizers",
    ),
    *(
        wrapping(
            target=f"sglang.srt.entrypoints.ollama.serving.OllamaServing.{name}",
            upstream="https://github.com/sgl-project/sglang/pull/17961",
            feature="whole answers in Ollama's streams",
            signature="(self, gen_request, raw_request, model_name)",
            why="SGLang drops the text of the chunk that ends an answer, which is up to a block",
            ours="srt.plugins.streams.stream_to_the_end",
        )
        for name in ("_stream_chat_response", "_stream_generate_response")
    ),
)

AT_DETOKENIZER = (
    Patch(
        target="sglang.srt.managers.detokenizer_manager.DecodeStatus",
        upstream="https://github.com/sgl-project/sglang/pull/31564",
        feature=STREAMS,
        is_class=True,
        signature="(decoded_text, decode_ids, surr_offset, read_offset)",
        why="if chunks end inside characters, the offset of what was sent goes back, and text is sent twice",
        build=load_ours("srt.plugins.streams.DecodeStatus"),
    ),
)

_REPORTS = wrapping(
    target="sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
    upstream="docs/dev/upstream/plugin-doors.md",
    feature="DFLASH's reports in /server_info",
    signature="(self, state)",
    why="report in /server_info who serves and why, the verify width in force, and its reason",
    ours="srt.plugins.server_info.add_reports",
)

AT_WORKER = (
    _REPORTS,
    wrapping(
        target="sglang.srt.configs.model_config.ModelConfig._parse_quant_hf_config",
        upstream="https://github.com/sgl-project/sglang/issues/39087",
        feature="quantized drafts",
        signature="(self)",
        why="we dequantize drafts ourselves; SGLang has no kernel for some, and none on a CPU",
        ours="srt.models.quantized_linear.parse_quant_config",
    ),
    Patch(
        target="sglang.srt.model_executor.model_runner.configure_aux_hidden_state_capture",
        upstream="docs/dev/upstream/plugin-doors.md",
        feature="targets that capture hidden states through EAGLE-3's interface only",
        signature="(model, eagle_use_aux_hidden_state, eagle_aux_hidden_state_layer_ids, "
        "dflash_use_aux_hidden_state, dflash_target_layer_ids, is_dspark)",
        why="some targets accept the layers to capture only through EAGLE-3's interface",
        build=load_ours("srt.speculative.targets.kinds.configure_capture"),
    ),
    Patch(
        target="sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
        upstream="https://github.com/sgl-project/sglang/issues/38897",
        feature=RECURRENT_WIDTH,
        signature="(self, layer, forward_batch, mixed_qkv, a, b, kwargs)",
        why="SGLang's verifies as many tokens for each request",
        build=call_ours("srt.layers.attention.ragged_rows.make_gdn_forward_extend"),
    ),
    CpuPatch(
        target="sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask",
        feature="strict thinking on a CPU",
        signature="(logits, vocab_mask)",
        why="SGLang applies the masks of thoughts on GPUs only, and ends the scheduler on a CPU",
        build=call_ours("srt.hardware_backend.cpu.operators.vocab_mask_for_cpu"),
    ),
    wrapping(
        target="sglang.srt.mem_cache.prefill_budget.PrefillBudget.available_chunk_tokens",
        upstream="docs/dev/upstream/prefill-chunks.md",
        feature="mixed chunks in a full KV pool",
        signature="(self, chunk_limit)",
        why="SGLang ends the scheduler if a prompt's next chunk finds too few KV slots",
        ours="srt.speculative.dflash_utils.defer_prefill_chunk",
    ),
    wrapping(
        target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
        upstream="https://github.com/sgl-project/sglang/issues/39826",
        feature="stop strings and reasoning tokens as without a draft",
        signature="(self, new_accepted_len)",
        why="of several stops in one block SGLang may take a later one, of an aborted request none, and it "
        "counts reasoning beyond it",
        ours="srt.speculative.dflash_utils.truncate_at_first_stop",
    ),
    wrapping(
        target="sglang.srt.managers.scheduler_components.logprob_result_processor."
        "SchedulerLogprobResultProcessor.add_logprob_return_values",
        upstream="docs/dev/upstream/zero-tokens.md",
        feature="log probabilities of zero tokens as without a draft",
        signature="(self, i, req, pt, next_token_ids, num_input_logprobs, output)",
        why="with a draft SGLang samples a token for requests of zero tokens, and reports its probability",
        ours="srt.speculative.dflash_utils.drop_undrawn_token",
    ),
    Patch(
        target="sglang.srt.managers.scheduler.SchedulerWeightUpdaterManager",
        upstream="docs/dev/upstream/weight-updates.md",
        feature="weight updates of the draft from tensors",
        is_class=True,
        signature="(tp_worker, draft_worker, memory_saver_adapter, flush_cache, is_fully_idle, scheduler, "
        "metrics_collector)",
        why="an updater gets tensors without the selector they were sent with; an error ends the scheduler",
        build=load_ours("srt.speculative.weight_updates.WeightUpdateRequests"),
    ),
    Patch(
        target="sglang.srt.managers.scheduler.validate_dflash_request",
        upstream="docs/dev/upstream/plugin-doors.md",
        signature="(req, enable_overlap)",
        why="answer a request that DFLASH cannot serve exactly with HTTP 400",
        build=load_ours("srt.speculative.request_fields.validate_dflash_request"),
    ),
    wrapping(
        target="sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
        upstream="https://github.com/sgl-project/sglang/pull/28960",
        signature="(self, recv_req, mm_input_error)",
        why="some values end the scheduler, also in requests that SGLang refuses, and front ends differ",
        ours="srt.speculative.request_fields.check_and_handle",
    ),
    wrapping(
        target="sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch",
        upstream="docs/dev/upstream/plugin-doors.md",
        signature="(self, batch, last_batch)",
        why="a custom logit processor reads its request's tokens, which the host must know by then",
        ours="srt.speculative.acceptance.processors.disable_overlap_for",
    ),
    Patch(
        target="sglang.srt.speculative.dflash_info.DFlashVerifyInput",
        upstream="docs/dev/upstream/plugin-doors.md",
        is_class=True,
        signature="(draft_token, positions, draft_token_num, custom_mask, capture_hidden_mode, "
        "ragged_verify_layout)",
        why="SGLang builds one to capture CUDA graphs with; replays need the class that we run",
        build=load_ours("srt.speculative.dflash_info.DFlashVerifyInput"),
    ),
)

AT_FALLBACK = (_REPORTS,)

TABLES = {
    "AT_LOAD": AT_LOAD,
    "AT_FRONT_END": AT_FRONT_END,
    "AT_DETOKENIZER": AT_DETOKENIZER,
    "AT_WORKER": AT_WORKER,
    "AT_CPU_ATTENTION": AT_CPU_ATTENTION,
}
