"""GatedDeltaNet's recurrence and convolution in PyTorch (arXiv 2412.06464).

Names and arguments are those of the kernels that SGLang's CPU engine calls. All requests of a batch go
through one call. State pools are [slots, ...]; a request's slot is its entry of `indices`. Slots are read in
float32 and written in the pool's dtype. Recurrent states are [value heads, value dim, key dim].
"""

import torch
from torch.nn.functional import silu, softplus

# SGLang keeps the prefix cache's states on this grid (`mamba_chunk_size`).
CHUNK = 64


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    """Compute log decay and learning rate of a, b [tokens, heads], float32 [1, tokens, heads]."""
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


# -- convolution


def causal_conv1d_fn_cpu(
    mixed_qkv_transposed,
    conv_weights,
    bias,
    activation,
    conv_states,
    has_initial_state,
    cache_indices,
    query_start_loc,
    seq_lens_cpu,
):
    """Convolve joined prompts [channels, tokens], depthwise and causal; advance `conv_states`.

    `conv_states` is [slots, channels, width - 1], the inputs before a request's first token if
    `has_initial_state`. `query_start_loc` is [bs + 1], the start of each request's tokens.
    """
    inputs, slots = mixed_qkv_transposed, cache_indices.long()
    channels, total = inputs.shape
    past = conv_weights.shape[1] - 1
    starts = query_start_loc.long()
    lengths = starts.diff()
    request = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    # Request after request: the `past` inputs before its tokens, then its tokens.
    columns = torch.arange(total) + past * (request + 1)
    extended = inputs.new_zeros(channels, total + past * lengths.numel())
    extended[:, columns] = inputs
    before = conv_states[slots].to(inputs.dtype) * has_initial_state[:, None, None]
    first = starts[:-1] + past * torch.arange(lengths.numel())
    window = torch.arange(past)
    extended[:, (first[:, None] + window).flatten()] = before.transpose(0, 1).flatten(1)
    last = first + lengths
    conv_states[slots] = extended[:, (last[:, None] + window)].transpose(0, 1).to(conv_states.dtype)
    taps = [extended[:, columns - past + i] for i in range(past + 1)]
    return _weigh(taps, conv_weights[:, None, :], bias, activation).to(inputs.dtype)


def causal_conv1d_update_cpu(
    mixed_qkv,
    conv_states,
    conv_weights,
    bias,
    activation,
    conv_state_indices,
    intermediate_conv_window=None,
    intermediate_state_indices=None,
    retrieve_next_token=None,
    retrieve_next_sibling=None,
    retrieve_parent_token=None,
):
    """Convolve the next token [bs, channels] or block [bs, channels, tokens] of each request.

    If `intermediate_conv_window` [rows, tokens, channels, width - 1] is given, the states after each token go
    there. They go to rows `intermediate_state_indices`, and `conv_states` stays as it is.
    """
    _check_is_chain(retrieve_parent_token)
    slots = conv_state_indices.long()
    inputs = mixed_qkv if mixed_qkv.dim() == 3 else mixed_qkv[..., None]
    steps, past = inputs.shape[2], conv_weights.shape[1] - 1
    # Rounding to the state's dtype inside a block makes it equal to its tokens one by one.
    extended = torch.cat([conv_states[slots], inputs.to(conv_states.dtype)], dim=2)
    history = extended.to(inputs.dtype)
    taps = [history[..., i : i + steps] for i in range(past)] + [inputs]
    outputs = _weigh(taps, conv_weights[None, :, None, :], bias, activation).to(inputs.dtype)
    if intermediate_conv_window is None:
        conv_states[slots] = extended[..., steps:]
    else:
        rows = intermediate_state_indices.long()
        # [bs, channels, tokens, width - 1]: after token t, the inputs t - width + 2 .. t.
        windows = extended[..., 1:].unfold(2, past, 1)
        intermediate_conv_window[rows, :steps] = windows.transpose(1, 2)
    # Laid out token after token, as SGLang splits a block.
    return outputs.transpose(1, 2).contiguous().transpose(1, 2).view(mixed_qkv.shape)


def _weigh(taps, weights, bias, activation):
    """Sum weights[..., i] * taps[i] in float32, elementwise, in the order of the taps."""
    total = taps[0].float() * weights[..., 0].float()
    for i in range(1, len(taps)):
        total = total + taps[i].float() * weights[..., i].float()
    if bias is not None:
        total = total + bias.float()[:, None]
    return silu(total) if activation in ("silu", "swish") else total


# -- recurrence


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log,
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    cu_seqlens,
    use_qk_l2norm_in_kernel,
    softplus_beta=1.0,
    softplus_threshold=20.0,
    is_kda=False,
    disable_state_update=False,
    intermediate_states_buffer=None,
    intermediate_state_indices=None,
    cache_steps=None,
    retrieve_parent_token=None,
):
    """Run the recurrence over the next tokens of each request.

    `q` and `k` are [1, tokens, key heads, key dim]; `v` and the result are [1, tokens, value heads, value
    dim]. `cu_seqlens` is [bs + 1], the start of each request's tokens. `disable_state_update` leaves the pool
    as it is. If `intermediate_states_buffer` [rows, tokens, value heads, value dim, key dim] is given, the
    states after each token go there, in rows `intermediate_state_indices`.
    """
    if is_kda:
        raise NotImplementedError("sgl_kernel.fused_sigmoid_gating_delta_rule_update_cpu: KDA's vector decay")
    _check_is_chain(retrieve_parent_token)
    bs, value_heads, dtype = initial_state_indices.numel(), v.shape[2], v.dtype
    # Requests with the most tokens come first, so those that have a t-th token are a prefix.
    lengths, order = cu_seqlens.long().diff().sort(descending=True, stable=True)
    steps, lengths = int(lengths[0]), lengths[:, None]
    slots = initial_state_indices.long()[order]
    index = cu_seqlens.long()[:-1][order, None] + torch.arange(steps)
    index = index.clamp(max=v.shape[1] - 1)
    # [bs, heads, tokens, ...]
    rows_of_all = torch.zeros(v.shape[1:], dtype=torch.float32)  # rows behind the last request's stay zero
    q, k, v = (x[0, index].transpose(1, 2).float() for x in (q, k, v))
    q, k = _normalize(q, k, value_heads, use_qk_l2norm_in_kernel)
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float(), softplus_beta, softplus_threshold)
    decay = decay.exp().view(-1, value_heads, 1, 1)[index]
    beta = b.float().sigmoid().view(-1, value_heads, 1, 1)[index]
    state = initial_state_source[slots].float()
    outputs = torch.empty(bs, steps, value_heads, v.shape[3])
    rows = None if intermediate_states_buffer is None else intermediate_state_indices[:bs].long()[order]
    for t, m in enumerate((lengths > torch.arange(steps)).sum(dim=0).tolist()):
        key, now = k[:m, :, t, None, :], state[:m]
        now.mul_(decay[:m, t])
        error = v[:m, :, t, :, None] - (now * key).sum(-1, keepdim=True)
        now.addcmul_(error * beta[:m, t], key)
        outputs[:m, t] = (now * q[:m, :, t, None, :]).sum(-1)
        if rows is not None:
            intermediate_states_buffer[rows[:m], t] = now.to(intermediate_states_buffer.dtype)
    if not disable_state_update:
        initial_state_source[slots] = state.to(initial_state_source.dtype)
    is_own = torch.arange(steps) < lengths
    rows_of_all[index[is_own]] = outputs[is_own]
    return rows_of_all[None].to(dtype)


def chunk_gated_delta_rule_cpu(
    q, k, v, g, beta, initial_state, cu_seqlens, head_first, use_qk_l2norm_in_kernel, initial_state_indices
):
    """Run joined prompts, `CHUNK` tokens at a time; advance the pool `initial_state`.

    `q` and `k` are [1, tokens, key heads, key dim]; `v` is [1, tokens, value heads, value dim]; `g` (log
    decay) and `beta` are [1, tokens, value heads]; `cu_seqlens` is [bs + 1].

    Returns:
        The outputs, shaped like v; None, as the pool holds the last states; and the states at the beginning
        of every chunk, [1, chunks, value heads, value dim, key dim], request after request.
    """
    if head_first:
        raise NotImplementedError("sgl_kernel.chunk_gated_delta_rule_cpu: head_first")
    slots, value_heads, dtype = initial_state_indices.long(), v.shape[2], v.dtype
    lengths = cu_seqlens.long().diff()
    chunks = (lengths + CHUNK - 1) // CHUNK
    first_chunk = chunks.cumsum(0) - chunks
    request = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    # A request's tokens begin a new chunk. The padding of its last chunk decays nothing and adds nothing.
    rows = torch.arange(request.numel()) - cu_seqlens.long()[request] + first_chunk[request] * CHUNK
    # Chunks are shorter if no request fills one; states between chunks still belong to whole chunks.
    size = int(min(CHUNK, lengths.max()))
    rows = rows // CHUNK * size + rows % CHUNK

    def chunked(x):
        """Turn [1, tokens, heads, ...] into [chunks, heads, size, ...]."""
        padded = x.new_zeros(int(chunks.sum()) * size, *x.shape[2:], dtype=torch.float32)
        padded[rows] = x[0].float()
        return padded.view(-1, size, *x.shape[2:]).transpose(1, 2)

    q, k, v, g, beta = map(chunked, (q, k, v, g, beta))
    q, k = _normalize(q, k, value_heads, use_qk_l2norm_in_kernel)
    # Section 3.3: a chunk's updates as one, a unit lower triangular system.
    decay = g.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    pairwise = (decay[..., :, None] - decay[..., None, :]).masked_fill(later, -torch.inf).exp()
    weighted = k * beta[..., None]
    system = (weighted @ k.transpose(-1, -2)) * pairwise
    right = torch.cat([v * beta[..., None], weighted * decay.exp()[..., None]], dim=-1)
    new_values, reads = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    attention = (q @ k.transpose(-1, -2)) * pairwise
    q = q * decay.exp()[..., None]
    k = k * (decay[..., -1:] - decay).exp()[..., None]
    whole_decay = decay[..., -1].exp()[..., None, None]

    outputs = torch.empty_like(v)
    at_chunks = v.new_empty(v.shape[0], value_heads, v.shape[-1], k.shape[-1])
    # [.., key dim, value dim] here. Requests with the most chunks come first, so the active ones are a
    # prefix.
    order = chunks.argsort(descending=True, stable=True)
    state = initial_state[slots[order]].float().transpose(-1, -2)
    for i in range(int(chunks.max())):
        num_active = int((chunks > i).sum())
        now = first_chunk[order[:num_active]] + i
        begin = state[:num_active]
        at_chunks[now] = begin.transpose(-1, -2)
        values = new_values[now] - reads[now] @ begin
        outputs[now] = q[now] @ begin + attention[now] @ values
        end = begin * whole_decay[now] + k[now].transpose(-1, -2) @ values
        state = torch.cat([end, state[num_active:]])
    initial_state[slots[order]] = state.transpose(-1, -2).to(initial_state.dtype)
    rows_of_all = outputs.transpose(1, 2).reshape(-1, value_heads, v.shape[-1])[rows]
    return rows_of_all[None].to(dtype), None, at_chunks[None]


def _normalize(q, k, value_heads, use_l2norm):
    """Scale and repeat q and k [.., heads, tokens, dim] to one head per value head."""
    if use_l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    group = value_heads // q.shape[1]
    return q.repeat_interleave(group, dim=1) * q.shape[-1] ** -0.5, k.repeat_interleave(group, dim=1)


def _check_is_chain(retrieve_parent_token):
    if retrieve_parent_token is not None:
        raise NotImplementedError("sgl_kernel: GatedDeltaNet on a CPU verifies chains, not token trees")
