"""Fused layers of Qwen3.5 and related targets in PyTorch, with SGLang's arguments."""

import torch


def fused_sigmoid_mul_cpu(x, gate):
    """Multiply x by sigmoid(gate) in place, both [tokens, features]."""
    x.mul_(gate.reshape(x.shape).float().sigmoid())


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim):
    """Normalise heads by 1 + weight: [tokens, heads * dim] -> [tokens * heads, dim]."""
    q, k = q.reshape(-1, head_dim), k.reshape(-1, head_dim)
    return _gemma_rmsnorm(q, q_weight, eps), _gemma_rmsnorm(k, k_weight, eps)


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    """Split q_gate [tokens, heads * 2 * head_dim], normalise q and k; return q, k, gate."""
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).split(head_dim, dim=-1)
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.contiguous().view(-1, head_dim)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, num_heads_qk, num_heads_v, head_qk, head_v):
    """Split q | k | v | z and b | a, [tokens, ...]; z becomes [tokens, heads, value dim]."""
    qkv, z = qkvz.split([2 * num_heads_qk * head_qk + num_heads_v * head_v, num_heads_v * head_v], dim=-1)
    b, a = ba.split([num_heads_v, num_heads_v], dim=-1)
    return qkv.contiguous(), z.reshape(-1, num_heads_v, head_v), b.contiguous(), a.contiguous()


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
    """Compute norm(x) * activation(z), or norm(x * activation(z)) unless `norm_before_gate`.

    `x` and `z` are [.., features]. `group_size` features are normalised together, or all features if it is
    None.
    """
    y = x.float()
    gate = None
    if z is not None:
        gate = z.float().sigmoid() if activation == "sigmoid" else torch.nn.functional.silu(z.float())
    if gate is not None and not norm_before_gate:
        y = y * gate
    groups = y.unflatten(-1, (-1, group_size or y.shape[-1]))
    if not is_rms_norm:
        groups = groups - groups.mean(-1, keepdim=True)
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight.float()
    if bias is not None:
        y = y + bias.float()
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


def launch_fused_gate_sigmoid_mul(hidden_states, gate_weight, shared_output, output, do_add):
    """Write a shared expert's output times its gate to `output`, or add it if `do_add`.

    `gate_weight` is [hidden], the other tensors are [tokens, hidden].
    """
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()
    gated = shared_output.float() * gate[:, None]
    output.copy_(output.float() + gated if do_add else gated)


def _gemma_rmsnorm(x, weight, eps):
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * (1 + weight.float())).to(x.dtype)
