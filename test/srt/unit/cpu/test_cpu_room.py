"""Disaggregation on a CPU without servers: KV to host memory and back, KV to send."""

from types import SimpleNamespace

import pytest
import torch
from support.cpu_room.transfer import HostMemoryAgent, back_up_all_layers, restore_layer

LAYERS, SLOTS, HEADS, DIM = 3, 20, 2, 4


def host_pool(layout: str) -> SimpleNamespace:
    """Return a host pool as SGLang lays it out, for a device pool of random KV."""
    shape = (SLOTS, LAYERS) if layout == "page_first" else (LAYERS, SLOTS)
    sides = torch.zeros(2, *shape, HEADS, DIM)
    views = [side.transpose(0, 1) if layout == "page_first" else side for side in sides]
    device = [torch.randn(LAYERS, SLOTS, HEADS, DIM).unbind() for _ in range(2)]
    return SimpleNamespace(
        k_data_refs=[views[0][i] for i in range(LAYERS)],
        v_data_refs=[views[1][i] for i in range(LAYERS)],
        device_k_buffers=device[0],
        device_v_buffers=device[1],
        target_layer_num=LAYERS,
        buffer=sides,
    )


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_kv_comes_back_to_other_slots(layout):
    pool = host_pool(layout)
    was, host, now = torch.tensor([5, 2, 9]), torch.tensor([0, 7, 1]), torch.tensor([11, 12, 4])
    k, v = (torch.stack(side)[:, was].clone() for side in (pool.device_k_buffers, pool.device_v_buffers))
    back_up_all_layers(pool, None, host, was, "kernel")
    assert pool.buffer.ne(0).any(dim=(-1, -2)).sum() == 2 * LAYERS * len(was), (
        "rows of nobody else were written"
    )
    others = [i for i in range(SLOTS) if i not in now.tolist()]
    before = torch.stack(pool.device_k_buffers)[:, others].clone()
    for buffer in (*pool.device_k_buffers, *pool.device_v_buffers):
        buffer[was] = torch.nan  # another request has it now
    for layer in range(LAYERS + 2):  # more than exist, as SGLang requests if the draft's pool is smaller
        restore_layer(pool, None, host, now, layer, "kernel")
    assert torch.equal(torch.stack(pool.device_k_buffers)[:, now], k)
    assert torch.equal(torch.stack(pool.device_v_buffers)[:, now], v)
    kept = [i for i in others if i not in was.tolist()]
    assert torch.equal(
        torch.stack(pool.device_k_buffers)[:, kept], before[:, [others.index(i) for i in kept]]
    )


def test_states_are_sent_as_host_memory():
    """SGLang's calls for states name GPU memory, which nixl refuses without a GPU."""
    nixl = pytest.importorskip("nixl._api")
    config = nixl.nixl_agent_config(backends=["UCX"])
    sender, receiver = (nixl.nixl_agent(name, config) for name in ("sender", "receiver"))
    states = [torch.arange(24.0).view(6, 4), torch.zeros(6, 4)]
    regions = [[(state.data_ptr(), state.nbytes, 0, "")] for state in states]
    with pytest.raises(nixl.nixlBind.nixlBackendError):
        sender.register_memory(regions[0], "VRAM")
    agents = [HostMemoryAgent(agent) for agent in (sender, receiver)]
    for agent, region in zip(agents, regions):
        agent.register_memory(region, "VRAM")
    peer = agents[0].add_remote_agent(agents[1].get_agent_metadata())
    row = states[0][0].nbytes
    rows = [
        agents[0].get_xfer_descs([(state.data_ptr() + slot * row, row, 0)], "VRAM")
        for state, slot in zip(states, (4, 1))
    ]
    transfer = agents[0].initialize_xfer("WRITE", *rows, peer)
    status = agents[0].transfer(transfer)
    while status == "PROC":
        status = agents[0].check_xfer_state(transfer)
    assert status == "DONE"
    assert torch.equal(states[1][1], states[0][4]) and states[1].count_nonzero() == 4
