"""In place of the installed package's submodule of this name, whose functions call operators of the CUDA-less
build."""

from sglang_dflash.srt.hardware_backend.cpu.gated_delta_rule import (  # noqa: F401
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
)
