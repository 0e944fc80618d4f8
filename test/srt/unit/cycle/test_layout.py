"""Rows of a verify forward, compared with a loop over requests and slots."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.srt.speculative.cycle.layout import VerifyLayout, whole_blocks

BLOCK = 8


@given(st.lists(st.integers(0, BLOCK - 1), min_size=1, max_size=6), st.integers(0, 3))
def test_rows_are_the_first_slots_of_each_block(lengths, padding):
    verify_len, bs = max(lengths) + 1, len(lengths)
    places = [(request, slot) for request, length in enumerate(lengths) for slot in range(length + 1)]
    graph = SimpleNamespace(graph_num_tokens=len(places) + padding)
    layout = VerifyLayout(bs, verify_len, np.array(lengths), for_graph=graph)
    blocks = torch.arange(bs * verify_len).view(bs, verify_len)
    rows = [int(blocks[place]) for place in places]
    assert layout.is_rectangle == (len(places) == bs * verify_len and not padding)
    assert layout.shape == (bs, verify_len) and layout.num_rows == len(places) + padding
    assert layout.to_rows(blocks).tolist() == rows + rows[:1] * padding
    assert layout.repeat(None) is None
    assert layout.repeat(torch.arange(bs)).tolist() == [request for request, _ in places] + [0] * padding
    # A slot past a request's rows has its last row.
    row_of = [
        [places.index((request, min(slot, length))) for slot in range(verify_len)]
        for request, length in enumerate(lengths)
    ]
    assert layout.to_blocks(torch.arange(layout.num_rows)).tolist() == row_of
    if layout.is_rectangle:
        assert layout.bounds == (None, None)
        return
    starts, max_accept = layout.bounds
    assert starts.tolist() == [row[0] for row in row_of] and max_accept.tolist() == lengths
    flattened = [request * BLOCK + slot for request, slot in places] + [-1] * padding
    assert layout.columns(BLOCK).tolist() == flattened


@pytest.mark.parametrize("verify_len", [1, BLOCK])
def test_whole_blocks_need_no_map(verify_len):
    layout = whole_blocks(3, verify_len)
    blocks = torch.arange(3 * verify_len).view(3, verify_len)
    assert layout.is_rectangle and torch.equal(layout.to_blocks(layout.to_rows(blocks)), blocks)
    assert layout.repeat(torch.arange(3)).tolist() == [i for i in range(3) for _ in range(verify_len)]
