"""Changes in scheduler processes that run DFLASH, or SGLang's own instead."""

from sglang_dflash.srt.plugins.change import RECURRENT_WIDTH, Change, made_by, our_object

AT_WORKER = (
    Change(
        target="sglang.srt.configs.model_config.ModelConfig._parse_quant_hf_config",
        remove_when="SGLang's loader leaves a draft's packed tensors to its model",
        upstream="https://github.com/sgl-project/sglang/issues/39087",
        feature="quantized drafts",
        signature="(self)",
        why="we dequantize packed drafts ourselves; SGLang has no kernel for some, and none on a CPU",
        build=made_by("srt.models.quantized_linear.hiding_draft_quantization"),
    ),
    Change(
        target="sglang.srt.model_executor.model_runner.configure_aux_hidden_state_capture",
        remove_when="every target has DFLASH's interface",
        upstream="docs/dev/upstream/plugin-doors.md",
        feature="targets that capture hidden states through EAGLE-3's interface only",
        signature="(model, eagle_use_aux_hidden_state, eagle_aux_hidden_state_layer_ids, "
        "dflash_use_aux_hidden_state, dflash_target_layer_ids, is_dspark)",
        why="some targets accept the layers to capture only through EAGLE-3's interface",
        build=our_object("srt.speculative.targets.kinds.configure_capture"),
    ),
    Change(
        target="sglang.srt.layers.attention.linear.gdn_backend.GDNAttnBackend.forward_extend",
        remove_when="SGLang's GatedDeltaNet verifies different numbers of tokens",
        upstream="https://github.com/sgl-project/sglang/issues/38897",
        feature=RECURRENT_WIDTH,
        signature="(self, layer, forward_batch, mixed_qkv, a, b, kwargs)",
        why="SGLang's verifies as many tokens for each request",
        build=made_by("srt.layers.attention.gated_delta_rows.verifying_packed_rows"),
    ),
    Change(
        target="sglang.srt.mem_cache.prefill_budget.PrefillBudget.available_chunk_tokens",
        remove_when="SGLang lets a chunk wait if the KV pool is full",
        upstream="docs/dev/upstream/prefill-chunks.md",
        feature="mixed chunks in a full KV pool",
        signature="(self, chunk_limit)",
        why="SGLang ends the scheduler if a prompt's next chunk finds too few KV slots",
        build=made_by("srt.mem_cache.prefill_budget.letting_chunks_wait"),
    ),
    Change(
        target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
        remove_when="SGLang ends a run of tokens at its first stop, and counts its reasoning up to there",
        upstream="https://github.com/sgl-project/sglang/issues/39826",
        feature="stop strings and reasoning tokens as without a draft",
        signature="(self, new_accepted_len)",
        why="of several stops in one block SGLang may take a later one, and it counts reasoning beyond it",
        build=made_by("srt.speculative.acceptance.stops.finishing_at_the_first_stop"),
    ),
    Change(
        target="sglang.srt.managers.scheduler.SchedulerWeightUpdaterManager",
        remove_when="SGLang passes the selector to each runner's updater, and answers errors of an update",
        upstream="docs/dev/upstream/weight-updates.md",
        feature="weight updates of the draft from tensors",
        kind="class",
        signature="(tp_worker, draft_worker, memory_saver_adapter, flush_cache, is_fully_idle, scheduler, "
        "metrics_collector)",
        why="an updater gets tensors without the selector they were sent with; an error ends the scheduler",
        build=our_object("srt.speculative.targets.weight_update_requests.WeightUpdateRequests"),
    ),
    Change(
        target="sglang.srt.managers.scheduler.validate_dflash_request",
        remove_when="SGLang's check is as strict",
        upstream="docs/dev/upstream/plugin-doors.md",
        signature="(req, enable_overlap)",
        why="answer a request that DFLASH cannot serve exactly with HTTP 400",
        build=our_object("srt.speculative.request_fields.validate_dflash_request"),
    ),
    Change(
        target="sglang.srt.managers.scheduler.Scheduler.handle_generate_request",
        remove_when="SGLang's scheduler checks requests, and runs no refused one",
        upstream="https://github.com/sgl-project/sglang/pull/28960",
        signature="(self, recv_req, mm_input_error)",
        why="some values end the scheduler, also in requests that SGLang refuses, and front ends differ",
        build=made_by("srt.speculative.request_fields.refusing_requests"),
    ),
    Change(
        target="sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch",
        remove_when="processors get the tokens of the step before",
        upstream="docs/dev/upstream/plugin-doors.md",
        signature="(self, batch, last_batch)",
        why="a custom logit processor reads its request's tokens, which the host must know by then",
        build=made_by("srt.speculative.acceptance.processors.without_overlap"),
    ),
    Change(
        target="sglang.srt.speculative.dflash_info.DFlashVerifyInput",
        remove_when="graphs are captured with the worker's own input",
        upstream="docs/dev/upstream/plugin-doors.md",
        kind="class",
        signature="(draft_token, positions, draft_token_num, custom_mask, capture_hidden_mode, "
        "ragged_verify_layout)",
        why="SGLang builds one to capture CUDA graphs with; replays need the class that we run",
        build=our_object("srt.speculative.dflash_info.DFlashVerifyInput"),
    ),
    Change(
        target="sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        remove_when="workers can report to /server_info",
        upstream="docs/dev/upstream/plugin-doors.md",
        feature="DFLASH's reports in /server_info",
        signature="(self, state)",
        why="report the verify width in force, and its reason, in /server_info",
        build=made_by("srt.observability.server_info.adding_worker_reports"),
    ),
)

AT_HAND_OVER = (
    Change(
        target="sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController._add_speculative",
        remove_when="SGLang reports the plugin that serves",
        upstream="docs/dev/upstream/plugin-doors.md",
        feature="DFLASH's reports in /server_info",
        signature="(self, state)",
        why="report in /server_info that SGLang's own DFLASH serves, and because of what",
        build=made_by("srt.observability.server_info.adding_implementation"),
    ),
)
