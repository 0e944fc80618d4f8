"""Replacement of the installed submodule, whose functions call operators of a CPU build."""

from sglang_dflash.srt.hardware_backend.cpu.gated_delta_rule import (  # noqa: F401
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
)
