"""Prefill/decode disaggregation on the CPU: all memory is the host's."""

import logging
import os
from typing import Any

import torch

logger = logging.getLogger(__name__)

EARLY_SEND = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"


def prepare_transfer(args: Any) -> None:
    """In the environment that the scheduler inherits: what a prefix cache has is sent with the rest, as sending it before the
    forward waits for a CUDA event. What the user has set stays. And a word on what is left."""
    if args.disaggregation_mode == "prefill":
        os.environ.setdefault(EARLY_SEND, "0")
    elif args.disaggregation_mode == "decode":
        logger.warning(
            "On a CPU a decode server ends when it has to retract a request, as SGLang copies its KV to the host with a CUDA "
            "kernel: give --max-total-tokens that hold all running requests to their end."
        )


def normalize_kv_mem_kinds(kinds: list[str] | None, expected_len: int) -> list[str]:
    """In the place of SGLang's: where KV buffers lie, for nixl. kinds: as SGLang has it, one per buffer, or None."""
    if kinds is not None and len(kinds) != expected_len:
        raise ValueError(f"{len(kinds)} kinds of memory for {expected_len} KV buffers")
    return ["DRAM"] * expected_len


def host_register(buffer: torch.Tensor, registration_granularity_bytes: int | None = None) -> None:
    """In the place of SGLang's, which page-locks `buffer` for a GPU's copies: there is none."""
