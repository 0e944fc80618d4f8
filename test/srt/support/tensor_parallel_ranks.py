"""One rank of a tensor-parallel draft, without a server, in a separate process."""

from pathlib import Path
from types import SimpleNamespace

import torch
from support import weight_updates
from support.dflash2_cases import DFlash2Case
from support.draft_cases import Case
from support.engine import start

WORLD = 2
LENGTHS = [11, 4]
# Query and KV heads, MLP and head divide by two; one KV head is replicated instead.
NAMES = ("plain", "one kv head", "sliding, causal")
# The last has more candidates than a rank has rows of the head.
DFLASH2_NAMES = ("as published", "all candidates")


def draft_block(name: str, folder, world_size: int) -> torch.Tensor:
    """Return the tokens that this rank's shard of a draft drafts, [requests, B - 1]."""
    case = (DFlash2Case if name in DFLASH2_NAMES else Case).variant(name, folder)
    attention = case.model.layers[0].self_attn
    assert attention.num_kv_heads == max(1, case.config["num_key_value_heads"] // world_size)
    assert attention.num_heads == case.config["num_attention_heads"] // world_size
    return case.run_blocks(LENGTHS)[2].draft_tokens.view(len(LENGTHS), -1)


def run_rank(rank: int, folder: str) -> None:
    """Draft with every variant in a group of WORLD ranks, save the tokens, and update weights."""
    folder = Path(folder)
    from sglang.srt.distributed.device_communicators import pynccl

    # SGLang creates it for every group of more than one rank; it needs CUDA.
    pynccl.PyNcclCommunicator = lambda **_: SimpleNamespace(disabled=True)
    store = torch.distributed.FileStore(str(folder / "store"), WORLD)
    start(rank, WORLD, store)
    for name in NAMES + DFLASH2_NAMES:
        own = folder / f"{name}-{rank}"
        own.mkdir()
        torch.save(draft_block(name, own, WORLD), own / "tokens.pt")
    weight_updates.run_rank(rank, folder)
