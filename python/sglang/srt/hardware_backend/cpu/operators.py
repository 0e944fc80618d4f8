"""Operators of `torch.ops.sgl_kernel` in the CPU stand-in, and the error for all others."""

import torch

from sglang_dflash.srt.hardware_backend.cpu import fused_layers, gated_delta_rule

NAMESPACE = "sgl_kernel"
# SGLang probes for operators and chooses its path by the answer, so no others are defined.
OPERATORS = (
    fused_layers.fused_qk_gemma_rmsnorm_cpu,
    fused_layers.fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_layers.fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_layers.fused_sigmoid_mul_cpu,
    gated_delta_rule.fused_gdn_gating_cpu,
    gated_delta_rule.fused_sigmoid_gating_delta_rule_update_cpu,
)


class MissingOperator(NotImplementedError, AttributeError):
    """Error that names a missing operator. `hasattr` is False, as SGLang's probes expect."""


class Operators(torch._ops._OpNamespace):
    """`torch.ops.sgl_kernel`: operators registered with PyTorch, and plain functions."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name.startswith("__"):
                raise
            raise MissingOperator(
                f"torch.ops.{NAMESPACE}.{name} is not available in the CPU stand-in of sglang-dflash"
            ) from error


def install() -> None:
    """Put `OPERATORS` under `torch.ops.sgl_kernel`."""
    namespace = Operators(NAMESPACE)
    for operator in OPERATORS:
        setattr(namespace, operator.__name__, operator)
    setattr(torch.ops, NAMESPACE, namespace)
