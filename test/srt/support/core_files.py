"""Test files of the core lane: they import no SGLang and start no server."""

CORE = (
    "test_acceptance.py",
    "test_bench.py",
    "test_block_conv.py",
    "test_cpu_runtime.py",
    "test_cpu_transfer.py",
    "test_draft_attention.py",
    "test_fetch_smollm2.py",
    "test_forked_processes.py",
    "test_fp8_head.py",
    "test_gated_delta_rule.py",
    "test_kernel_comparisons.py",
    "test_kernel_compile.py",
    "test_kernels.py",
    "test_rejection.py",
    "test_rejection_kernel.py",
    "test_roofline.py",
    "test_selector_walk.py",
    "test_speculators_format.py",
    "test_verdicts.py",
    "test_width_policy.py",
)
