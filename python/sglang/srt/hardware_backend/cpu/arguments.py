"""Server arguments on a CPU: defaults, limits, the CPUs and threads of several ranks."""

import os
from collections.abc import Callable
from typing import Any

from sglang_dflash.srt.environ import CPU_ATTENTION_BACKEND, SOURCE
from sglang_dflash.srt.patching import FRONT_END, LOAD, patches

# SGLang sizes the KV pool by free memory, which on a laptop is nearly all of it, and zeroes every byte at
# start-up.
CPU_MAX_TOTAL_TOKENS = 65536
# The same for recurrent states, of which a running request holds up to five.
CPU_MAX_RECURRENT_STATES = 256
# SGLang has a list of attention backends for these. SGLang's torch_native, without sinks and windows, is not
# on the list.
_LISTED_BACKENDS_ONLY = ("GptOssForCausalLM", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
_CPU_BACKEND_ON_THE_LISTS = "intel_amx"

# Field of ServerArgs, its value without the feature, and the feature's name.
FEATURES: tuple[tuple[str, Any, str], ...] = (
    ("disaggregation_mode", "null", "prefill/decode disaggregation (--disaggregation-mode)"),
    ("enable_hierarchical_cache", False, "the hierarchical cache (--enable-hierarchical-cache)"),
    ("enable_return_routed_experts", False, "experts in answers (--enable-return-routed-experts)"),
)
# Model types with recurrent layers whose operators the CPU runtime has.
RECURRENT_TARGETS: tuple[str, ...] = ("qwen3_5_text", "qwen3_5_moe_text")

THREADS_BIND = "SGLANG_CPU_OMP_THREADS_BIND"
NUM_THREADS = "OMP_NUM_THREADS"


def set_defaults(server_args: Any, previous: Any) -> None:
    """Wrap SGLang's `handle_cpu_backends`; installed only if the CPU stand-in serves."""
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    args = resolving_view(server_args)
    if args.device != "cpu":
        return previous(server_args)
    # An idle scheduler would take a core, which a laptop has other uses for.
    defaults: dict[str, Any] = {"sleep_on_idle": True}
    if args.attention_backend is None:
        defaults["attention_backend"] = CPU_ATTENTION_BACKEND
    if args.mem_fraction_static is None:
        if args.max_total_tokens is None:
            defaults["max_total_tokens"] = CPU_MAX_TOTAL_TOKENS
        if args.max_mamba_cache_size is None:
            defaults["max_mamba_cache_size"] = CPU_MAX_RECURRENT_STATES
    declare_resolution(server_args, SOURCE, **defaults)
    if args.dtype in ("float", "float32"):
        # For any model dtype, SGLang keeps a convolution's last inputs in bf16, and then fails to write them.
        os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    prepare_ranks(args)
    previous(server_args)


def pass_backend_lists(server_args: Any, previous: Any) -> None:
    """Let the targets of SGLang's lists pass with the CPU's attention.

    Installed only if the CPU stand-in serves: there `torch_native` is our attention, with sinks and windows.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    args = resolving_view(server_args)
    if args.device != "cpu" or args.attention_backend != CPU_ATTENTION_BACKEND:
        return previous(server_args)
    architecture = model_config_of(server_args).hf_config.architectures[0]
    if architecture not in _LISTED_BACKENDS_ONLY:
        return previous(server_args)
    if architecture == "GptOssForCausalLM" and args.moe_runner_backend == "auto":
        # The default is Triton's kernels, whose weight layout the CPU path cannot read; "triton" has a
        # PyTorch twin.
        declare_resolution(server_args, SOURCE, moe_runner_backend="triton")
    declare_resolution(server_args, SOURCE, attention_backend=_CPU_BACKEND_ON_THE_LISTS)
    previous(server_args)
    declare_resolution(server_args, SOURCE, attention_backend=CPU_ATTENTION_BACKEND)


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
    if args.enable_torch_compile and (args.speculative_algorithm or "").upper() == "DFLASH":
        raise ValueError("--enable-torch-compile: on a CPU, SGLang compiles servers without a draft only.")
    if found:
        raise ValueError(
            f"Not served on a CPU: {'; '.join(found)}. SGLang runs that with kernels for GPUs alone, with a "
            "draft or without."
        )


def prepare_ranks(args: Any) -> None:
    """Set CPUs and threads of every rank in the inherited environment; the user's values stay.

    SGLang requires the CPUs of each rank if there are more ranks than NUMA nodes. With the stand-in kernels
    it binds nothing to them.
    """
    ranks = args.tp_size * args.pp_size * args.dp_size
    if ranks == 1:
        return
    cpus = sorted(os.sched_getaffinity(0))
    # A rank's entry is indexed by its device number. SGLang binds nothing to these CPUs with the stand-in.
    devices = args.base_gpu_id + args.gpu_id_step * ranks
    os.environ.setdefault(THREADS_BIND, "|".join([",".join(map(str, cpus))] * devices))
    # PyTorch would start a thread per CPU in every rank, and they would wait for each other.
    os.environ.setdefault(NUM_THREADS, str(max(1, len(cpus) // ranks)))


@patches(
    "sglang.srt.distributed.device_communicators.pynccl_wrapper.find_nccl_library",
    at=LOAD,
    signature="()",
    feature="several ranks on a CPU",
    upstream="docs/dev/upstream/cpu-operators.md",
)
def find_nccl_library() -> str:
    """Report that there is no NCCL: its communicators need a CUDA device, unlike gloo."""
    raise OSError("no CUDA driver on this machine: ranks talk through gloo")


@patches(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler",
    at=FRONT_END,
    signature="(self, obj)",
    feature="refusals of control requests on a CPU",
    upstream="docs/dev/upstream/control-requests.md",
)
def refuse_memory_release(original: Callable[..., None], manager: Any, obj: Any) -> None:
    """Refuse a request for SGLang's memory saver, which would end a CPU's scheduler."""
    from fastapi import HTTPException
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

    if isinstance(obj, ReleaseMemoryOccupationReqInput | ResumeMemoryOccupationReqInput):
        raise HTTPException(400, "SGLang's memory saver needs a GPU. This server runs on a CPU.")
    original(manager, obj)
