"""Names that differ between supported releases of SGLang, on both sides."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  loads our platform plugin before any of SGLang's modules

from sglang_dflash.srt import compat
from sglang_dflash.srt.models import dflash


@pytest.fixture(params=["with", "without"])
def parallel(request, monkeypatch):
    """SGLang with a type of a draft's ranks, or without it, on four ranks that share nothing."""
    group = SimpleNamespace(world_size=2)
    parallel = SimpleNamespace(
        attn_dp_enabled=True,
        attn_tp_group=group,
        attn_tp_size=2,
        attn_cp_size=1,
        attn_dp_size=2,
        enable_prefill_cp=False,
    )
    monkeypatch.setattr(compat, "get_parallel", lambda: parallel)
    if request.param == "without":
        monkeypatch.setitem(sys.modules, "sglang.srt.configs.draft_parallel", None)
    else:
        module = pytest.importorskip(
            "sglang.srt.speculative.draft_parallel", reason="0.5.22 has no such file"
        )
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
        monkeypatch.setattr(module, "draft_attn_parallel_group", lambda: "attn_tp")
    return parallel


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_ranks_of_a_draft(parallel, is_shared):
    parallel.attn_dp_enabled = is_shared
    ranks = compat.resolve_draft_ranks()
    assert ranks.local_dp == is_shared and ranks.attn_tp_size == 2
    assert ranks.tp_group is (parallel.attn_tp_group if is_shared else None)


@pytest.mark.parametrize("group", ["two ranks", None])
def test_the_placement_of_a_draft(group, monkeypatch):
    """SGLang 0.5.22 is told whether the draft has separate ranks, later releases which ones."""
    told = []
    monkeypatch.setattr(
        compat, "draft_tp_context", lambda ranks: told.append(ranks) or contextlib.nullcontext()
    )
    theirs = SimpleNamespace(tp_group=group)
    for ranks in (compat.DraftRanks(group, 2), theirs):
        with compat.run_as_draft(ranks):
            pass
    assert told == [group is not None, theirs]


def test_without_the_kernel_a_draft_takes_the_operators(monkeypatch):
    monkeypatch.setattr(dflash, "table_qk_norm_rope_", None)
    attention = SimpleNamespace(q_norm=object(), head_dim=64)
    assert not dflash.DFlashAttention.norm_and_rotate_in_place(attention, None, None)
