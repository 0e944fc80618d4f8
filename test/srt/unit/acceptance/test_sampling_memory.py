"""Memory of probabilistic drafting on a large server, counted on meta tensors."""

from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_dflash.srt.speculative.acceptance.rejection import REJECTION_RULES, accept_drawn
from sglang_dflash.srt.speculative.acceptance.target_sampling import target_probs
from sglang_dflash.srt.speculative.cycle.layout import whole_blocks
from sglang_dflash.srt.speculative.drafters.sampling import draw_drafts

BS, WIDTH, VOCABULARY, HIDDEN = 48, 16, 151_936, 4096
GIGABYTE = 1 << 30


class Peak(TorchDispatchMode):
    """Peak bytes of tensors created inside, without an operation's own workspace."""

    def __init__(self):
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self._alive.values()))
        return out


def sampling_info(device: str, bs: int = BS) -> SimpleNamespace:
    return SimpleNamespace(
        temperatures=torch.ones(bs, 1, device=device),
        top_ps=torch.full((bs,), 0.9, device=device),
        top_ks=torch.full((bs,), 50, dtype=torch.int32, device=device),
        min_ps=torch.full((bs,), 0.01, device=device),
        sampling_seed=None,
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
        is_any_greedy=True,
        max_top_k=None,
    )


@pytest.fixture
def draft() -> SimpleNamespace:
    """Draft that consists of its vocabulary only."""

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden.shape[0], VOCABULARY, dtype=hidden.dtype, device=hidden.device)

    return SimpleNamespace(draft=SimpleNamespace(draft_vocab_size=VOCABULARY), logits=logits, d2t=None)


@pytest.mark.parametrize("rule", REJECTION_RULES)
def test_a_step_takes_less_than_a_gigabyte(rule, draft):
    """Peak memory excludes the verify logits (0.43 GB), which every step has."""
    logits = torch.zeros(BS * WIDTH, VOCABULARY, device="meta")
    info = sampling_info("meta")
    with Peak() as peak:
        hidden = torch.zeros(BS * (WIDTH - 1), HIDDEN, dtype=torch.bfloat16, device="meta")
        drafted, probs = draw_drafts(draft, hidden, whole_blocks(BS, WIDTH - 1), info)
        layout = whole_blocks(BS, WIDTH)
        target, _ = target_probs(logits, info, layout)
        block = torch.cat((drafted[:, :1], drafted), dim=1)
        uniforms = torch.rand(BS, WIDTH, device="meta")
        accept_drawn(rule, block, target, probs, uniforms[:, 1:], uniforms[:, 0], layout)
    assert GIGABYTE / 20 < peak.bytes < GIGABYTE, f"{peak.bytes / GIGABYTE:.2f} GB"
