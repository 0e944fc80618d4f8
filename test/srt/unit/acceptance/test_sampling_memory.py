"""Memory of probabilistic drafting on a large server, counted on meta tensors."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_dflash.srt.speculative import warm_up
from sglang_dflash.srt.speculative.acceptance.rejection import REJECTION_RULES, accept_drawn
from sglang_dflash.srt.speculative.acceptance.target_sampling import target_probs
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks
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
        max_top_k=None,
    )


@pytest.fixture
def draft() -> SimpleNamespace:
    """Draft that consists of its vocabulary only."""

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden.shape[0], VOCABULARY, dtype=hidden.dtype, device=hidden.device)

    return SimpleNamespace(draft=SimpleNamespace(draft_vocab_size=VOCABULARY), logits=logits, d2t=None)


def fill(draft: SimpleNamespace, rows: torch.Tensor, slots: VerifyLayout, _, info: SimpleNamespace):
    """Draw as `Drafter.fill` does."""
    return draw_drafts(draft, rows, slots, info)


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


@pytest.mark.parametrize("can_draw", [False, True])
def test_the_room_that_sglang_leaves_for_a_sampled_step(can_draw, draft, monkeypatch):
    """The peak of all requests that may run, whose logits are not in a graph."""
    drawn = []

    def sampler(output, sampling_info, **_):
        drawn.append(len(sampling_info.temperatures))
        return torch.softmax(output.next_token_logits, dim=-1).argmax(dim=-1)

    config = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCABULARY, dtype=torch.bfloat16)
    runner = SimpleNamespace(
        max_running_requests=BS, device=torch.device("meta"), model_config=config, sampler=sampler
    )
    worker = SimpleNamespace(
        block_size=WIDTH,
        acceptor=SimpleNamespace(can_draw=can_draw),
        drafter=SimpleNamespace(fill=partial(fill, draft)),
        target_worker=SimpleNamespace(model_runner=runner),
    )
    with Peak() as peak:
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak.bytes)
        found = warm_up.sampling_headroom(worker)
    logits = BS * WIDTH * VOCABULARY * 4
    assert drawn == [BS * WIDTH]
    assert 2 * logits <= found < 3 * logits + GIGABYTE


def test_start_up_allocates_as_much_as_a_step(draft):
    config = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCABULARY, dtype=torch.bfloat16)
    runner = SimpleNamespace(max_running_requests=BS, device=torch.device("meta"), model_config=config)
    with Peak() as at_start_up:
        warm_up.prewarm_probabilistic_step(partial(fill, draft), runner, WIDTH)
    logits = torch.zeros(BS * WIDTH, VOCABULARY, device="meta")
    with Peak() as in_a_step:
        target_probs(logits, sampling_info("meta"), whole_blocks(BS, WIDTH))
    assert in_a_step.bytes <= at_start_up.bytes < GIGABYTE
