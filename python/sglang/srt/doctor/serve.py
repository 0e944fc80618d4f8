"""The start of a server, examined without one, for `doctor --serve`.

SGLang and the plugin resolve the arguments as they do at the start of a server, and SGLang's own code sizes
the pools. No weights are loaded. A GPU may be pretended on a machine that has none.
"""

import contextlib
import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from sglang_dflash.srt.configs.checkpoint import FLOATS, Stored
from sglang_dflash.srt.configs.quantization import find_quantization
from sglang_dflash.srt.doctor.pair import BadInput, Checkpoint, Pair
from sglang_dflash.srt.environ import DFlashOptions
from sglang_dflash.srt.hardware_backend.cpu import runtime
from sglang_dflash.srt.observability.server_info import Implementation

logger = logging.getLogger(__name__)

OURS, BUILT_IN, REFUSED = "sglang-dflash", "SGLang's built-in DFLASH", "nobody"
STATUS = {OURS: 0, BUILT_IN: 1, REFUSED: 2}
_CONTEXT_GIB = 0.8  # what CUDA itself takes of a GPU
_GIB = 2**30


@dataclass
class Answer:
    """The outcome of a server's start.

    Attributes:
        served_by: OURS, BUILT_IN or REFUSED.
        device: where the server would run.
        because: why ours does not serve, or why nobody does.
        lost: what the built-in lacks.
        settings: what is on and off, by name.
        memory: sizes by name, in the unit that the name ends with. What is not known is not there.
        log: our lines in the server's log.
    """

    served_by: str
    device: str = ""
    because: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, float] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"served by {self.served_by}" + (f", on {self.device}" if self.device else "")]
        lines += [f"  because {reason}" for reason in self.because]
        lines += [f"  lost: {', '.join(self.lost)}"] * bool(self.lost)
        for title, figures in (("settings", self.settings), ("memory", self.memory)):
            lines += ["", title] * bool(figures)
            lines += [f"  {name:<34}{_text(value)}" for name, value in figures.items()]
        if self.log:
            lines += ["", "in the server's log", *(f"  {line}" for line in self.log)]
        return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def examine(arguments: Sequence[str], gpu_gib: float | None = None) -> Answer:
    """Find out what would become of a server with these arguments.

    Call it once in a process, which holds one server's configuration afterwards.

    Args:
        arguments: the words after `sglang.launch_server`.
        gpu_gib: memory of the pretended GPU, in GiB, inside `pretended_gpu`. None: a device of this machine.

    Raises:
        BadInput: DFLASH is not requested.
    """
    from sglang.srt.arg_groups.model_override_base import resolved_view

    log, ours = BufferingHandler(sys.maxsize), logging.getLogger("sglang_dflash")
    with mock.patch.multiple(ours, handlers=[log], propagate=False, level=logging.INFO):
        try:
            server_args = _resolve(arguments)
        except SystemExit as end:  # SGLang's parser has said why
            return Answer(REFUSED, because=(f"the flags cannot be read (exit status {end.code})",))
        except Exception as error:  # any of them ends the start of a server
            return Answer(REFUSED, because=(str(error) or type(error).__name__,), log=_lines(log))
        args = resolved_view(server_args)
        if str(args.speculative_algorithm).upper() != "DFLASH":
            raise BadInput(f"--serve: DFLASH is not requested, but {args.speculative_algorithm}")
        decision = Implementation.from_server_args(server_args)
        return Answer(
            BUILT_IN if decision.is_builtin else OURS,
            args.device if gpu_gib is None else f"{args.device}, pretended, with {gpu_gib:g} GiB",
            decision.because,
            decision.lost,
            _settings(args, decision.is_builtin),
            _memory(server_args, args, gpu_gib),
            _lines(log),
        )


def _lines(log: BufferingHandler) -> list[str]:
    return [record.getMessage() for record in log.buffer]


def _resolve(arguments: Sequence[str]) -> Any:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    server_args = prepare_server_args(list(arguments))
    logging.getLogger().setLevel(logging.ERROR)  # SGLang's own lines say nothing about the question
    server_args.resolve_once()
    return server_args


@contextlib.contextmanager
def pretended_gpu(gib: float) -> Iterator[None]:
    """Let SGLang, which must not be imported yet, find a Hopper GPU with this much memory.

    Raises:
        BadInput: The machine has a GPU, or SGLang has looked for one already.
    """
    if torch.cuda.is_available() or "sglang" in sys.modules:
        raise BadInput("--gpu-memory is for a machine without a GPU, in a process without SGLang")
    total = int(gib * _GIB)
    properties = SimpleNamespace(major=9, minor=0, total_memory=total, multi_processor_count=132)
    answers = {
        "is_available": True,
        "device_count": 64,
        "current_device": 0,
        "get_device_name": "pretended",
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
        "mem_get_info": (total, total),
    }
    found: dict[str, Any] = {name: lambda *_, answer=answer: answer for name, answer in answers.items()}
    kernels = [runtime.STAND_IN_DIR] if runtime.needs_stand_in() else []
    with (
        mock.patch.multiple(torch.cuda, **found),
        mock.patch.multiple(runtime, needs_stand_in=lambda: False, is_active=lambda: False),
        mock.patch.object(sys, "path", [*kernels, *sys.path]),
        mock.patch.dict(os.environ),
    ):
        os.environ.pop(runtime.CPU_ENGINE_SWITCH, None)  # from a parent that has no GPU either
        yield


def _settings(args: Any, is_builtin: bool) -> dict[str, Any]:
    """Return what is on and off, from the resolved arguments and options."""
    from sglang_dflash.srt.speculative.width.settings import AdaptiveSettings

    block = args.speculative_num_draft_tokens
    found: dict[str, Any] = {"block size": block, "dtype": str(args.dtype)}
    if not is_builtin:
        adaptive = AdaptiveSettings.from_environment()
        widths = adaptive.verify_lens(block, args.device) if adaptive else ()
        found |= {
            "adaptive width": ", ".join(map(str, widths)) if adaptive else False,
            "copies": DFlashOptions.COPY_AHEAD.get(),
            "FlashInfer plans within bounds": DFlashOptions.PLANS_WITHIN_BOUNDS.get(),
            "drawn drafts": bool(args.speculative_use_rejection_sampling),
            "draft head": DFlashOptions.DRAFT_HEAD_DTYPE.get(),
            "draft's window": args.speculative_draft_window_size or False,
        }
    found |= {
        "attention of the target": args.attention_backend,
        "attention of the draft": args.speculative_draft_attention_backend,
        "CUDA graphs of decode": args.device != "cpu" and args.cuda_graph_config.decode.backend != "disabled",
        "overlapped scheduling": not args.disable_overlap_schedule,
        "prefix cache": not args.disable_radix_cache,
        "prefix cache of states": args.mamba_radix_cache_strategy,
        "ReplaySSM": bool(args.enable_linear_replayssm_spec),
        "mixed chunks": bool(args.enable_mixed_chunk),
    }
    return found


def _memory(server_args: Any, args: Any, gpu_gib: float | None) -> dict[str, float]:
    """Return what a rank needs, and the requests that fit. Log what is not known."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.utils.common import get_available_gpu_memory

    found: dict[str, float] = {}
    try:
        target, draft = _weights(args, model_config_of(server_args).dtype.itemsize)
        found |= {"target's weights, GiB": target, "draft's weights, GiB": draft}
        if gpu_gib is None:
            total = get_available_gpu_memory(args.device, 0, empty_cache=False)
        else:
            total = gpu_gib - _CONTEXT_GIB
        found |= _pools(server_args, args, total, total - target - draft)
    except Exception as error:  # files elsewhere, too little memory, a target that SGLang sizes by its model
        logger.info("More of the memory is not known: %s", str(error) or type(error).__name__)
    return found


def _weights(args: Any, float_bytes: int) -> tuple[float, float]:
    """Return GiB of both models' weights on a rank, floats in the server's dtype.

    A quantized draft is dequantized.
    """
    paths = args.model_path, args.speculative_draft_model_path
    for path in paths:
        if not os.path.isdir(os.path.expanduser(path)):
            raise BadInput(f"{path} is no folder of this machine")
    target, draft = (Checkpoint.open(path, with_tensors=True) for path in paths)
    sizes = [sum(_size(tensor, float_bytes) for tensor in each.tensors.values()) for each in (target, draft)]
    if find_quantization(draft.config, str(draft.folder)):
        dense = Pair(target, draft).packed_modules.shapes.values()
        sizes[1] = float_bytes * sum(map(math.prod, dense))
    return sizes[0] / args.tp_size / _GIB, sizes[1] / args.tp_size / _GIB


def _size(tensor: Stored, float_bytes: int) -> int:
    bits = re.search(r"\d+", tensor.dtype)  # none in BOOL
    width = float_bytes if tensor.dtype in FLOATS else int(bits[0]) // 8 if bits else 1
    return math.prod(tensor.shape) * width


def _pools(server_args: Any, args: Any, total_gib: float, free_gib: float) -> dict[str, float]:
    """Return the sizes of the pools, as SGLang's own code finds them beside the weights."""
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
    from sglang.srt.runtime_context import SpawnRanks, get_parallel, get_schedule, publish

    from sglang_dflash.srt.compat import budgeted_draft_bytes

    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    groups = SimpleNamespace(cpu_group=None, world_size=1)
    with (
        mock.patch.object(kv_cache_configurator, "get_available_gpu_memory", lambda *_, **__: free_gib),
        get_parallel().override(world_group=groups),
    ):
        configurator = pool_configurator(server_args, args.device)
        config = configurator._resolve_memory_pool_config(total_gib)
        token = create_memory_pool_configurator(configurator)._cell_size
        found: dict[str, float] = {
            "KV of a token, KiB": token / 1024,
            "the draft's part of it, KiB": (budgeted_draft_bytes(configurator) or 0) / 1024,
            "KV tokens": config.max_total_num_tokens,
            "requests at once": config.max_running_requests,
        }
        if configurator.mambaish_config is not None:
            states = configurator.mambaish_config.mamba2_cache_params
            found["recurrent states of a request, MiB"] = states.mamba_cache_per_req / 2**20
            found["states that are kept"] = get_schedule().max_mamba_cache_size
    return found


def pool_configurator(server_args: Any, device: str) -> Any:
    """Build SGLang's own sizing of pools, without a model."""
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
    from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
        resolve_spec_aux_hidden_state_config,
    )
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    args, model = resolved_view(server_args), ModelConfig.from_server_args(server_args)
    algorithm = SpeculativeAlgorithm.from_string(args.speculative_algorithm)
    _, kv_dtype = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=args.kv_cache_dtype,
        model=None,
        model_dtype=model.dtype,
        is_draft_worker=False,
        is_dflash=True,
        speculative_draft_attention_backend=args.speculative_draft_attention_backend,
    )
    role = {"server_args": server_args, "spec_algorithm": algorithm, "is_draft_worker": False}
    return KVCacheConfigurator(
        device=device,
        gpu_id=0,
        attn_dp_size=get_parallel().attn_dp_size,
        pp_size=1,
        pp_group=None,
        model=None,
        model_config=model,
        kv_cache_dtype=kv_dtype,
        model_dtype=model.dtype,
        page_size=args.page_size,
        sliding_window_size=model.sliding_window_size,
        post_capture_kv_active=False,
        spec_aux_config=resolve_spec_aux_hidden_state_config(model_config=model, **role),
        is_hybrid_swa=model.is_hybrid_swa,
        is_hybrid_swa_compress=False,
        use_mla_backend=model.attention_arch == AttentionArch.MLA,
        layer_info=resolve_layer_indices(model=None, model_config=model, is_draft_worker=False),
        forward_stream=None,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=None,
        memory_pool_config=None,
        **role,
    )
