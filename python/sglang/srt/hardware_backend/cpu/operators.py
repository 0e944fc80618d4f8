"""Operators of SGLang's CPU path in PyTorch, with SGLang's names and arguments.

Fused layers are those of Qwen3.5 and related targets. Copies between recurrent states replace Triton kernels.
State pools are [layers, slots, ...]. A request with a negative slot or step is left out. The last part puts
operators under `torch.ops.sgl_kernel` for the CPU stand-in.
"""

from functools import partial
from typing import Any

import torch

from sglang_dflash.srt.hardware_backend.cpu import gated_delta_rule
from sglang_dflash.srt.patching import LOAD, WORKER, patches

RECURRENT = "targets with recurrent states on a CPU"
_on_cpu: Any = partial(patches, at=LOAD, feature=RECURRENT, upstream="docs/dev/upstream/cpu-operators.md")

# -- fused layers


def fused_sigmoid_mul_cpu(x, gate):
    """Multiply x by sigmoid(gate) in place, both [tokens, features]."""
    x.mul_(gate.reshape(x.shape).float().sigmoid())


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim):
    """Normalise heads by 1 + weight: [tokens, heads * dim] -> [tokens * heads, dim]."""
    q, k = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
    return _rms_norm(q, 1 + q_weight.float(), eps), _rms_norm(k, 1 + k_weight.float(), eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    """Split q_gate [tokens, heads * 2 * head_dim], normalise q and k; return q, k, gate."""
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).split(head_dim, dim=-1)
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k=k, **weights, eps=eps, head_dim=head_dim)
    return q, k, gate.contiguous().view(-1, head_dim)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, num_heads_qk, num_heads_v, head_qk, head_v):
    """Split q | k | v | z and b | a, [tokens, ...]; z becomes [tokens, heads, value dim]."""
    qkv, z = qkvz.split([2 * num_heads_qk * head_qk + num_heads_v * head_v, num_heads_v * head_v], dim=-1)
    b, a = ba.split([num_heads_v, num_heads_v], dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


@_on_cpu(
    "sglang.kernels.ops.attention.fla.layernorm_gated.layernorm_fn",
    signature="(x, weight, bias, z, eps, group_size, norm_before_gate, is_rms_norm, activation)",
)
def layernorm_fn(
    x,
    weight,
    bias,
    z=None,
    eps=1e-6,
    group_size=None,
    norm_before_gate=True,
    is_rms_norm=False,
    activation="swish",
):
    """Compute norm(x) * activation(z) by the RMS of all features; x and z are [.., features]."""
    if bias is not None or group_size is not None or not norm_before_gate or not is_rms_norm:
        raise NotImplementedError("layernorm_fn: on a CPU an RMS norm of all features before the gate alone")
    y = _rms_norm(x.float(), weight.float(), eps)
    if z is not None:
        y = y * (z.float().sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(z.float()))
    return y.to(x.dtype)


@_on_cpu(
    "sglang.kernels.ops.elementwise.elementwise._launch_fused_gate_sigmoid_mul",
    signature="(hidden_states, gate_weight, shared_output, output, do_add)",
    feature="targets with shared experts on a CPU",
)
def launch_fused_gate_sigmoid_mul(hidden_states, gate_weight, shared_output, output, do_add):
    """Write a shared expert's output times its gate to `output`, or add it if `do_add`.

    `gate_weight` is [hidden], the other tensors are [tokens, hidden].
    """
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()
    gated = shared_output.float() * gate[:, None]
    output.copy_(output.float() + gated if do_add else gated)


def _rms_norm(x, weight, eps):
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


# -- recurrent states


@_on_cpu(
    "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer",
    signature="()",
    upstream="https://github.com/sgl-project/sglang/pull/37705",
)
def supports_snapshots():
    """Tell SGLang that snapshots of states for the prefix cache are kept here."""
    return True


@_on_cpu("torch.Tensor.pin_memory")
def pin_nothing(tensor, device=None):
    """Return a tensor as it is, in place of `torch.Tensor.pin_memory`."""
    return tensor


@_on_cpu(
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton.track_mamba_states_all_layers",
    signature="(conv_states_pool, ssm_states_pool, cache_indices, mamba_track_mask, mamba_track_indices, "
    "batch_size, check_freed_slots)",
)
def track_mamba_states_all_layers(
    conv_states_pool,
    ssm_states_pool,
    cache_indices,
    mamba_track_mask,
    mamba_track_indices,
    batch_size,
    check_freed_slots=False,
):
    """Copy states of requests in `mamba_track_mask` [bs] for the prefix cache."""
    source, target = cache_indices[:batch_size].long(), mamba_track_indices[:batch_size].long()
    tracked = mamba_track_mask[:batch_size] & (source >= 0) & (target >= 0)
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target[tracked]] = pool[:, source[tracked]]


@_on_cpu(
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify",
    signature="(mamba_caches, state_indices_tensor, last_correct_step_indices, mamba_track_indices, "
    "mamba_steps_to_track, src_indices_raw)",
    upstream="https://github.com/sgl-project/sglang/pull/37851",
)
def scatter_mamba_states_after_mtp_verify(
    mamba_caches,
    state_indices_tensor,
    last_correct_step_indices,
    mamba_track_indices,
    mamba_steps_to_track,
    src_indices_raw=None,
):
    """Make the states after each request's last accepted token its states.

    States after a token on the prefix cache's grid are copied for the cache as well. The verify forward wrote
    all of them to [layers, rows, tokens, ...], request i to row i.
    """
    pairs = [(mamba_caches.temporal, mamba_caches.intermediate_ssm)]
    pairs += zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True)
    bs = last_correct_step_indices.numel()
    rows = torch.arange(bs) if src_indices_raw is None else src_indices_raw.long()
    for pool, steps in pairs:
        if not pool.numel():  # a target without this kind of state: its steps may be shaped otherwise
            continue
        slots, step = state_indices_tensor[:bs].long(), last_correct_step_indices.long()
        copy_step(pool, steps=steps, rows=rows, slots=slots, step=step)
        if mamba_track_indices is not None:
            slots, step = mamba_track_indices.long(), mamba_steps_to_track.long()
            copy_step(pool, steps=steps, rows=rows, slots=slots, step=step)


@_on_cpu(
    "sglang.srt.managers.schedule_batch.set_mamba_track_indices_from_reqs",
    signature="(batch, track_positions)",
    until="0.5.23",
)
def set_mamba_track_indices_from_reqs(batch, track_positions=None):
    """Choose the slots that receive the snapshots of a batch's states, in unpinned memory.

    `track_positions` says which of its buffers is next for each request, or None if the requests know. A
    request whose state has been freed gets -1. Only SGLang 0.5.22 needs this twin.
    """
    known = [req.kv.mamba_next_track_idx for req in batch.reqs]
    positions = [one or 0 for one in known] if track_positions is None else list(track_positions)
    buffers = batch.req_to_token_pool.req_index_to_mamba_ping_pong_track_buffer_mapping
    slots = buffers[batch.req_pool_indices, torch.tensor(positions, dtype=torch.int64)].long()
    is_freed = torch.tensor([one is None for one in known], dtype=torch.bool)
    batch.mamba_track_buffer_indices = positions
    batch.mamba_track_indices = slots.masked_fill(is_freed, -1)


def copy_step(pool, steps, rows, slots, step):
    """Copy the state that a request's row holds after its step to the request's slot.

    `pool` is [layers, slots, ...], `steps` [layers, rows, tokens, ...]; the others have an entry a request.
    """
    taken = (step >= 0) & (slots >= 0)
    pool[:, slots[taken]] = steps[:, rows[taken], step[taken]]


# -- grammars


@patches(
    "sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask",
    at=WORKER,
    signature="(logits, vocab_mask)",
    feature="strict thinking on a CPU",
    upstream="docs/dev/upstream/cpu-operators.md",
)
def apply_vocab_mask(logits, vocab_mask):
    """Apply masks of thoughts, which SGLang does on GPUs only."""
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask, backend="cpu")


# -- torch.ops.sgl_kernel

# SGLang probes for operators and chooses its path by the answer, so no others are defined.
OPERATORS = (
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_sigmoid_mul_cpu,
    gated_delta_rule.fused_gdn_gating_cpu,
    gated_delta_rule.fused_sigmoid_gating_delta_rule_update_cpu,
)


def install() -> None:
    """Put `OPERATORS` under `torch.ops.sgl_kernel`."""
    for operator in OPERATORS:
        setattr(torch.ops.sgl_kernel, operator.__name__, operator)
