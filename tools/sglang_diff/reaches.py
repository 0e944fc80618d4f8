"""Ledger of what we reach for inside SGLang, beside patches and imports.

It names private attributes that we read, attributes that we write, and members that our classes override.
`python tools/sglang_diff` compares each with any SGLang. A test compares the ledger with our source, and with
the names that a server looks up (`srt/reaches.py`).
"""

from collections.abc import Iterator
from typing import NamedTuple

from sglang_dflash.srt.reaches import ON_CPU, ROWS, WAIT


class Reach(NamedTuple):
    """Names of one owner that one file of ours reaches for.

    Attributes:
        owner: Dotted path of a class, or of a module.
        kind: "read", "write" or "override".
        names: Attributes, methods and properties.
        where: Path of our file below `srt/speculative/`, or below `srt/`.
        why: What for.
        feature: Feature that needs the names. None: DFLASH cannot be served without them.
        since: First supported release of SGLang that has the names.
    """

    owner: str
    kind: str
    names: tuple[str, ...]
    where: str
    why: str
    feature: str | None
    since: str


def _reaches(table: str, feature: str | None = None, since: str = "0.5.22") -> Iterator[Reach]:
    """Read a table of owners, and below each its lines `where kind names: why`.

    Owners are below `sglang.srt`.
    """
    owner = ""
    for line in table.strip().splitlines():
        if line.startswith(" "):
            what, _, why = line.partition(": ")
            where, kind, *names = what.split()
            yield Reach(
                owner, kind=kind, names=tuple(names), where=where, why=why, feature=feature, since=since
            )
        else:
            owner = f"sglang.srt.{line}"


REACHES = (
    *_reaches("""
arg_groups.fields.spec.Spec
  arg_groups/options.py write speculative_adaptive speculative_use_rejection_sampling: set by our flags
  arg_groups/resolve.py read _speculative_draft_quantization_explicitly_set: a user's choice
  arg_groups/support.py read _speculative_draft_quantization_explicitly_set: a user's choice
entrypoints.ollama.serving.OllamaServing
  plugins/streams.py write tokenizer_manager: whole texts
function_call.core_types.StreamingParseResult
  plugins/tool_parsers.py write calls: results of pieces
function_call.core_types.ToolCallItem
  plugins/tool_parsers.py write parameters: results of pieces
layers.logits_processor.LogitsProcessorOutput
  acceptance/acceptor.py write sampling_mask_output: masks of a block
  dflash_worker.py write hidden_states: None once consumed
managers.detokenizer_manager.DecodeStatus
  plugins/streams.py override sent_offset: an offset that never goes back
managers.io_struct.TokenizedGenerateReqInput
  request_checks.py write custom_logit_processor input_embeds input_ids sampling_params: a refused request
  request_checks.py write logprob_start_len token_ids_logprob top_logprobs_num: a refused request
  request_checks.py write return_hidden_states return_logprob return_sampling_mask: a refused request
managers.schedule_batch.Req
  acceptance/processors.py write custom_logit_processor sampling_params to_finish: errors end a request
  dflash_info.py write decode_batch_idx: count cycles
  stops.py write finished_len finished_reason grammar output_ids to_finish: the first stop of a block
  stops.py write reasoning_tokens: none behind the stop
  kv_pool.py write origin_input_ids: a prompt that is cut to the pool
managers.schedule_batch.ScheduleBatch
  cycle/measured.py write sampling_info: start-up cycles
  cycle/verify.py write forward_mode input_ids out_cache_loc seq_lens_cpu seq_lens_sum spec_info: the verify
  dflash_info.py write seq_lens_cpu seq_lens_sum: reserved slots
  idle_rank.py write spec_info: a step of other ranks
managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager
  weight_updates.py override _select_runners begin_weight_update end_weight_update: errors as answers
  weight_updates.py override update_weights_from_disk update_weights_from_distributed: errors as answers
  weight_updates.py override update_weights_from_ipc update_weights_from_tensor: errors as answers
managers.utils.GenerationBatchResult
  dflash_worker.py write kv_loc_plan new_seq_lens next_draft_input: a cycle's results
mem_cache.kv_cache_configurator.KVCacheConfigurator
  targets/recurrent.py read _calculate_mamba_ratio: a warning's number
mem_cache.memory_pool.ReqToTokenPool
  drafters/peagle.py write write: the draft's table follows
mem_cache.prefill_budget.PrefillBudget
  kv_pool.py read _available_and_evictable: free slots
model_executor.forward_batch_info.ForwardBatch
  cycle/verify.py write can_run_decode_cuda_graph: without graphs if no graph fits
model_executor.graph_shared_output.GraphSharedOutput
  drafters/build.py override get_logits_buffer: no logits of a draft
  drafters/build.py write _process_shared: no logits of a draft
model_executor.model_runner.ModelRunner
  dflash_utils.py write shared_read_done_event: rows stay until a step has ended
  dflash_worker.py write sampling_prewarm_result: no second warm-up
sampling.sampling_batch_info.SamplingBatchInfo
  acceptance/constraints.py write acc_additive_penalties acc_scaling_penalties: ours instead
  dflash_worker.py write need_top_k_sampling: filters of drawn tokens
  warm_up.py write acc_additive_penalties: a batch with penalties
sampling.sampling_params.SamplingParams
  acceptance/processors.py write custom_params: a processor's request
  kv_pool.py write max_new_tokens: the KV pool's end
  request_checks.py write max_new_tokens: a refused request
  warm_up.py write min_new_tokens: a batch with penalties
speculative.base_spec_worker.BaseSpecWorker
  dflash_worker.py override alloc_memory_pool init_attention_backends init_cuda_graphs: a worker's calls
  dflash_worker.py override on_verify_complete_cpu prewarm_sampling: a worker's calls
  dflash_worker.py override spec_v2_attn_backends weight_update_runners: a worker's calls
speculative.spec_info.SpecInput
  dflash_info.py override ragged_verify_layout: what backends plan by
  dflash_info.py write custom_mask num_tokens_for_logprob_per_req num_tokens_per_req: what backends plan by
speculative.spec_registry.CustomSpecAlgo
  plugins/algorithm.py override build_disagg_draft_input create_worker: our worker
utils.hf_transformers.config.HfModelConfigParser
  configs/draft_config_parser.py override parse: drafts of other formats
"""),
    *_reaches(
        """
managers.overlap_utils.FutureRelayBuffers
  acceptance/acceptor.py write published_bonus published_seq_lens: what SGLang need not copy
speculative.base_spec_worker.BaseSpecWorker
  dflash_worker.py write draft_parallel_layout: the scheduler reads it
""",
        since="0.5.23",
    ),
    *_reaches(
        """
layers.attention.base_attn_backend.AttentionBackend
  cycle/ragged_graphs.py write supports_ragged_verify_graph: graphs by rows
layers.attention.triton_backend.ForwardMetadata
  layers/attention/ragged_rows.py write qo_indptr: rows of each request
layers.attention.triton_backend.TritonAttnBackend
  layers/attention/ragged_rows.py write _target_verify_num_tokens_per_req init_forward_metadata: read layouts
  layers/attention/ragged_rows.py write _update_target_verify_buffers: read layouts
model_executor.model_runner.ModelRunner
  cycle/ragged_graphs.py read _get_attention_backend: a second backend
  cycle/ragged_graphs.py write attn_backend decode_cuda_graph_runner: the pair of a cycle's rows
model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner
  cycle/ragged_graphs.py override _build_ragged_verify_token_buckets ragged_verify_mode: graphs by rows
  cycle/ragged_graphs.py override _capture_ragged_verify_layout _stage_ragged_verify_layout: graphs by rows
  cycle/ragged_graphs.py read _ragged_capture_slots: requests of a graph
  cycle/ragged_graphs.py write capture_bs: sizes by rows
speculative.ragged_verify.RaggedVerifyLayout
  cycle/ragged_graphs.py override padded_to_bucket: made for the graph already
""",
        feature=ROWS,
    ),
    *_reaches(
        """
managers.overlap_utils.FutureMap
  cycle/lengths.py override resolve_seq_lens_cpu: the cycle waits for lengths
  cycle/lengths.py write needs_cpu_seq_lens: the cycle waits for lengths
""",
        feature=WAIT,
    ),
    *_reaches(
        """
layers.attention.torch_native_backend.TorchNativeAttnBackend
  hardware_backend/cpu/attention.py override forward_decode forward_extend init_forward_metadata: blocks
layers.linear.LinearBase
  hardware_backend/cpu/reordering.py write quant_method: reordered weights
managers.schedule_batch.ScheduleBatch
  hardware_backend/cpu/operators.py write mamba_track_buffer_indices mamba_track_indices: unpinned memory
""",
        feature=ON_CPU,
    ),
)
