"""The rejection kernel against its PyTorch twins, on a GPU or interpreted."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.kernel_inputs import random_drawn_blocks
from support.rejection_batches import batches
from support.triton_interpreter import DEVICE, against_twin

from sglang_dflash.kernels.ops.speculative import rejection as kernels
from sglang_dflash.srt.layers.draft_probs import DraftProbs
from sglang_dflash.srt.speculative.acceptance.rejection import REJECTION_RULES, draw_final_tokens
from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout


def assert_same_verdict(arguments, rule: str, lengths: np.ndarray | None = None) -> None:
    """Compare whole blocks, or blocks of which each request verifies `lengths` [bs] drafted tokens."""
    block, target_probs, draft, accept_uniforms, final_uniforms = arguments
    whole = np.full(len(block), block.shape[1] - 1)
    layout = VerifyLayout(*block.shape, whole if lengths is None else lengths, DEVICE)
    target_probs = layout.to_rows(target_probs)
    want = REJECTION_RULES[rule](block, target_probs, draft, accept_uniforms, layout)
    got = kernels.accept_drafts_triton(
        block, target_probs, draft.ids, draft.probs, accept_uniforms.contiguous(), rule, *layout.bounds
    )
    assert [tensor.dtype for tensor in got] == [tensor.dtype for tensor in want]
    verdicts = [
        draw_final_tokens(block, accept_len, target_probs, weight, draft, final_uniforms, layout)
        for accept_len, weight in (got, want)
    ]
    for ours, theirs in zip(*verdicts, strict=True):
        assert torch.equal(ours, theirs)


@against_twin
@given(batches(), st.sampled_from([*REJECTION_RULES]), st.one_of(st.none(), st.integers(0, 2**31)))
def test_the_rules_equal_their_twins(arguments, rule, seed):
    block, target_probs, draft, *uniforms = arguments
    draft = DraftProbs(draft.ids.to(DEVICE), draft.probs.to(DEVICE))
    arguments = block.to(DEVICE), target_probs.to(DEVICE), draft, *[u.to(DEVICE) for u in uniforms]
    lengths = None if seed is None else np.random.default_rng(seed).integers(0, block.shape[1], len(block))
    assert_same_verdict(arguments, rule, lengths)


@against_twin
@pytest.mark.parametrize("rule", REJECTION_RULES)
@pytest.mark.parametrize("candidates", [1, 128, 1500])
def test_long_lists_of_candidates_equal_their_twins(candidates, rule):
    """Compare more than a tile of candidates, with a draft that is often right."""
    bs, width = 16, 8
    arguments = random_drawn_blocks(candidates, bs, width, 2000, candidates, DEVICE)
    assert_same_verdict(arguments, rule)
    # The last verified slot has no later one, although its block goes on.
    assert_same_verdict(arguments, rule, np.arange(bs) % width)


def test_an_empty_batch():
    """An empty batch launches no kernel, so this needs no GPU."""
    accept_len, weight = kernels.accept_drafts_triton(
        torch.zeros(0, 3, dtype=torch.int64),
        torch.zeros(0, 3, 4),
        torch.zeros(0, 2, 4, dtype=torch.int64),
        torch.zeros(0, 2, 4),
        torch.zeros(0, 2),
        "block",
    )
    assert (accept_len.shape, accept_len.dtype) == ((0,), torch.int32)
    assert (weight.shape, weight.dtype) == ((0,), torch.float64)
