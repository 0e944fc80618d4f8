"""The features for which SGLang has kernels for GPUs alone: a CPU does not serve them."""

from typing import Any

# Field of ServerArgs, its value without the feature, and the feature's name.
FEATURES: tuple[tuple[str, Any, str], ...] = (
    ("disaggregation_mode", "null", "prefill/decode disaggregation (--disaggregation-mode)"),
    ("enable_hierarchical_cache", False, "the hierarchical cache (--enable-hierarchical-cache)"),
)
# Model types with recurrent layers whose operators the CPU runtime has.
RECURRENT_TARGETS: tuple[str, ...] = ("qwen3_5_text", "qwen3_5_moe_text")


def check_runs_on_cpu(args: Any, model_config: Any) -> None:
    """Raise ValueError that names what a server on a CPU would lack kernels for.

    Without this check SGLang ends in one of these kernels, at the latest at the first prefill.

    Args:
        args: The server's arguments.
        model_config: SGLang's ModelConfig of the target.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config

    found = [name for field, value, name in FEATURES if getattr(args, field) != value]
    config = model_config.hf_config
    is_recurrent = mambaish_config(model_config) is not None
    if is_recurrent and config.get_text_config().model_type not in RECURRENT_TARGETS:
        found.append(f"{config.architectures[0]}, because of its recurrent layers")
    if found:
        raise ValueError(
            f"Not served on a CPU: {'; '.join(found)}. SGLang runs that with kernels for GPUs alone, with a "
            "draft or without."
        )
