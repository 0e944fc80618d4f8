"""Rules that find what ours does not serve of a server's arguments. They change nothing."""

from collections.abc import Mapping
from typing import Any

from sglang_dflash.srt.arg_groups.draft_attention import suited_backends
from sglang_dflash.srt.arg_groups.draft_files import flag_problem
from sglang_dflash.srt.configs.checkpoint import read_config
from sglang_dflash.srt.configs.draft_config import DFlashDraftConfig
from sglang_dflash.srt.configs.draft_formats import checkpoint_findings, is_dflash_draft
from sglang_dflash.srt.configs.fields import is_int
from sglang_dflash.srt.configs.quantization import checkpoint_quantization
from sglang_dflash.srt.configs.target_fit import DRAFT_ATTENTION_BACKENDS
from sglang_dflash.srt.configs.unsupported import NotServed

# Backends that verify a chain by their causal flag, without a mask.
TARGET_ATTENTION_BACKENDS = (*DRAFT_ATTENTION_BACKENDS, "trtllm_mha", "trtllm_mla")
CPU_ATTENTION_BACKEND = "torch_native"

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

# (ServerArgs field, values that ours serves, the finding for others)
_FLAGS = (
    ("pp_size", (1,), NotServed("pipeline parallelism (--pp-size)")),
    ("enable_watermark", (False,), NotServed("watermarking (--enable-watermark)")),
    ("attn_cp_size", (1,), NotServed("context parallelism (--attn-cp-size)", True)),
    ("dcp_size", (1,), NotServed("decode context parallelism (--dcp-size)", True)),
    (
        "enable_unified_memory",
        (False,),
        NotServed("the unified memory pool (--enable-unified-memory)", True),
    ),
    (
        "enable_hisparse",
        (False,),
        NotServed(
            "hierarchical sparse attention (--enable-hisparse)",
            True,
            "the built-in does not keep its sparse state through a verify",
        ),
    ),
    (
        "enable_two_batch_overlap",
        (False,),
        NotServed("two-batch overlap (--enable-two-batch-overlap)", True),
    ),
    ("enable_pdmux", (False,), NotServed("PD multiplexing (--enable-pdmux)", True)),
    # Both replace the forwards that verify blocks.
    ("enable_nvidia_megakernel", (False,), NotServed("megakernels (--enable-nvidia-megakernel)", True)),
    ("enable_amd_monokernel", (False,), NotServed("monokernels (--enable-amd-monokernel)", True)),
)


def flag_findings(args: Any) -> list[NotServed]:
    """List flags and devices that ours does not serve."""
    from sglang.srt.environ import envs

    # SGLang 0.5.22 lacks some of them.
    found = [finding for field, served, finding in _FLAGS if getattr(args, field, served[0]) not in served]
    if getattr(args, "tokenizer_worker_num", 1) > 1 and not hasattr(envs, "SGLANG_HTTP_SERVER_APP_PATH"):
        found.append(NotServed("several HTTP workers (--tokenizer-worker-num) on this SGLang", True))
    window, backend = args.speculative_draft_window_size, args.attention_backend
    if window is not None and window < 1:
        text = f"--speculative-draft-window-size {window}: leave it out for a draft without a window"
        found.append(NotServed(text))
    if args.device != "cpu" and not args.device.startswith("cuda"):
        found.append(NotServed(f"device {args.device!r} (only cuda and cpu)", True))
    if args.device == "cpu" and backend != CPU_ATTENTION_BACKEND:
        found.append(NotServed(f"--attention-backend {backend} on a CPU (only {CPU_ATTENTION_BACKEND})"))
    return found


def dp_attention_findings(args: Any) -> list[NotServed]:
    """List what does not work with DP attention."""
    from sglang.srt.environ import envs

    if args.attn_dp_size == 1:
        return []
    with_dp = "with DP attention (--enable-dp-attention)"
    if not args.enable_dp_lm_head:
        return [
            NotServed(
                "DP attention (--enable-dp-attention), which needs --enable-dp-lm-head here, "
                "as the draft borrows a head that is otherwise split over ranks with other requests"
            )
        ]
    rules = (
        (args.enable_mixed_chunk, "--enable-mixed-chunk", "", True),
        (args.disaggregation_mode != "null", "--disaggregation-mode", "", True),
        (
            args.device == "cpu" and args.tp_size > args.attn_dp_size,
            "--tp-size beyond --dp-size on a CPU",
            ", where SGLang cannot gather logits",
            False,
        ),
        (
            envs.SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION.get(),
            "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION",
            ": all ranks prefill, or all verify",
            False,
        ),
    )
    found = [
        NotServed(f"{what} {with_dp}{why}", builtin_serves)
        for applies, what, why, builtin_serves in rules
        if applies
    ]
    architectures = (read_config(args.model_path, args.revision) or {}).get("architectures") or ()
    if (name := next(iter(architectures), None)) in SPLIT_EMBEDDINGS:
        found.append(NotServed(f"{name} {with_dp}: its embedding is split over all ranks", True))
    return found


def target_attention_findings(device: str, verify_backend: str, is_chosen: bool) -> list[NotServed]:
    """Check the backend on which the target verifies blocks."""
    if device == "cpu" or verify_backend in TARGET_ATTENTION_BACKENDS:
        return []
    by = "" if is_chosen else ", SGLang's choice for this model and GPU"
    return [
        NotServed(
            f"verification on the target's attention backend {verify_backend!r}{by} "
            f"(--attention-backend {'|'.join(TARGET_ATTENTION_BACKENDS)})",
            True,
        )
    ]


def draft_findings(args: Any) -> list[NotServed]:
    """List what ours does not run of the draft checkpoint under these arguments."""
    checkpoint, revision = args.speculative_draft_model_path, args.speculative_draft_model_revision
    config = read_config(checkpoint, revision)
    if config is None:
        return []
    found = checkpoint_findings(config, checkpoint, revision)
    if problem := _split_problem(args, config.get("transformer_layer_config") or config):
        found.append(NotServed(problem))
    try:
        quantization = checkpoint_quantization(config, checkpoint, revision)
    except ValueError:
        return found  # this is among them
    if problem := flag_problem(args, quantization):
        # The built-in follows a flag that contradicts the file, and then drafts noise.
        found.append(NotServed(problem, quantization is None and is_dflash_draft(config)))
    return found


def _split_problem(args: Any, layers: Mapping[str, Any]) -> str | None:
    """Say why these layers' heads cannot be split over the ranks that share requests."""
    ranks = args.tp_size // args.attn_dp_size
    heads, kv_heads = (layers.get(f"num_{name}_heads") for name in ("attention", "key_value"))
    if not (is_int(heads) and is_int(kv_heads) and heads > 0 and kv_heads > 0):
        return None
    if heads % ranks == 0 and max(kv_heads, ranks) % min(kv_heads, ranks) == 0:
        return None
    return f"a draft of {heads} attention and {kv_heads} KV heads, which cannot be split over --tp {ranks}"


def draft_attention_findings(args: Any, draft: DFlashDraftConfig, target_text_config: Any) -> list[NotServed]:
    """Check that some attention backend of a GPU runs this draft as it was trained."""
    suited, unsuited = suited_backends(args, draft, target_text_config)
    if args.device == "cpu" or suited:
        return []
    reasons = "; ".join(sorted(set(unsuited.values())))
    return [NotServed(f"the draft can run on no attention backend: {reasons}", draft.kind != "P-EAGLE")]


def chose_attention(server_args: Any) -> bool:
    """Return True if the user chose the target's attention backend, rather than SGLang."""
    fields = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    return any(getattr(server_args, field) is not None for field in fields)
