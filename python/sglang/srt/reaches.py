"""Names inside SGLang that we write or override, without which DFLASH does not start.

A write to a name that SGLang no longer reads raises nothing, so a server looks. The ledger of
`tools/sglang_diff` says where each is used and what for, and a test compares both with our source.
"""

import functools
import inspect
import pkgutil
from typing import Any

# What is off if one of its names is gone.
ROWS = "numbers of verified tokens per request on a GPU"
WAIT = "SGLANG_DFLASH_WAIT_UNDER_DRAFT"
ON_CPU = "attention and reordered weights on a CPU"


def _owners(table: str) -> dict[str, list[str]]:
    """Read lines `owner: names`, of owners below `sglang.srt`. Two spaces continue a line."""
    lines = table.strip().replace("\n  ", " ").splitlines()
    return {owner: names.split() for owner, names in (line.strip().split(": ") for line in lines)}


# The names of each owner, by the feature that needs them. None: DFLASH needs them.
NEEDED: dict[str | None, dict[str, list[str]]] = {
    None: _owners(
        """
arg_groups.fields.spec.Spec: speculative_adaptive speculative_use_rejection_sampling
entrypoints.ollama.serving.OllamaServing: tokenizer_manager
function_call.core_types.StreamingParseResult: calls
function_call.core_types.ToolCallItem: parameters
layers.logits_processor.LogitsProcessorOutput: hidden_states sampling_mask_output
managers.detokenizer_manager.DecodeStatus: sent_offset
managers.io_struct.TokenizedGenerateReqInput: custom_logit_processor input_embeds input_ids
  logprob_start_len return_hidden_states return_logprob return_sampling_mask sampling_params
  token_ids_logprob top_logprobs_num
managers.overlap_utils.FutureRelayBuffers: published_bonus published_seq_lens
managers.schedule_batch.Req: custom_logit_processor decode_batch_idx finished_len finished_reason grammar
  origin_input_ids output_ids reasoning_tokens sampling_params to_finish
managers.schedule_batch.ScheduleBatch: forward_mode input_ids out_cache_loc sampling_info seq_lens_cpu
  seq_lens_sum spec_info
managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager: _select_runners
  begin_weight_update end_weight_update update_weights_from_disk update_weights_from_distributed
  update_weights_from_ipc update_weights_from_tensor
managers.utils.GenerationBatchResult: kv_loc_plan new_seq_lens next_draft_input
mem_cache.memory_pool.ReqToTokenPool: write
model_executor.forward_batch_info.ForwardBatch: can_run_decode_cuda_graph
model_executor.graph_shared_output.GraphSharedOutput: _process_shared get_logits_buffer
model_executor.model_runner.ModelRunner: sampling_prewarm_result shared_read_done_event
sampling.sampling_batch_info.SamplingBatchInfo: acc_additive_penalties acc_scaling_penalties
  need_top_k_sampling
sampling.sampling_params.SamplingParams: custom_params max_new_tokens min_new_tokens
speculative.base_spec_worker.BaseSpecWorker: alloc_memory_pool draft_parallel_layout init_cuda_graphs
  init_attention_backends on_verify_complete_cpu prewarm_sampling spec_v2_attn_backends weight_update_runners
speculative.spec_info.SpecInput: custom_mask num_tokens_for_logprob_per_req num_tokens_per_req
  ragged_verify_layout
speculative.spec_registry.CustomSpecAlgo: build_disagg_draft_input create_worker
utils.hf_transformers.config.HfModelConfigParser: parse
        """
    ),
    ROWS: _owners(
        """
layers.attention.base_attn_backend.AttentionBackend: supports_ragged_verify_graph
layers.attention.triton_backend.ForwardMetadata: qo_indptr
layers.attention.triton_backend.TritonAttnBackend: _target_verify_num_tokens_per_req
  _update_target_verify_buffers init_forward_metadata
model_executor.model_runner.ModelRunner: attn_backend decode_cuda_graph_runner
model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner: _build_ragged_verify_token_buckets
  _capture_ragged_verify_layout _stage_ragged_verify_layout capture_bs ragged_verify_mode
speculative.ragged_verify.RaggedVerifyLayout: padded_to_bucket
        """
    ),
    WAIT: _owners("managers.overlap_utils.FutureMap: needs_cpu_seq_lens resolve_seq_lens_cpu"),
    ON_CPU: _owners(
        """
layers.attention.torch_native_backend.TorchNativeAttnBackend: forward_decode forward_extend
  init_forward_metadata
layers.linear.LinearBase: quant_method
managers.schedule_batch.ScheduleBatch: mamba_track_buffer_indices mamba_track_indices
        """
    ),
}


@functools.cache
def missing_name(feature: str | None) -> str | None:
    """Return which name that a feature needs is not there, or None."""
    for place, names in NEEDED[feature].items():
        path = f"sglang.srt.{place}"
        try:
            owner = pkgutil.resolve_name(path)
        except (ImportError, AttributeError) as error:
            return f"there is no {path} ({error})"
        if gone := [name for name in names if not _has(owner, name)]:
            return f"{path} has no {gone[0]}, which we write or override"
    return None


def require(feature: str) -> None:
    """End a scheduler that was to use a feature whose names are not all there."""
    if reason := missing_name(feature):
        raise SystemExit(f"sglang-dflash: {feature}: {reason}. docs/dev/updating-sglang.md says what to do.")


def _has(owner: Any, name: str) -> bool:
    """Return whether an owner has a member or a field of a name, or functions that use it."""
    holders = inspect.getmro(owner) if inspect.isclass(owner) else (owner,)
    functions = (each for one in holders for each in vars(one).values() if inspect.isfunction(each))
    return (
        hasattr(owner, name)
        or any(name in getattr(one, "__annotations__", ()) for one in holders)
        or any(name in inspect.unwrap(each).__code__.co_names for each in functions)
    )
