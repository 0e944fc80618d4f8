"""The start of a server, examined without one, for `doctor --serve`.

SGLang and the plugin resolve the arguments as they do at the start of a server. No weights are loaded. On a
machine without a GPU, SGLang is told that it has a Hopper.
"""

import contextlib
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from logging.handlers import BufferingHandler
from typing import Any

from sglang_dflash.srt.arg_groups.fallback import BUILTIN_LACKS
from sglang_dflash.srt.arg_groups.implementation import Implementation
from sglang_dflash.srt.configs.checkpoint import FLOATS
from sglang_dflash.srt.configs.quantization import find_quantization
from sglang_dflash.srt.doctor.pair import BadInput, Checkpoint, Pair
from sglang_dflash.srt.environ import DFlashOptions

logger = logging.getLogger(__name__)

OURS, BUILT_IN, REFUSED = "sglang-dflash", "SGLang's built-in DFLASH", "no implementation"
NOT_LOADED = "SGLANG_PLUGINS or SGLANG_PLATFORM leaves the plugin out"
STATUS = {OURS: 0, BUILT_IN: 1, REFUSED: 2}
# Facts of SGLang's `override_platform`. Its default attention depends on them, and so may who serves.
HOPPER: dict[str, Any] = {
    "is_cuda": True,
    "is_sm90": True,
    "is_hopper_with_cuda_12_3": True,
    "device_sm": 90,
    "device_capability": (9, 0),
}
# Bytes of a number of a key, 0 for the model's dtype. Other dtypes store scales too.
_KV_BYTES = {"auto": 0, "bf16": 2, "bfloat16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass
class ServeReport:
    """The outcome of a server's start.

    Attributes:
        served_by: OURS, BUILT_IN or REFUSED.
        device: where the server would run.
        because: why ours does not serve, or why none does.
        lost: what the built-in lacks.
        settings: what is on and off, by name.
        memory: sizes by name, in the unit that the name ends with. Unknown sizes are omitted.
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


def examine(arguments: Sequence[str], is_hopper: bool = False) -> ServeReport:
    """Find out what would become of a server with these arguments.

    Call it once in a process, which holds one server's configuration afterwards.

    Args:
        arguments: the words after `sglang.launch_server`.
        is_hopper: answer for a Hopper GPU, which this machine lacks.

    Raises:
        BadInput: DFLASH is not requested.
    """
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.speculative.spec_registry import get_spec

    with _collected_log() as log, override_platform(**(HOPPER if is_hopper else {})):
        try:
            server_args = _resolve(arguments)
        except SystemExit as end:  # SGLang's parser has said why
            return ServeReport(REFUSED, because=(f"the flags cannot be read (exit status {end.code})",))
        except Exception as error:  # any of them ends the start of a server
            return ServeReport(REFUSED, because=(str(error) or type(error).__name__,), log=_lines(log))
        args = resolved_view(server_args)
        if str(args.speculative_algorithm).upper() != "DFLASH":
            raise BadInput(f"--serve: DFLASH is not requested, but {args.speculative_algorithm}")
        decision = Implementation.from_server_args(server_args)
        if get_spec("PEAGLE") is None:  # the plugin registers it
            decision = Implementation("sglang", because=(NOT_LOADED,), lost=BUILTIN_LACKS)
        return ServeReport(
            BUILT_IN if decision.is_builtin else OURS,
            device=f"{args.device}, a Hopper GPU that this machine lacks" if is_hopper else args.device,
            because=decision.because,
            lost=decision.lost,
            settings=_settings(args, decision.is_builtin),
            memory=_memory(server_args, args),
            log=_lines(log),
        )


@contextlib.contextmanager
def _collected_log() -> Iterator[BufferingHandler]:
    """Collect our log lines instead of printing them."""
    log, ours = BufferingHandler(sys.maxsize), logging.getLogger("sglang_dflash")
    before = ours.handlers, ours.propagate, ours.level
    ours.handlers, ours.propagate = [log], False
    ours.setLevel(logging.INFO)
    try:
        yield log
    finally:
        ours.handlers, ours.propagate, level = before
        ours.setLevel(level)


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


def _settings(args: Any, is_builtin: bool) -> dict[str, Any]:
    """Return what is on and off, from the resolved arguments and options."""
    block = args.speculative_num_draft_tokens
    found: dict[str, Any] = {"block size": block, "dtype": str(args.dtype)}
    if not is_builtin:
        found |= {
            "adaptive width": ", ".join(map(str, DFlashOptions.ADAPTIVE.get())) or False,
            "copies": DFlashOptions.COPY_AHEAD.get(),
            "drawn drafts": bool(args.speculative_use_rejection_sampling),
            "wait under the draft": DFlashOptions.WAIT_UNDER_DRAFT.get(),
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


def _memory(server_args: Any, args: Any) -> dict[str, float]:
    """Return a rank's sizes by configs and headers. Log why others are unknown."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import SpawnRanks, publish

    path, found = args.speculative_draft_model_path, {}
    try:
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        model = model_config_of(server_args)
        layers, float_bytes = model.num_hidden_layers, model.dtype.itemsize
        if recurrent := mambaish_config(model):
            layers = len(recurrent.full_attention_layer_ids)
            found["states of a request, MiB"] = recurrent.mamba2_cache_params.mamba_cache_per_req / 2**20
        draft_model = ModelConfig.from_server_args(server_args, model_path=path, is_draft_model=True)
        draft_dtype = args.speculative_draft_kv_cache_dtype or args.kv_cache_dtype
        draft_kv = _kv_bytes(draft_model, draft_model.num_hidden_layers, draft_dtype)
        found["KV of a token, KiB"] = (_kv_bytes(model, layers, args.kv_cache_dtype) + draft_kv) / 1024
        found["the draft's part of it, KiB"] = draft_kv / 1024
        target, draft = (Checkpoint.open(name, with_tensors=False) for name in (args.model_path, path))
        found["target's weights, GiB"] = _weight_bytes(target, float_bytes) / args.tp_size / 2**30
        size = _weight_bytes(draft, float_bytes)
        if find_quantization(draft.config, str(draft.folder)):
            size = float_bytes * sum(map(math.prod, Pair(target, draft).examined_tensors.shapes.values()))
        found["draft's weights, GiB"] = size / args.tp_size / 2**30
    except Exception as error:  # files elsewhere, or configs of which SGLang tells no sizes
        logger.info("More of the memory is not known: %s", str(error) or type(error).__name__)
    return found


def _kv_bytes(model: Any, num_layers: int, dtype: str) -> int:
    from sglang.srt.runtime_context import get_parallel

    if dtype not in _KV_BYTES or model.is_hybrid_swa or getattr(model, "index_head_dim", None):
        raise BadInput(f"KV of --kv-cache-dtype {dtype}, or of windowed or sparse layers")
    numbers = model.get_num_kv_heads(get_parallel().attn_tp_size) * (model.head_dim + model.v_head_dim)
    if model.attention_arch.name == "MLA":
        numbers = model.kv_lora_rank + model.qk_rope_head_dim
    return num_layers * numbers * (_KV_BYTES[dtype] or model.dtype.itemsize)


def _weight_bytes(checkpoint: Checkpoint, float_bytes: int) -> int:
    """Return the size of the stored tensors, with floats in the server's dtype."""
    sizes = dict.fromkeys(FLOATS, float_bytes) | {"I64": 8, "I32": 4}
    return sum(math.prod(each.shape) * sizes.get(each.dtype, 1) for each in checkpoint.tensors.values())
