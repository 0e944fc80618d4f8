"""The operators of `torch.ops.sgl_kernel` that the CPU stand-in has, and what it says about the others."""

import torch

from sglang_dflash.srt.hardware_backend.cpu import fused_layers, gated_delta_rule

NAMESPACE = "sgl_kernel"
# SGLang asks which operators there are and changes its path by the answer: only what a path needs, never
# more.
OPERATORS = (
    fused_layers.fused_qk_gemma_rmsnorm_cpu,
    fused_layers.fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_layers.fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_layers.fused_sigmoid_mul_cpu,
    gated_delta_rule.fused_gdn_gating_cpu,
    gated_delta_rule.fused_sigmoid_gating_delta_rule_update_cpu,
)


class MissingOperator(NotImplementedError, AttributeError):
    """`hasattr` says no, as it does where SGLang probes; a call or an import says which operator there is
    none of."""


class _Operators(torch._ops._OpNamespace):
    """`torch.ops.sgl_kernel`: what is registered with PyTorch, and plain functions beside it."""

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
    namespace = _Operators(NAMESPACE)
    for operator in OPERATORS:
        setattr(namespace, operator.__name__, operator)
    setattr(torch.ops, NAMESPACE, namespace)
