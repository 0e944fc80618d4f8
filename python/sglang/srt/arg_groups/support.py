"""Rules of what our DFLASH does not serve, and the choice of a draft's attention backend."""

import logging
from collections.abc import Mapping
from typing import Any

from sglang_dflash.srt.configs.checkpoint import read_config
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.draft_formats import checkpoint_problems
from sglang_dflash.srt.configs.json_values import as_object, is_int
from sglang_dflash.srt.configs.unsupported import (
    COUNT_WINDOW_FROM_ANCHOR,
    COUNT_WINDOW_FROM_QUERY,
    DRAFT_ATTENTION_BACKENDS,
    PAGED_BACKENDS,
    Unsupported,
)
from sglang_dflash.srt.environ import CPU_ATTENTION_BACKEND

logger = logging.getLogger(__name__)

# Backends that verify a chain by their causal flag, without a mask.
TARGET_ATTENTION_BACKENDS = (*DRAFT_ATTENTION_BACKENDS, "trtllm_mha", "trtllm_mla")

# Targets whose embedding SGLang splits over all ranks, also with DP attention.
SPLIT_EMBEDDINGS = (
    "ApertusForCausalLM",
    "InklingForConditionalGeneration",
    "IQuestCoderForCausalLM",
    "InternLM3ForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Lfm2VlForConditionalGeneration",
    "LlamaForCausalLM",
    "Ministral3ForCausalLM",
    "MistralForCausalLM",
    "MuseGlimmerForCausalLM",
    "MuseGlimmerForConditionalGeneration",
    "Phi3ForCausalLM",
)

# Field of ServerArgs, the value that our DFLASH serves, what other values stand for, whether the built-in
# serves them, and what it is known to do worse.
_FLAGS = (
    ("pp_size", 1, "pipeline parallelism", False, ""),
    ("enable_watermark", False, "watermarking", False, ""),
    ("attn_cp_size", 1, "context parallelism", True, ""),
    ("dcp_size", 1, "decode context parallelism", True, ""),
    ("enable_unified_memory", False, "the unified memory pool", True, ""),
    (
        "enable_hisparse",
        False,
        "hierarchical sparse attention",
        True,
        "the built-in does not keep its sparse state through a verify",
    ),
    ("enable_two_batch_overlap", False, "two-batch overlap", True, ""),
    ("enable_pdmux", False, "PD multiplexing", True, ""),
    # These two replace the forwards that verify blocks.
    ("enable_nvidia_megakernel", False, "megakernels", True, ""),
    ("enable_amd_monokernel", False, "monokernels", True, ""),
)

# Fields of ServerArgs for which SGLang keeps something of each row of a forward. It counts a row a request.
_KEEP_ROWS = ("enable_return_routed_experts", "enable_return_indexer_topk")


def server_problems(server_args: Any, draft: Mapping[str, Any] | None) -> list[Unsupported]:
    """List everything in these arguments that our DFLASH does not serve.

    `draft` is the draft's config.json, or None if it is not here.
    """
    from sglang.srt.arg_groups.model_override_base import attention_backends_of, resolved_view, resolving_view

    args = resolving_view(server_args)
    prefill_backend, decode_backend = attention_backends_of(resolved_view(server_args))
    verify_backend = decode_backend if args.speculative_attention_mode == "decode" else prefill_backend
    return [
        *flag_problems(args),
        *dp_attention_problems(args),
        *target_attention_problems(args.device, verify_backend, chose_attention(server_args)),
        *(draft_problems(args, draft) if draft is not None else ()),
    ]


def flag_of(field: str) -> str:
    """Return the flag of a field of ServerArgs."""
    return f"--{field.replace('_', '-')}"


def flag_problems(args: Any) -> list[Unsupported]:
    """List the flags and devices that our DFLASH does not serve."""
    from sglang.srt.environ import envs

    # SGLang 0.5.22 lacks some of them.
    found = [
        Unsupported(f"{what} ({flag_of(field)})", builtin_supports, drawback)
        for field, served, what, builtin_supports, drawback in _FLAGS
        if getattr(args, field, served) != served
    ]
    if getattr(args, "tokenizer_worker_num", 1) > 1 and not hasattr(envs, "SGLANG_HTTP_SERVER_APP_PATH"):
        found.append(Unsupported("several HTTP workers (--tokenizer-worker-num) on this SGLang", True))
    window, backend = args.speculative_draft_window_size, args.attention_backend
    if window is not None and window < 1:
        text = f"--speculative-draft-window-size {window}: leave it out for a draft without a window"
        found.append(Unsupported(text))
    if args.device != "cpu" and not args.device.startswith("cuda"):
        found.append(Unsupported(f"device {args.device!r} (only cuda and cpu)", True))
    if args.device == "cpu" and backend != CPU_ATTENTION_BACKEND:
        found.append(Unsupported(f"--attention-backend {backend} on a CPU (only {CPU_ATTENTION_BACKEND})"))
    return found


def check_kept_rows(args: Any, max_running_requests: int, block_size: int) -> None:
    """Raise ValueError if a verify has more rows than SGLang keeps something of."""
    flags = [flag_of(field) for field in _KEEP_ROWS if getattr(args, field)]
    requests, chunk = max_running_requests // args.attn_dp_size, max(args.chunked_prefill_size or 0, 0)
    kept, rows = max(requests, chunk), requests * block_size
    if flags and rows > kept:
        raise ValueError(
            f"{flags[0]}: SGLang keeps {kept} rows of a forward, the larger of --chunked-prefill-size and "
            f"--max-running-requests. A verify of {requests} requests x blocks of {block_size} has {rows}. "
            f"Give --chunked-prefill-size {rows * args.attn_dp_size}, or fewer --max-running-requests."
        )


def dp_attention_problems(args: Any) -> list[Unsupported]:
    """List what does not work with DP attention."""

    if args.attn_dp_size == 1:
        return []
    with_dp = "with DP attention (--enable-dp-attention)"
    if not args.enable_dp_lm_head:
        why = "the draft borrows a head that is otherwise split over ranks with other requests"
        needed = "which needs --enable-dp-lm-head here"
        return [Unsupported(f"DP attention (--enable-dp-attention), {needed}, as {why}")]
    found = []
    if args.enable_mixed_chunk:
        found.append(Unsupported(f"--enable-mixed-chunk {with_dp}", True))
    if args.disaggregation_mode != "null":
        found.append(Unsupported(f"--disaggregation-mode {with_dp}", True))
    if args.device == "cpu" and args.tp_size > args.attn_dp_size:
        what = f"--tp-size beyond --dp-size on a CPU {with_dp}"
        found.append(Unsupported(f"{what}, where SGLang cannot gather logits"))
    architectures = (read_config(args.model_path, args.revision) or {}).get("architectures") or ()
    if (name := next(iter(architectures), None)) in SPLIT_EMBEDDINGS:
        found.append(Unsupported(f"{name} {with_dp}: its embedding is split over all ranks", True))
    return found


def chose_attention(server_args: Any) -> bool:
    """Return True if the user chose the target's attention backend, rather than SGLang."""
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return any(getattr(server_args, field) is not None for field in fields)


def target_attention_problems(device: str, verify_backend: str, is_chosen: bool) -> list[Unsupported]:
    """Check the backend on which the target verifies blocks."""
    if device == "cpu" or verify_backend in TARGET_ATTENTION_BACKENDS:
        return []
    by = "" if is_chosen else ", SGLang's choice for this model and GPU"
    served = f"(--attention-backend {'|'.join(TARGET_ATTENTION_BACKENDS)})"
    what = f"verification on the target's attention backend {verify_backend!r}{by} {served}"
    return [Unsupported(what, True)]


def draft_problems(args: Any, config: Mapping[str, Any]) -> list[Unsupported]:
    """List what our DFLASH does not run of a draft with this config.json."""
    checkpoint, revision = args.speculative_draft_model_path, args.speculative_draft_model_revision
    is_flag_given = args._speculative_draft_quantization_explicitly_set
    named = args.speculative_draft_model_quantization if is_flag_given else None
    found = checkpoint_problems(config, checkpoint, revision, named)
    if problem := _split_problem(args, as_object(config.get("transformer_layer_config")) or config):
        found.append(Unsupported(problem))
    return found


def _split_problem(args: Any, layers: Mapping[str, Any]) -> str | None:
    """Return why these layers' heads cannot be split over the ranks that share requests."""
    ranks = args.tp_size // args.attn_dp_size
    heads, kv_heads = layers.get("num_attention_heads"), layers.get("num_key_value_heads")
    if not (is_int(heads) and is_int(kv_heads) and heads > 0 and kv_heads > 0):
        return None
    if heads % ranks == 0 and max(kv_heads, ranks) % min(kv_heads, ranks) == 0:
        return None
    return f"a draft of {heads} attention and {kv_heads} KV heads, which cannot be split over --tp {ranks}"


def draft_attention_problems(
    args: Any, draft: DFlashDraftConfig, target_text_config: Any
) -> list[Unsupported]:
    """Check that some attention backend of a GPU runs this draft as it was trained."""
    suited, unsuited = suited_backends(args, draft, target_text_config)
    if args.device == "cpu" or suited:
        return []
    reasons = "; ".join(sorted(set(unsuited.values())))
    return [Unsupported(f"the draft can run on no attention backend: {reasons}", draft.kind != "P-EAGLE")]


def choose_draft_attention(
    args: Any, target_backend: str, draft: DFlashDraftConfig, target_text_config: Any
) -> str:
    """Choose the draft's attention backend, which must run the draft as it was trained.

    The requested backend is preferred, then the target's prefill backend, then the order of
    DRAFT_ATTENTION_BACKENDS. If the requested backend does not suit, a warning names the one that runs. Some
    backend suits: `draft_attention_problems` has found nothing.
    """
    suited, unsuited = suited_backends(args, draft, target_text_config)
    requested = args.speculative_draft_attention_backend
    backend = requested or target_backend
    if backend in suited:
        return backend
    logger.log(
        logging.WARNING if requested else logging.INFO,
        "DFLASH: the draft runs on attention backend %s, not on %s %s: %s.",
        suited[0],
        "the requested" if requested else "the target's",
        backend,
        unsuited.get(backend, "it does not run draft blocks"),
    )
    return suited[0]


def suited_backends(
    args: Any, draft: DFlashDraftConfig, target_text_config: Any
) -> tuple[list[str], dict[str, str]]:
    """Return the backends that run this draft as it was trained, and why others do not."""
    unsuited: dict[str, str] = {}
    context = args.context_length or getattr(target_text_config, "max_position_embeddings", None)
    if draft.sliding_window is not None and (context is None or context > draft.sliding_window):
        if draft.window_from_anchor:
            reason = "it counts sliding windows from the query, this draft from the anchor"
            unsuited |= dict.fromkeys(COUNT_WINDOW_FROM_QUERY, reason)
        else:
            reason = "it counts sliding windows from the start of a block, this draft from the query"
            unsuited |= dict.fromkeys(COUNT_WINDOW_FROM_ANCHOR, reason)
    if draft.shifts_request_table and (args.page_size or 1) > 1:
        pages = f"it reads whole pages (--page-size {args.page_size})"
        reason = f"{pages}, and {draft.kind}'s table is the target's shifted by one slot"
        unsuited |= dict.fromkeys(PAGED_BACKENDS, reason)
    return [backend for backend in DRAFT_ATTENTION_BACKENDS if backend not in unsuited], unsuited
