"""Ranks of the tokens that replaced rejected ones."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from sglang_dflash.srt.doctor.readings import _ranks
from sglang_dflash.srt.layers.replacement_ranks import REPLACEMENT_RANKS, bucket, replacement_ranks
from sglang_dflash.srt.observability.dflash_metrics import DFlashMetrics
from sglang_dflash.srt.speculative.acceptance.replaced import ReplacedTokens
from sglang_dflash.srt.speculative.cycle.verify_rows import VerifyRows

VOCABULARY = 24


def by_sorting(logits, ids, drafted: int, emitted: int) -> int:
    """Rank 1 is the drafted token's, and the others follow by their logits."""
    if emitted not in ids:
        return 0
    order = [int(ids[k]) for k in np.argsort(-logits, kind="stable")]
    order.remove(drafted)
    return 2 + order.index(emitted)


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 5))
def test_ranks_are_places_in_the_sorted_candidates(seed, n):
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.permutation(40)[:VOCABULARY])
    logits = rng.permutation(n * VOCABULARY).reshape(n, VOCABULARY).astype(np.float32)
    # A selector may have drafted another token than the best.
    drafted = rng.choice(ids, n)
    emitted = (drafted + rng.integers(1, 40, n)) % 40
    found = replacement_ranks(*map(torch.from_numpy, (logits, ids, drafted, emitted)))
    assert found.tolist() == [
        by_sorting(*row) for row in zip(logits, [ids] * n, drafted, emitted, strict=True)
    ]
    columns = {int(token): k for k, token in enumerate(ids)}
    of_text = torch.tensor([[columns.get(int(token), -1) for token in emitted]])
    of_draft = torch.tensor([[columns[int(token)] for token in drafted]])
    assert _ranks(torch.from_numpy(logits)[None], of_text, of_draft)[0].tolist() == found.tolist()


def test_each_rank_has_its_bucket():
    ranks = (2, 3, 4, 5, 8, 9, 16, 17, 5000, 0)
    names = ("2", "3", "4", "5-8", "5-8", "9-16", "9-16", "17+", "17+", "outside")
    assert tuple(map(bucket, ranks)) == names


class Draft:
    """An innermost drafter; a row holds its logits, and token k is in column k."""

    def __init__(self, rows):
        self.latest_rows = rows

    def logits_of(self, rows):
        """Return logits and the tokens of their columns."""
        return rows, torch.arange(VOCABULARY)


def test_only_the_first_rejected_token_of_the_draft_counts():
    """Requests: rejected at once; whole; rejected later; a copy; capped before a right token."""
    registry = CollectorRegistry()
    metrics = DFlashMetrics(3, {"model_name": "m"}, registry)
    rows = torch.arange(VOCABULARY).float().repeat(5, 3, 1)  # the last column is the best
    tokens = torch.full((5, 4), VOCABULARY - 1)
    accepted = SimpleNamespace(
        accept_len=torch.tensor([0, 3, 2, 0, 1]),
        bonus=torch.tensor([VOCABULARY - 2, 0, 4, 9, VOCABULARY - 1]),
    )
    copies = SimpleNamespace(proposals=SimpleNamespace(lengths=torch.tensor([0, 0, -5, 7, 0])))
    cycle = SimpleNamespace(
        bs=5, drafted=None, verify_len=4, rows=VerifyRows(5, 4, np.array([3, 3, 3, 3, 2]))
    )
    draft = Draft(rows)
    counts = ReplacedTokens(draft, copies, metrics, every=1)
    counts.on_drafted(None, cycle, SimpleNamespace(tokens=tokens))
    counts.on_committed(None, cycle, None, accepted)
    wanted = {"2": 1, "17+": 1}
    assert counts.report() == {name: wanted.get(name, 0) for name in REPLACEMENT_RANKS}
    counts.on_committed(None, cycle, None, accepted)  # a cycle without the draft's forward
    assert sum(counts.report().values()) == 2
    for name in REPLACEMENT_RANKS:
        labels = {"model_name": "m", "rank": name}
        assert registry.get_sample_value("sglang:spec_replacement_rank_total", labels) == wanted.get(name, 0)


@pytest.mark.parametrize("every", [1, 4])
def test_a_sample_of_the_cycles_is_counted(every):
    tokens, rows = torch.tensor([[0, 5]]), torch.arange(VOCABULARY).float()[None, None]
    cycle = SimpleNamespace(bs=1, drafted=torch.tensor([0]), verify_len=2, rows=VerifyRows(1, 2))
    accepted = SimpleNamespace(accept_len=torch.tensor([0]), bonus=torch.tensor([VOCABULARY - 1]))
    draft = Draft(rows)
    counts = ReplacedTokens(draft, None, DFlashMetrics(1, None), every)
    assert counts.report() == {}
    for _ in range(8):
        draft.latest_rows = rows
        counts.on_drafted(None, cycle, SimpleNamespace(tokens=tokens))
        counts.on_committed(None, cycle, None, accepted)
    assert counts.report()["2"] == 8 // every
