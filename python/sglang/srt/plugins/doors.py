"""Registrations with SGLang, through its own registries.

Changes that SGLang has no registry for are in `ledger.py`.
"""

import functools
import logging
import os
from typing import Any

from sglang_dflash.srt.hardware_backend.cpu import runtime

# Steps of SGLang's argument pipeline that are wrapped, and more of them on a CPU.
STEPS = ("handle_deprecated_dp_attention", "handle_speculative_decoding")
CPU_STEPS = ("handle_cpu_backends", "handle_model_specific_adjustments")

# SGLang's variable for the application that its HTTP workers import. 0.5.22 has none.
HTTP_WORKERS = "SGLANG_HTTP_SERVER_APP_PATH"


def open_at_load() -> None:
    """Register what every process needs: algorithm, parser, argument steps, CPU attention."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.configs.model_config_parser_registry import register_model_config_parser
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_dflash.srt.arg_groups import dflash_args
    from sglang_dflash.srt.configs.draft_config_parser import DraftConfigParser
    from sglang_dflash.srt.plugins import algorithm, hooks

    algorithm.register()
    wrappers = [hooks.detect_speculators_model, hooks.resolve_speculative_decoding]
    steps = list(STEPS)
    if runtime.is_active():
        wrappers += [dflash_args.default_cpu_args, hooks.adjust_to_cpu]
        steps += CPU_STEPS
        register_attention_backend("torch_native")(hooks.cpu_attention)
    for step, wrapper in zip(steps, wrappers, strict=True):
        register_resolution_hook(step)(wrapper)
    registry_logger = logging.getLogger(register_model_config_parser.__module__)
    registry_logger.disabled = True  # it would warn in every process that its own parser is replaced
    try:
        register_model_config_parser("hf")(DraftConfigParser)
    finally:
        registry_logger.disabled = False


def open_in_front_end() -> None:
    """Register parsers that take a chunk of many tokens, and the application of HTTP workers."""
    from sglang_dflash.srt.parser import piecewise

    piecewise.register()
    os.environ.setdefault(HTTP_WORKERS, "sglang_dflash.srt.plugins.http_workers:app")


def open_in_scheduler() -> None:
    """Register our draft models and FlashInfer backend.

    SGLang has models of the first two names, and a backend, which ours replace.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.models.registry import ModelRegistry

    from sglang_dflash.srt.layers.attention import flashinfer_plans

    create = functools.partial(flashinfer_plans.create_backend, create=ATTENTION_BACKENDS["flashinfer"])
    register_attention_backend("flashinfer")(create)
    ModelRegistry.register("sglang_dflash.srt.models", overwrite=True, strict=True)


def prepare_scheduler(server_args: Any) -> type:
    """Change what a scheduler that runs our DFLASH needs, and return the worker's class."""
    from sglang_dflash.srt.plugins import compatibility, install, ledger
    from sglang_dflash.srt.speculative.implementation import check_ranks_run_ours

    check_ranks_run_ours()
    try:
        install.install(ledger.AT_WORKER)
    except install.Mismatch as mismatch:
        # The arguments are resolved by our rules, so SGLang's own worker cannot take over here.
        raise SystemExit(f"sglang-dflash: {mismatch} {compatibility.HELP}") from mismatch
    open_in_scheduler()
    from sglang_dflash.srt.speculative.dflash_worker import DFlashWorker

    return DFlashWorker
