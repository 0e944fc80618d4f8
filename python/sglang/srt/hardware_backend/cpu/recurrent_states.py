"""Copies between recurrent states in PyTorch, in place of SGLang's Triton kernels.

Pools are [layers, slots, ...]. A request with a negative slot or step is left out.
"""

import torch


def supports_snapshots():
    """Tell SGLang that snapshots of states for the prefix cache are kept here."""
    return True


def pin_nothing(tensor, device=None):
    """Return a tensor as it is, in place of `torch.Tensor.pin_memory`."""
    return tensor


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
        copy_step(pool, steps, rows, state_indices_tensor[:bs].long(), last_correct_step_indices.long())
        if mamba_track_indices is not None:
            copy_step(pool, steps, rows, mamba_track_indices.long(), mamba_steps_to_track.long())


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


def copy_step(pool, steps, rows, slots, step):
    """Copy the state that a request's row holds after its step to the request's slot.

    Args:
        pool: [layers, slots, ...].
        steps: [layers, rows, tokens, ...].
        rows: [bs], a row of each request.
        slots: [bs] likewise.
        step: [bs] likewise.
    """
    taken = (step >= 0) & (slots >= 0)
    pool[:, slots[taken]] = steps[:, rows[taken], step[taken]]
