"""Copies between recurrent states in PyTorch, in place of SGLang's Triton kernels.

Pools are [layers, slots, ...]. A request with a negative slot or step is left out.
"""

import torch


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


def track_mamba_states_if_needed(
    conv_states,
    ssm_states,
    cache_indices,
    mamba_track_mask,
    mamba_track_indices,
    batch_size,
    check_freed_slots=False,
):
    """Do as `track_mamba_states_all_layers` for one layer's pools, [slots, ...]."""
    pools = conv_states[None], ssm_states[None]
    track_mamba_states_all_layers(*pools, cache_indices, mamba_track_mask, mamba_track_indices, batch_size)


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
        _copy_step(pool, steps, rows, state_indices_tensor[:bs].long(), last_correct_step_indices.long())
        if mamba_track_indices is not None:
            _copy_step(pool, steps, rows, mamba_track_indices.long(), mamba_steps_to_track.long())


def fused_conv_window_scatter_with_mask(dst, src, dst_indices_raw, step_indices_raw, src_indices_raw=None):
    """Copy one step of each request's convolution windows.

    Args:
        dst: [layers, slots, channels, kernel - 1].
        src: [layers, rows, tokens, channels, kernel - 1], what the verify forward wrote.
        dst_indices_raw: [bs] slots.
        step_indices_raw: [bs] tokens of the block.
        src_indices_raw: [bs] rows; None: request i has row i.
    """
    if not dst.numel():  # a target without convolutions
        return
    steps = step_indices_raw.long()
    rows = torch.arange(len(steps)) if src_indices_raw is None else src_indices_raw.long()
    _copy_step(dst, src, rows, dst_indices_raw.long(), steps)


def set_mamba_track_indices_from_reqs(batch, track_positions=None):
    """Choose the slots that receive the snapshots of a batch's states, in unpinned memory.

    A request whose state has been freed gets -1. Only SGLang 0.5.22 needs this twin.

    Args:
        batch: `mamba_track_buffer_indices` (list) and `mamba_track_indices` [bs] are set.
        track_positions: per request, which of its buffers is next; None: the requests know.
    """
    known = [req.kv.mamba_next_track_idx for req in batch.reqs]
    positions = [one or 0 for one in known] if track_positions is None else list(track_positions)
    buffers = batch.req_to_token_pool.req_index_to_mamba_ping_pong_track_buffer_mapping
    slots = buffers[batch.req_pool_indices, torch.tensor(positions, dtype=torch.int64)].long()
    is_freed = torch.tensor([one is None for one in known], dtype=torch.bool)
    batch.mamba_track_buffer_indices = positions
    batch.mamba_track_indices = slots.masked_fill(is_freed, -1)


def _copy_step(pool, steps, rows, slots, step):
    taken = (step >= 0) & (slots >= 0)
    pool[:, slots[taken]] = steps[:, rows[taken], step[taken]]
