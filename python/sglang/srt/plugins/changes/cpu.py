"""Changes on a CPU, which has no kernels of SGLang's own."""

from sglang_dflash.srt.plugins import hooks
from sglang_dflash.srt.plugins.change import RECURRENT, SPEED, CpuChange, made_by, our_object

# Targets with recurrent states and several ranks, with a draft or without. Part of AT_LOAD.
AT_CPU_LOAD = (
    CpuChange(
        target="sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
        remove_when="SGLang keeps snapshots on a CPU",
        upstream="https://github.com/sgl-project/sglang/pull/37705",
        feature=RECURRENT,
        signature="()",
        why="the CPU runtime keeps snapshots of recurrent states for the prefix cache, SGLang only on GPUs",
        build=hooks.cpu_snapshot_support,
    ),
    *(
        CpuChange(
            target=f"sglang.kernels.ops.mamba.mamba_state_scatter_triton.{name}",
            remove_when="SGLang has these functions in PyTorch",
            upstream=upstream,
            feature=RECURRENT,
            signature=signature,
            why="SGLang copies recurrent states between slots in Triton, which a CPU cannot run",
            build=our_object(f"srt.hardware_backend.cpu.recurrent_states.{name}"),
        )
        for name, upstream, signature in (
            (
                "track_mamba_states_all_layers",
                "docs/dev/upstream/cpu-operators.md",
                "(conv_states_pool, ssm_states_pool, cache_indices, mamba_track_mask, mamba_track_indices, "
                "batch_size, check_freed_slots)",
            ),
            (
                "scatter_mamba_states_after_mtp_verify",
                "https://github.com/sgl-project/sglang/pull/37851",
                "(mamba_caches, state_indices_tensor, last_correct_step_indices, mamba_track_indices, "
                "mamba_steps_to_track, src_indices_raw)",
            ),
        )
    ),
    CpuChange(
        target="sglang.kernels.ops.attention.fla.layernorm_gated.layernorm_fn",
        remove_when="SGLang has this function in PyTorch",
        upstream="docs/dev/upstream/cpu-operators.md",
        feature=RECURRENT,
        signature="(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, activation)",
        why="the output norm of GatedDeltaNet is a Triton kernel except on CPUs with AMX",
        build=our_object("srt.hardware_backend.cpu.fused_layers.layernorm_fn"),
    ),
    CpuChange(
        target="sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul",
        remove_when="SGLang has this function in PyTorch",
        upstream="docs/dev/upstream/cpu-operators.md",
        feature="targets with shared experts on a CPU",
        signature="(hidden_states, gate_weight, shared_output, output, do_add)",
        why="the gate of a shared expert (Qwen3.5 MoE) is a Triton kernel on any device",
        build=our_object("srt.hardware_backend.cpu.fused_layers.launch_fused_gate_sigmoid_mul"),
    ),
    CpuChange(
        target="torch.Tensor.pin_memory",
        remove_when="SGLang asks whether there is an accelerator",
        upstream="docs/dev/upstream/cpu-operators.md",
        feature=RECURRENT,
        why="SGLang pins a tensor in every decode step with states; PyTorch refuses without an accelerator",
        build=hooks.cpu_pin_memory,
    ),
    CpuChange(
        target="sglang.srt.managers.schedule_batch.set_mamba_track_indices_from_reqs",
        until="0.5.23",
        remove_when="SGLang 0.5.22 is not supported any more",
        upstream="docs/dev/upstream/cpu-operators.md",
        feature=RECURRENT,
        signature="(batch, track_positions)",
        why="SGLang 0.5.22 pins a tensor in every decode step with states, whatever the device",
        build=our_object("srt.hardware_backend.cpu.recurrent_states.set_mamba_track_indices_from_reqs"),
    ),
    CpuChange(
        target="sglang.srt.distributed.device_communicators.pynccl_wrapper.find_nccl_library",
        remove_when="SGLang looks for NCCL on GPUs only",
        upstream="docs/dev/upstream/cpu-operators.md",
        feature="several ranks on a CPU",
        signature="()",
        why="if PyTorch brings NCCL, two ranks on a CPU get a communicator that needs a device",
        build=our_object("srt.hardware_backend.cpu.ranks.find_nccl_library"),
    ),
)

# Equal results in less time. Each entry can be removed alone, with its function in
# `hardware_backend/cpu/speedups/` and that function's test.
CPU_SPEEDUPS = (
    CpuChange(
        target="sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        remove_when="PyTorch takes oneDNN by itself",
        upstream="docs/dev/upstream/cpu-operators.md",
        feature=SPEED,
        signature="(self, layer, x, bias)",
        why="PyTorch takes MKL for float32, twice as slow as oneDNN, and loops over bfloat16 rows without "
        "AVX-512",
        build=made_by("srt.hardware_backend.cpu.speedups.linear.linear_for_this_cpu"),
    ),
    CpuChange(
        target="sglang.srt.layers.layernorm.RMSNorm.forward_native",
        remove_when="SGLang calls PyTorch's norm",
        upstream="docs/dev/upstream/cpu-operators.md",
        feature=SPEED,
        signature="(self, x, residual, post_residual_addition, quant_linear)",
        why="SGLang's norm takes six operators, PyTorch has one that computes the same",
        build=made_by("srt.hardware_backend.cpu.speedups.fused_norm_rope.fused_rms_norm"),
    ),
    CpuChange(
        target="sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native",
        remove_when="SGLang rotates both at once",
        upstream="docs/dev/upstream/cpu-operators.md",
        feature=SPEED,
        signature="(self, positions, query, key, offsets, fused_set_kv_buffer_arg)",
        why="SGLang rotates queries and keys one after the other, in twice the operators",
        build=made_by("srt.hardware_backend.cpu.speedups.fused_norm_rope.fused_rotation"),
    ),
)

AT_CPU_ATTENTION = CPU_SPEEDUPS
